"""What ``load_shapes`` takes, and what it says of what it cannot take."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.models import load_shapes, shape_spec
from dmuon.models.configs import slots_of_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(
        json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not ...})
    )
    return path


def write_header(path: Path, header: object, claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text)
    return path


def tensor(*shape: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}


def counts(spec: str | Path) -> dict[tuple[int, int], int]:
    return {(shape.m, shape.n): shape.count for shape in load_shapes(str(spec)).matrices()}


def error_of(spec: str | Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_shapes(str(spec))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_config_by_file_and_by_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    expected = {(48, 48): 3 * 4, (48, 80): 3 * 3}
    assert counts(path) == counts(tmp_path) == expected
    assert load_shapes(str(path)).source == str(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "48"}, "hidden_size must be an integer from 1"),
        ({"hidden_size": True}, "hidden_size must be an integer from 1"),
        ({"intermediate_size": 0}, "intermediate_size must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10000"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"model_type": ...}, "'model_type' is missing"),
        ({"model_type": "no_such_thing"}, "unknown architecture 'no_such_thing'"),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 4},
            "'moe_intermediate_size' is missing",
        ),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "'num_key_value_heads' is missing"),
        ({"model_type": "paligemma", "text_config": 3, "vision_config": {}}, "text_config must be an object"),
        (
            {"model_type": "paligemma", "text_config": {"model_type": "x"}, "vision_config": {}},
            "gemma, gemma2",
        ),
    ],
)
def test_bad_config(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_config(tmp_path, **changes)
    message = error_of(path)
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize("text", ["{", "[1]", "", "\x00", "[" * 100_000])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert str(path) in error_of(path)


def test_an_architecture_without_builder_is_built_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_config(tmp_path, model_type="olmo2", num_key_value_heads=2)
    assert counts(path) == {(48, 48): 3 * 2, (16, 48): 3 * 2, (48, 80): 3 * 3}


def test_without_transformers_an_unknown_architecture_says_how_to_get_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dmuon.models.configs.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"unknown architecture 'olmo2'.*llama.*dmuon\[hf\]"):
        slots_of_config({**LLAMA, "model_type": "olmo2"}, "here")


def test_a_config_that_transformers_refuses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_config(tmp_path, model_type="olmo2", hidden_size="wide")
    assert "transformers cannot build a 'olmo2'" in error_of(path)


def test_safetensors_as_the_library_writes_them(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "model.embed_tokens.weight": torch.zeros(20, 8),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(16, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.bias": torch.zeros(16),
        "model.layers.0.experts.down_proj": torch.zeros(3, 8, 12),
        "model.layers.0.packed": torch.zeros(16, 8, dtype=torch.int32),
        "lm_head.weight": torch.zeros(20, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = {(8, 16): 1, (8, 12): 3}
    assert counts(tmp_path / "model.safetensors") == counts(tmp_path) == expected


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A terabyte of weights that are not there does no harm."""
    path = write_header(tmp_path / "huge.safetensors", {"w": tensor(1_000_000, 500_000)})
    assert counts(path) == {(500_000, 1_000_000): 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no plausible header length"),
        (b"\x10\x00\x00", "no plausible header length"),
        (struct.pack("<Q", 2**62) + b"{}", "no plausible header length"),
        (struct.pack("<Q", 0), "no plausible header length"),
        (struct.pack("<Q", 100) + b'{"w": ', "truncated: the header has 6 of 100 bytes"),
        (struct.pack("<Q", 4) + b"nope", "not valid JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "must be a JSON object"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = error_of(path)
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize("shape", [None, 3, "3", [3, -1], [3, 2.5], [True, 2], [[3]]])
def test_safetensors_with_a_bad_shape(tmp_path: Path, shape: object) -> None:
    path = write_header(tmp_path / "m.safetensors", {"w": {"dtype": "F32", "shape": shape}})
    assert "'w' has a bad shape" in error_of(path)


def test_index_and_its_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "1.safetensors", "b.weight": "2.safetensors"}}))
    write_header(tmp_path / "1.safetensors", {"a.weight": tensor(4, 8), "unlisted.weight": tensor(3, 3)})
    assert "2.safetensors is missing" in error_of(index)
    write_header(tmp_path / "2.safetensors", {"b.weight": tensor(8, 4)})
    assert counts(index) == counts(tmp_path) == {(4, 8): 2}
    write_header(tmp_path / "2.safetensors", {"c.weight": tensor(8, 4)})
    assert "holds no 'b.weight'" in error_of(index)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "x"])
def test_bad_index(tmp_path: Path, content: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    assert str(index) in error_of(index)


def test_an_index_reads_nothing_outside_its_folder(tmp_path: Path) -> None:
    write_header(tmp_path / "secret.safetensors", {"a.weight": tensor(4, 8)})
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"a.weight": "../secret.safetensors"}}))
    assert "beside the index" in error_of(index)


def test_a_folder_with_nothing_or_too_much(tmp_path: Path) -> None:
    assert "nothing of the kind" in error_of(tmp_path)
    write_header(tmp_path / "a.safetensors", {"w": tensor(4, 8)})
    write_header(tmp_path / "b.safetensors", {"w": tensor(4, 8)})
    assert "2 .safetensors files and no index" in error_of(tmp_path)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_factories.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Space:\n"
        "    build = staticmethod(lambda: nn.Sequential(nn.Linear(2**20, 2**20), nn.Linear(6, 4)))\n"
        "def no_module(): return 3\n"
        "def raises(): raise RuntimeError('told\\nyou')\n"
        "def vectors(): return nn.LayerNorm(8)\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return "my_factories"


def test_factory_in_the_working_directory_is_built_on_meta(factories: str) -> None:
    assert counts(f"{factories}:Space.build") == {(2**20, 2**20): 1, (4, 6): 1}


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("no_module", "must return an nn.Module, got int"),
        ("raises", "the factory raised RuntimeError: told"),
        ("missing", "missing"),
        ("value", "must be callable"),
        ("vectors", "no matrix for Muon among 2 parameters (1 × normalisation, 1 × bias)"),
    ],
)
def test_bad_factory(factories: str, factory: str, said: str) -> None:
    assert said in error_of(f"{factories}:{factory}")


def test_factory_whose_module_cannot_be_imported() -> None:
    assert "No module named 'no_such_package_of_ours'" in error_of("no_such_package_of_ours:build")


def test_no_matrix_says_what_there_was(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.safetensors", {"norm.weight": tensor(8), "wte.weight": tensor(9, 8)})
    assert "no matrix for Muon among 2 parameters (1 × normalisation, 1 × embedding)" in error_of(path)
    assert "no parameters at all" in error_of(write_header(tmp_path / "e.safetensors", {}))


@pytest.mark.parametrize("spec", ["gpt5", "no/such/file.json", "a b:c", ""])
def test_nothing_of_the_name(spec: str) -> None:
    message = error_of(spec)
    assert "neither a preset (gpt2, " in message or "needs a config.json" in message


def test_a_name_too_long_for_a_file() -> None:
    assert "cannot be read" in error_of("x" * 5000)


def test_another_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    assert "must be a config.json" in error_of(path)


def test_shape_spec() -> None:
    [shape] = shape_spec("11008x4096", count=32).matrices()
    assert (shape.m, shape.n, shape.count) == (4096, 11008, 32)
    assert shape_spec(" 8 X 3 ") == shape_spec("8×3") == shape_spec("8x3")


@pytest.mark.parametrize(
    "text", ["", "4096", "4096x", "x4", "0x4", "4x0", "-1x4", "4.5x4", "4x4x4", "٤x٤", "1e3x4"]
)
def test_bad_shape_spec(text: str) -> None:
    with pytest.raises(ValueError, match="4096x11008"):
        shape_spec(text)


def test_bad_count() -> None:
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        shape_spec("4x4", count=0)
