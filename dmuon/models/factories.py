"""A model from ``package.module:factory``, built on the meta device."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn


def is_factory(spec: str) -> bool:
    """Whether ``spec`` has the form ``package.module:factory``."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", spec) is not None


def build(spec: str) -> nn.Module:
    """Import the module, the working directory first on the path as with ``python -m``, and call the factory.

    Raises:
        ValueError: the module or the factory is not there, either raises, or the result is no ``nn.Module``.
    """
    module_name, _, attribute = spec.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ValueError(f"{spec}: importing {module_name} failed: {_text(error)}") from error
    try:
        factory = attrgetter(attribute)(module)
    except AttributeError as error:
        raise ValueError(f"{spec}: {error}") from error
    if not callable(factory):
        raise ValueError(f"{spec}: must be callable without arguments, got {type(factory).__name__}")
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ValueError(f"{spec}: the factory raised {_text(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec}: must return an nn.Module, got {type(model).__name__}")
    return model


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
