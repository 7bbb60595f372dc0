"""Parameters of a model from its Hugging Face ``config.json``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmuon.models.builders import BUILDERS
from dmuon.models.fields import Fields
from dmuon.slots import Slot, slots_of_model


def slots_of_config(config: Mapping[str, Any], where: str) -> list[Slot]:
    """List the parameters of the model that ``config`` describes; ``where`` names it in errors.

    Architectures in :data:`~dmuon.models.builders.BUILDERS` are listed from their dimensions. Others are
    built on the meta device by transformers, where it is installed, from its own classes only.

    Raises:
        ValueError: no ``model_type``, one that nobody knows, or a field that is missing or out of range.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{where}: the field 'model_type' is missing")
    if model_type in BUILDERS:
        return BUILDERS[model_type](Fields(config, where))
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{where}: unknown architecture {model_type!r}; known without transformers: "
            f"{', '.join(sorted(BUILDERS))}; for more, pip install 'dmuon[hf]'"
        )
    return slots_of_model(_build_on_meta(config, model_type, where))


def _build_on_meta(config: Mapping[str, Any], model_type: str, where: str) -> nn.Module:
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{where}: unknown architecture {model_type!r}, to transformers {transformers.__version__} too"
        )
    try:
        hf_config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(config))
        with torch.device("meta"):
            model: nn.Module = _class_of(hf_config)._from_config(hf_config)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where}: transformers cannot build a {model_type!r} from it: {reason}") from error
    return model


def _class_of(hf_config: Any) -> Any:
    """The class that ``architectures`` names, if transformers has it, else the one for the type."""
    import transformers

    for name in hf_config.architectures or ():
        known = getattr(transformers, name, None)
        if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
            return known
    mappings = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING)
    for mapping in mappings:
        if type(hf_config) in mapping:
            return mapping[type(hf_config)]
    raise ValueError("it has a configuration of this kind but no model")
