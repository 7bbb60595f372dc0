"""What the text of a PTX module says about its kernel: entry name, parameter layout, block size."""

from __future__ import annotations

import re

from dmuon.kernels.gpu.binary import Param

_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def entry_of(ptx: str) -> str:
    """The name of the only kernel in ``ptx``.

    Raises:
        ValueError: there is none, or more than one.
    """
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(names) != 1:
        raise ValueError(f"expected one kernel in the PTX, found {names}")
    return str(names[0])


def params_of(ptx: str) -> tuple[Param, ...]:
    """Where the kernel's parameters lie, in order: each at the next multiple of its alignment."""
    found = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", ptx, re.DOTALL)
    params, end = [], 0
    for text in re.findall(r"\.param\s[^,]*", found.group(1) if found else ""):
        kind = re.search(r"\.[busf](8|16|32|64)\b", text)
        assert kind, f"unknown parameter type in {text!r}"
        unit = _BYTES[kind.group(1)]
        count = re.search(r"\[(\d+)\]", text)
        declared = re.match(r"\.param\s+\.align\s+(\d+)", text)
        align = int(declared.group(1)) if declared else unit
        size = unit * (int(count.group(1)) if count else 1)
        offset = -(-end // align) * align
        params.append(Param(offset, size))
        end = offset + size
    return tuple(params)


def threads_of(ptx: str) -> int:
    """Threads of a block, as the kernel requires (``.reqntid``) or else allows at most (``.maxntid``).

    Raises:
        ValueError: it says neither.
    """
    found = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx)
    if not found:
        raise ValueError("the PTX says neither .reqntid nor .maxntid")
    x, y, z = (int(side or 1) for side in found.groups())
    return x * y * z
