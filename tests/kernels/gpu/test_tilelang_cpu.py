"""The TileLang kernel's body on TileLang's CPU target: tiles, mirrors and arithmetic, without pipelines or layouts."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_products import beyond, call_of, fill, matrices

from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import Binary
from dmuon.kernels.gpu.tilelang_kernels.symmetric import SYMMETRIC

pytest.importorskip("tilelang")

CONFIG = {"tile": 32, "block_k": 32, "stages": 2, "threads": 64, "policy": "Square"}
KINDS = {"float": "<f", "int32_t": "<i", "int64_t": "<q"}


def compiled_for_cpu(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """The C function that TileLang makes of the kernel, and its parameters as ``"type name"``."""
    from dmuon.kernels.gpu.tilelang_kernels.compile import TILELANG_TEMPLATE_PATH, tilelang, tvm
    from dmuon.kernels.gpu.tilelang_kernels.symmetric_kernel import symmetric

    target = tvm.target.Target({"kind": "c"})
    # Its vectors of halves lack conversions.
    with target, tvm.transform.PassContext(opt_level=3, config={"tirx.disable_vectorize": True}):
        source = tilelang.lower(symmetric(**options, copying="plain"), target=target).kernel_source
    code, library = folder / "kernel.cc", folder / "kernel.so"
    code.write_text(source)
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{TILELANG_TEMPLATE_PATH}",
        code,
        "-o",
        library,
    ]
    subprocess.run(command, check=True, capture_output=True)
    declared = re.search(r"dmuon_symmetric_kernel\((.*?)\)", source)
    assert declared
    return ctypes.CDLL(str(library)).dmuon_symmetric_kernel, declared.group(1).split(", ")


@pytest.mark.parametrize(
    ("op", "dtype", "by_columns"),
    [
        ("gram", "fp16", True),
        pytest.param("gram", "fp16", False, marks=pytest.mark.slow),
        pytest.param("symmetric_product", "fp16", False, marks=pytest.mark.slow),
    ],
)
def test_body(tmp_path: Path, op: str, dtype: str, by_columns: bool) -> None:
    """Ten tile rows, so that more than a band of them is walked; ragged, batched and strided."""
    m, n = 300, 72
    A = fill(
        matrices(2, m, n if op == "gram" else m, dtype, by_columns=by_columns), 1, symmetric=op != "gram"
    )
    B = None if op == "gram" else matrices(2, m, m, dtype).copy_(-A)
    out = fill(matrices(2, m, m, "fp32"), 2, symmetric=True)
    call = call_of(op, A, B, out, out, 0.5, -2.0, 3.0)
    expected = 0.5 * (A.double() @ (A.mT if B is None else B).double()) - 2.0 * out.double()
    expected += 3.0 * torch.eye(m).double()
    untouched = beyond(out)

    spec = SYMMETRIC.spec(call, CONFIG, ARCHS["sm_80"])
    function, params = compiled_for_cpu(tmp_path, **spec.options)
    names = [param.split()[-1] for param in params]
    binary = Binary(spec, "", 1, 0, (), "", b"", extra={"params": names, "maps": {}})
    values: list[Any] = []
    for param, data in zip(params, SYMMETRIC.launch(call, CONFIG, binary, 1).args, strict=True):
        assert isinstance(data, bytes)
        if "*" in param:
            values.append(ctypes.c_void_p(struct.unpack("<Q", data)[0]))
        else:
            kind = KINDS[param.split()[0]]
            (value,) = struct.unpack(kind, data)
            values.append({"<f": ctypes.c_float, "<i": ctypes.c_int32, "<q": ctypes.c_int64}[kind](value))
    function(*values)
    assert torch.equal(out.double(), expected)
    assert torch.equal(beyond(out), untouched)
