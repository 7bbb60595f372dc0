"""Every configuration that tuning a large shape could time: compiled, and its machine code examined."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from dmuon.kernels.backends.compiled import CUTE, TILELANG, TRITON
from dmuon.kernels.coefficients import polar_express
from dmuon.kernels.gpu.arch import ARCHS
from dmuon.kernels.gpu.binary import KernelSpec, Unsupported
from dmuon.kernels.gpu.cache import BinaryCache
from dmuon.kernels.gpu.load import compile_all
from dmuon.kernels.gpu.resources import resources_of
from dmuon.kernels.gpu.toolchain import tool


def by_rows(spec: KernelSpec) -> bool:
    options = spec.options
    return options.get("by_rows", True) and not options.get("by_columns") and not options.get("column_major")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("backend", [TRITON, TILELANG, CUTE], ids=lambda backend: backend.name)
def test_every_configuration_compiles_and_none_spills(backend, arch, tmp_path):
    try:
        for distribution in backend.requires:
            version(distribution)
        for program in ("cuobjdump", "nvdisasm", *(["nvcc"] if backend is TILELANG else [])):
            tool(program)
    except (PackageNotFoundError, Unsupported) as error:
        pytest.skip(str(error))
    limits = ARCHS[arch]
    specs = backend.specs(2048, 8192, "bf16", limits, polar_express().steps, (1, 3))
    outcomes = compile_all(filter(by_rows, specs), cache=BinaryCache(tmp_path))
    assert len(outcomes) >= 10
    for outcome in outcomes:
        assert outcome.binary is not None, (outcome.spec, outcome.reason)
        found = resources_of(outcome.binary)
        assert found.local_bytes == 0 and found.blocks_per_sm >= 1, (outcome.spec, found)
        assert found.registers <= limits.registers_per_thread
        assert found.static_shared_bytes + found.dynamic_shared_bytes <= limits.shared_bytes
        names = {name.split(".")[0] for name in found.instructions}
        multiplies = not outcome.spec.module.endswith("sums_kernel")
        assert bool(names & {"HMMA", "HGMMA"}) == multiplies, (outcome.spec, found)
        if outcome.spec.module.endswith("sm90_kernel"):
            assert {"HGMMA", "UTMALDG", "UTMASTG"} <= names, (outcome.spec, found)
