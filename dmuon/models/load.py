"""From what a user calls a model by to the shapes of its parameters."""

from __future__ import annotations

from pathlib import Path

from dmuon.models.configs import slots_of_config
from dmuon.models.factories import build, is_factory
from dmuon.models.headers import INDEX, read_json, slots_of_file, slots_of_index
from dmuon.models.presets import preset_config, preset_names
from dmuon.models.shapes import ModelShapes
from dmuon.policy import MatrixPolicy
from dmuon.slots import Slot, slots_of_model


def load_shapes(spec: str, policy: MatrixPolicy | None = None) -> ModelShapes:
    """Route the parameters of the model that ``spec`` names; no weight is loaded.

    ``spec`` is one of

    * a preset (:func:`~dmuon.models.presets.preset_names`), in upper or lower case;
    * a ``config.json`` of Hugging Face transformers, or a folder that has one;
    * a ``.safetensors`` file, an index of them (``model.safetensors.index.json``), or a folder with either;
    * ``package.module:factory``, called without arguments on the meta device.

    Raises:
        ValueError: nothing of the kind is there, it cannot be understood, or it holds no matrix for Muon.
    """
    try:
        name, source, slots = _find(spec.strip())
    except OSError as error:
        raise ValueError(f"{spec}: cannot be read: {error.strerror}") from error
    shapes = ModelShapes(name, source, tuple((policy or MatrixPolicy()).route_slots(slots)))
    if not any(routing.matrices for routing in shapes.parameters):
        raise ValueError(f"{spec}: no matrix for Muon among {_what_there_was(shapes)}")
    return shapes


def _find(spec: str) -> tuple[str, str, list[Slot]]:
    path = Path(spec)
    if spec.lower() in preset_names():
        source, config = preset_config(spec)
        return spec.lower(), source, slots_of_config(config, f"preset {spec.lower()}")
    if path.is_dir():
        return (path.resolve().name, *_in_folder(path))
    if path.is_file():
        return (path.name, *_in_file(path))
    if is_factory(spec):
        return spec, f"built on the meta device by {spec}", slots_of_model(build(spec))
    raise ValueError(
        f"no model {spec!r}: neither a preset ({', '.join(preset_names())}), nor a file or folder, "
        "nor package.module:factory"
    )


def _in_folder(folder: Path) -> tuple[str, list[Slot]]:
    for name in ("config.json", INDEX):
        if (folder / name).is_file():
            return _in_file(folder / name)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _in_file(files[0])
    found = f"{len(files)} .safetensors files and no index" if files else "nothing of the kind"
    raise ValueError(f"{folder}: needs a config.json, a {INDEX} or one .safetensors file, and has {found}")


def _in_file(path: Path) -> tuple[str, list[Slot]]:
    if path.suffix == ".safetensors":
        return f"header of {path}", slots_of_file(path)
    if path.name.endswith(".safetensors.index.json"):
        return f"headers of the shards of {path}", slots_of_index(path)
    if path.suffix == ".json":
        return str(path), slots_of_config(read_json(path), str(path))
    raise ValueError(f"{path}: must be a config.json, a .safetensors file or an index of them")


def _what_there_was(shapes: ModelShapes) -> str:
    reasons: dict[str, int] = {}
    for routing in shapes.parameters:
        reasons[routing.reason] = reasons.get(routing.reason, 0) + 1
    listed = ", ".join(f"{count} × {reason}" for reason, count in reasons.items())
    return f"{len(shapes.parameters)} parameters ({listed})" if listed else "no parameters at all"
