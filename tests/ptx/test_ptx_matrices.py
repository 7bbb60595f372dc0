"""ldmatrix, stmatrix, mma and wgmma, element by element as the PTX manual draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ptx.snippets import call

TYPES: dict[str, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


def _integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(count: int, trans: str) -> None:
    x = torch.arange(count * 64, dtype=torch.int16)
    out = torch.zeros(32, count, dtype=torch.int32)
    registers = [f"%r{10 + k}" for k in range(count)]
    body = (
        """
        mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1;
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd10, %rd0, %rd10;
        """
        + "".join(
            f"ld.global.u32 %r3, [%rd10+{128 * k}]; st.shared.u32 [%r2+{128 * k}], %r3;" for k in range(count)
        )
        + f"""
        mad.lo.u32 %r4, %r0, 16, %r1;
        setp.ge.u32 %p1, %r0, {8 * count}; @%p1 mov.u32 %r4, 0xFFFFFFF0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{", ".join(registers)}}}, [%r4];
        mul.wide.u32 %rd11, %r0, {4 * count}; add.s64 %rd11, %rd1, %rd11;
        """
        + "".join(f"st.global.u32 [%rd11+{4 * k}], {r};" for k, r in enumerate(registers))
    )
    call(body, x, out, shared=512)
    matrices = x.view(count, 8, 8)
    found = out.view(torch.int16).view(32, count, 2)
    for lane in range(32):
        for k in range(count):
            for j in range(2):
                row, column = lane // 4, 2 * (lane % 4) + j
                want = matrices[k, column, row] if trans else matrices[k, row, column]
                assert found[lane, k, j] == want


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(trans: str) -> None:
    x = torch.arange(256, dtype=torch.int16)
    out = torch.zeros_like(x)
    body = f"""
        mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 16, %r1; mul.wide.u32 %rd10, %r0, 16;
        add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd11]; st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r4, %r5, %r6, %r7}};
        ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2]; st.global.v4.u32 [%rd12], {{%r4, %r5, %r6, %r7}};
    """
    call(body, x, out, shared=512)
    assert torch.equal(out, x)


def _place(lane: int, register: int, j: int, group: int) -> tuple[int, int]:
    """Row and column of an element of A (or of C, whose column group is 8 wide)."""
    return lane // 4 + 8 * (register % 2), group * (register // 2) + lane % 4 * (group // 4) + j


@pytest.mark.parametrize(
    ("kind", "k", "sums"),
    [
        ("f16", 16, "f32"),
        ("bf16", 16, "f32"),
        ("bf16", 8, "f32"),
        ("f16", 8, "f16"),
        ("tf32", 8, "f32"),
        ("tf32", 4, "f32"),
    ],
)
def test_mma(kind: str, k: int, sums: str) -> None:
    dtype = TYPES[kind]
    per = 4 // dtype.itemsize
    A, B = _integers(16, k, seed=0, dtype=dtype), _integers(k, 8, seed=1, dtype=dtype)
    C = _integers(16, 8, seed=2, dtype=torch.float32 if sums == "f32" else torch.float16)
    a_count, b_count, c_count = k // (2 * per), k // (4 * per), 4 if sums == "f32" else 2
    a = torch.zeros(32, a_count, per, dtype=dtype)
    b = torch.zeros(32, b_count, per, dtype=dtype)
    c = torch.zeros(32, c_count, 4 // c_count, dtype=C.dtype)
    for lane in range(32):
        for j in range(per):
            for r in range(a_count):
                a[lane, r, j] = A[_place(lane, r, j, 4 * per)]
            for r in range(b_count):
                b[lane, r, j] = B[4 * per * r + lane % 4 * per + j, lane // 4]
        for r in range(2):
            for j in range(2):
                c.view(32, 2, 2)[lane, r, j] = C[lane // 4 + 8 * r, 2 * (lane % 4) + j]
    out = torch.zeros_like(c)
    a_regs, b_regs, c_regs = (
        [f"%r{first + i}" for i in range(n)] for first, n in ((10, a_count), (20, b_count), (30, c_count))
    )
    lines = []
    for tensor, registers in enumerate((a_regs, b_regs, c_regs)):
        lines.append(f"mul.wide.u32 %rd10, %r0, {4 * len(registers)}; add.s64 %rd11, %rd{tensor}, %rd10;")
        lines += [f"ld.global.b32 {r}, [%rd11+{4 * i}];" for i, r in enumerate(registers)]
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{sums}.{kind}.{kind}.{sums}"
    vectors = ", ".join("{" + ", ".join(r) + "}" for r in (c_regs, a_regs, b_regs, c_regs))
    lines.append(f"{opcode} {vectors};")
    lines.append(f"mul.wide.u32 %rd10, %r0, {4 * c_count}; add.s64 %rd11, %rd3, %rd10;")
    lines += [f"st.global.b32 [%rd11+{4 * i}], {r};" for i, r in enumerate(c_regs)]
    report = call("\n".join(lines), a, b, c, out)
    want = A.double() @ B.double() + C.double()
    for lane in range(32):
        for r in range(2):
            for j in range(2):
                assert out.view(32, 2, 2)[lane, r, j] == want[lane // 4 + 8 * r, 2 * (lane % 4) + j]
    assert report.mma[opcode] == 1 and report.flops == 2 * 16 * 8 * k


def test_a_run_of_mma_is_the_same_at_once() -> None:
    """Four products of two A and two B, fused by the interpreter, against one at a time (a jump target between)."""
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = torch.cat([x, x.flip(0)], 1).contiguous()
    loads = "mul.wide.u32 %rd10, %r0, 48; add.s64 %rd11, %rd0, %rd10;" + "".join(
        f"ld.global.b32 %r{10 + i}, [%rd11+{4 * i}];" for i in range(12)
    )
    clear = "".join(f"mov.b32 %r{100 + i}, {'0f3F800000' if i == 5 else '0f00000000'};" for i in range(16))
    parts = []
    for i in range(2):
        for j in range(2):
            d = "{" + ", ".join(f"%r{100 + 4 * (2 * i + j) + n}" for n in range(4)) + "}"
            a = "{" + ", ".join(f"%r{10 + 4 * i + n}" for n in range(4)) + "}"
            b = "{" + ", ".join(f"%r{18 + 2 * j + n}" for n in range(2)) + "}"
            parts.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {a}, {b}, {d};")
    stores = "mul.wide.u32 %rd10, %r0, 64; add.s64 %rd11, %rd1, %rd10;" + "".join(
        f"st.global.b32 [%rd11+{4 * i}], %r{100 + i};" for i in range(16)
    )
    results = []
    for between in ("", "L{}:"):
        out = torch.zeros(32, 16)
        text = "".join(between.format(i) + part for i, part in enumerate(parts))
        report = call(loads + clear + text + stores, x, out)
        assert sum(report.mma.values()) == 4 and report.count("mma") == 4
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


# wgmma. A matrix of (lines, elements) lies in shared memory in a canonical layout: by columns of a swizzle's width,
# 8 lines at a time, as TMA would write boxes of that width.


Bytes = np.ndarray[Any, Any]


def _canonical(matrix: torch.Tensor, swizzle: int, memory: Bytes, base: int, by_k: bool) -> tuple[int, int]:
    """Writes ``matrix`` (lines × elements) at ``base``, and returns leading and stride offsets for a descriptor."""
    lines, elements = matrix.shape
    data = matrix.contiguous().view(torch.uint8).numpy().reshape(lines, -1)
    item = matrix.element_size()
    width = swizzle or 16
    panels = elements * item // width
    panel_bytes = lines * width
    for line in range(lines):
        for panel in range(panels):
            for chunk in range(width // 16):
                address = base + panel * panel_bytes + line * width + chunk * 16
                if swizzle:
                    address ^= ((address >> 7) % (swizzle // 16)) << 4
                memory[address : address + 16] = data[line, panel * width + chunk * 16 :][:16]
    eight = 8 * width
    if swizzle:
        return (16 if by_k else panel_bytes), eight
    return (panel_bytes, eight) if by_k else (eight, panel_bytes)


def _descriptor(address: int, leading: int, stride: int, swizzle: int) -> int:
    kind = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return address >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | kind << 62


@pytest.mark.parametrize("swizzle", [128, 64, 32, 0])
@pytest.mark.parametrize(
    ("kind", "a_by_k", "b_by_k"),
    [
        ("bf16", True, True),
        ("f16", True, False),
        ("bf16", False, True),
        ("f16", False, False),
        ("tf32", True, True),
    ],
)
@pytest.mark.parametrize("n", [8, 128])
def test_wgmma_from_shared_memory(swizzle: int, kind: str, a_by_k: bool, b_by_k: bool, n: int) -> None:
    dtype = TYPES[kind]
    k = 32 // dtype.itemsize
    span = max(swizzle, 32) // dtype.itemsize
    if not b_by_k and n < span:
        n = span
    A, B = _integers(64, span, seed=0, dtype=dtype), _integers(n, span, seed=1, dtype=dtype)
    A_used, B_used = A[:, :k], B[:, :k]
    memory = np.zeros(1024 + (1 << 16), np.uint8)
    a_matrix, b_matrix = (A if a_by_k else A_used.mT), (B if b_by_k else B_used.mT)
    a_at, b_at = 1024, 1 << 15
    descriptors = [
        _descriptor(at, *_canonical(matrix, swizzle, memory, at, by_k), swizzle)
        for at, matrix, by_k in ((a_at, a_matrix, a_by_k), (b_at, b_matrix, b_by_k))
    ]
    found = _run_wgmma(memory[1024:], descriptors, n, k, kind, f"{int(not a_by_k)}, {int(not b_by_k)}")
    assert torch.equal(found, (A_used.float() @ B_used.float().mT) * 2)


def _run_wgmma(memory: Bytes, descriptors: list[int], n: int, k: int, kind: str, flags: str) -> torch.Tensor:
    """D = 2·A·B (once with scale-d 0, once more added), gathered from the accumulators."""
    words = torch.from_numpy(memory.copy())
    out = torch.zeros(128, n // 2)
    d = [f"%f{i}" for i in range(n // 2)]
    transposes = f", {flags}" if kind != "tf32" else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"
    vector = "{" + ", ".join(d) + "}"
    body = f"""
        mov.u32 %r1, smem; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; mad.lo.u32 %r2, %r0, 16, %r1;
        mov.u32 %r3, 0;
    COPY:
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd11]; st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
        add.s64 %rd11, %rd11, 2048; add.u32 %r2, %r2, 2048; add.u32 %r3, %r3, 2048;
        setp.lt.u32 %p1, %r3, {words.numel()}; @%p1 bra COPY;
        fence.proxy.async; bar.sync 0;
        mov.b64 %rd20, {descriptors[0]}; mov.b64 %rd21, {descriptors[1]};
        wgmma.fence.sync.aligned;
        {{ .reg .pred p; setp.ne.b32 p, 0, 0; {opcode} {vector}, %rd20, %rd21, p, 1, 1{transposes}; }}
        {{ .reg .pred p; setp.ne.b32 p, 1, 0; {opcode} {vector}, %rd20, %rd21, p, 1, 1{transposes}; }}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mul.wide.u32 %rd10, %r0, {2 * n}; add.s64 %rd12, %rd1, %rd10;
    """ + "".join(f"st.global.f32 [%rd12+{4 * i}], {r};" for i, r in enumerate(d))
    call(body, words, out, threads=128, shared=1 << 16)
    matrix = torch.zeros(64, n)
    for thread in range(128):
        for i in range(n // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            matrix[row, i // 4 * 8 + 2 * (thread % 4) + i % 2] = out[thread, i]
    return matrix


def test_wgmma_with_a_from_registers_and_negated() -> None:
    A, B = _integers(64, 16, seed=3, dtype=torch.bfloat16), _integers(8, 64, seed=4, dtype=torch.bfloat16)
    memory = np.zeros(4096, np.uint8)
    leading, stride = _canonical(B, 128, memory, 1024, True)
    a = torch.zeros(128, 4, 2, dtype=torch.bfloat16)
    for thread in range(128):
        for r in range(4):
            for j in range(2):
                row, column = _place(thread % 32, r, j, 8)
                a[thread, r, j] = A[16 * (thread // 32) + row, column]
    words, out = torch.from_numpy(memory[1024:3072].copy()), torch.zeros(128, 4)
    body = f"""
        mov.u32 %r1, smem; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd0, %rd10; mad.lo.u32 %r2, %r0, 16, %r1;
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd11]; st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
        add.s64 %rd12, %rd1, %rd10; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd12];
        mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0f3F800000;
        fence.proxy.async; bar.sync 0;
        mov.b64 %rd21, {_descriptor(1024, leading, stride, 128)}; setp.eq.u32 %p1, 0, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
            {{%f0, %f1, %f2, %f3}}, {{%r4, %r5, %r6, %r7}}, %rd21, %p1, -1, 1, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        add.s64 %rd13, %rd2, %rd10; st.global.v4.f32 [%rd13], {{%f0, %f1, %f2, %f3}};
    """
    for seed in (None, 0, 1):
        call(body, words, a, out, threads=128, shared=4096, seed=seed)
        want = 1 - A.float() @ B[:, :16].float().mT
        for thread in range(128):
            for i in range(4):
                row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2)
                assert out[thread, i] == want[row, 2 * (thread % 4) + i % 2]
