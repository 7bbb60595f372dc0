"""`dmuon-tune compile`, and `doctor --arch`, on a stand-in for kernels."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from threading import Timer

import pytest
from cli_helpers import check_one_line_error, invoke

sys.path.append(str(Path(__file__).parents[1] / "kernels" / "gpu"))

from fake_kernels import fake, install

from dmuon.cli import ahead
from dmuon.kernels.backends.compiled import CompiledBackend
from dmuon.kernels.gpu import toolchain
from dmuon.kernels.gpu.binary import Unsupported
from dmuon.kernels.gpu.cache import BinaryCache


class FakeBackend(CompiledBackend):
    """Two good kernels for wide matrices in fp16, one in bf16, and those that ``does`` names."""

    def __init__(self, *does: str) -> None:
        super().__init__("fancy", "click", "click", {})
        self.does = does

    def specs(self, m, n, dtype, arch, steps, restarts):
        good = [fake(arch=arch.name, dtype=dtype, tile=tile) for tile in (64, 128)]
        bad = [fake(does, arch=arch.name, tile=64) for does in self.does]
        return (good if dtype == "fp16" else good[:1]) + bad


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return install(tmp_path, monkeypatch)


@pytest.fixture
def backend(monkeypatch):
    """Install a backend of that kind, alone beside one that compiles nothing."""

    def add(*does: str) -> None:
        monkeypatch.setattr(ahead, "BACKENDS", {"torch": object(), "fancy": FakeBackend(*does)})

    add()
    return add


COMPILE = ("compile", "gpt2", "--arch", "sm_90a", "--jobs", 2)


def test_a_model_is_compiled_and_then_comes_from_the_cache(backend):
    first = json.loads(invoke(*COMPILE, "--json").stdout)
    assert (first["compiled"], first["cached"], first["failed"], first["not_reached"]) == (2, 0, 0, 0)
    assert first["arch"] == "sm_90a" and first["precisions"] == ["fp16"] and first["model"] == "gpt2"
    assert [kernel["options"]["tile"] for kernel in first["kernels"]] == [64, 128]
    assert len(list(Path(first["folder"]).glob("*.kernel"))) == 2
    second = json.loads(invoke(*COMPILE, "--precision", "bf16,fp16", "--json").stdout)
    assert (second["compiled"], second["cached"]) == (1, 2) and second["precisions"] == ["bf16", "fp16"]
    text = invoke(*COMPILE).stdout
    assert max(map(len, text.splitlines())) <= 80 or "kept in" in text.splitlines()[-1]
    assert "fancy" in text and "2 cached, in" in text


def test_a_shape_does_instead_of_a_model(backend):
    document = json.loads(invoke("compile", "--shape", "64x32", "--arch", "sm_80", "--json").stdout)
    assert document["compiled"] == 2 and BinaryCache().load(fake(arch="sm_80", dtype="fp16", tile=64))


def test_failures_are_named_and_stop_nothing(backend):
    backend("raise", "abort", "unsupported")
    result = invoke(*COMPILE, code=1)
    text = " ".join(result.stdout.split())
    assert "1 failed: compiling fake_kernel for sm_90a failed: RuntimeError: no such intrinsic" in text
    assert "SIGABRT: LLVM ERROR: cannot select" in text and "needs a compiler that is not here" in text
    assert "2 compiled, 3 failed, in" in text
    assert "failed: triton fake does=raise tile=64" in result.stderr
    document = json.loads(invoke(*COMPILE, "--json", code=1).stdout)
    assert (document["cached"], document["failed"]) == (2, 3)
    assert [kernel["status"] for kernel in document["kernels"]] == ["cached"] * 2 + ["failed"] * 3


def test_a_compiler_that_hangs_is_given_up(backend):
    backend("hang")
    document = json.loads(invoke(*COMPILE, "--timeout", 2, "--json", code=1).stdout)
    assert document["failed"] == 1 and "still compiling after 2 s" in document["kernels"][2]["reason"]


def test_ctrl_c_keeps_what_is_finished(backend, monkeypatch):
    from dmuon.kernels.gpu import load

    real = load.compile_all

    def interrupted(specs, *, progress, **options):
        real(list(specs)[:1], progress=progress, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "compile_all", interrupted)
    document = json.loads(invoke(*COMPILE, "--json", code=130).stdout)
    assert document["interrupted"] and (document["compiled"], document["not_reached"]) == (1, 1)
    assert "1 cached, 1 not reached" in invoke(*COMPILE, code=130).stdout


def test_a_scheduler_ends_it_as_ctrl_c_does(backend, monkeypatch, tmp_path):
    """SIGTERM while a compiler hangs: the summary comes, and no temporary folder is left."""
    backend("hang")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, timer = signal.getsignal(signal.SIGTERM), Timer(3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    text = invoke(*COMPILE, code=130).stdout
    timer.join()
    assert "2 compiled, 1 not reached" in text
    assert not list(tmp_path.glob("dmuon-compile-*"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_off_a_terminal_a_line_tells_of_progress(backend):
    assert "2 of 2 kernels" in invoke(*COMPILE).stderr.splitlines()


def test_nothing_to_compile_is_told(monkeypatch):
    monkeypatch.setattr(ahead, "BACKENDS", {"torch": object()})
    assert "No backend that is installed has kernels" in invoke(*COMPILE, code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gpt2", "--arch", "sm_70"), "arch must be one of sm_80, sm_86"),
        (("gpt2",), "no GPU here to compile for; give --arch, one of sm_80"),
        (("--arch", "sm_80"), "name a MODEL or give --shape"),
        (("gpt2", "--shape", "64x64", "--arch", "sm_80"), "name a MODEL or give --shape"),
        (("--shape", "64", "--arch", "sm_80"), "a shape is written as in 4096x11008"),
        (("gpt3", "--arch", "sm_80"), "gpt3"),
        (("gpt2", "--arch", "sm_80", "--precision", "fp32"), "GPU kernels compute in fp16 and bf16"),
        (("gpt2", "--arch", "sm_80", "--backend", "torch"), "those with kernels to compile are fancy"),
    ],
)
def test_bad_input_is_one_line(backend, arguments, says):
    check_one_line_error("compile", *arguments, says=says)


def test_a_backend_without_its_dsl_is_left_out_or_named(monkeypatch):
    absent = CompiledBackend("absent", "absent", "absent-dsl", {})
    monkeypatch.setattr(ahead, "BACKENDS", {"absent": absent, "fancy": FakeBackend()})
    assert json.loads(invoke(*COMPILE, "--json").stdout)["compiled"] == 2
    check_one_line_error(*COMPILE, "--backend", "absent", says="absent-dsl is not installed")


def test_where_nothing_can_be_kept_it_does_not_begin(backend, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DMUON_CACHE", str(tmp_path / "file" / "cache"))
    check_one_line_error(*COMPILE, says="Not a directory")


DOCTOR = ("doctor", "--arch", "sm_90a", "--shape", "256x1024")


@pytest.fixture
def tools():
    try:
        toolchain.tool("cuobjdump")
    except Unsupported as error:
        pytest.skip(str(error))


def test_doctor_examines_kernels(backend, fakes, tools):
    source = fakes.read_text()
    real = "from dmuon.kernels.gpu.toolchain import assemble\n" + source.replace(
        'b"cubin"', "assemble(PTX, spec.arch)"
    )
    fakes.write_text(real)
    document = json.loads(invoke(*DOCTOR, "--json").stdout)
    assert (document["m"], document["n"], document["precision"]) == (256, 1024, "fp16")
    first = document["kernels"][0]
    assert (
        first["kernel"] == "fake" and first["problem"] is None and set(first["estimates"]) == {"H100", "H200"}
    )
    assert first["resources"]["local_bytes"] == 0 and first["resources"]["dynamic_shared_bytes"] == 4096
    text = invoke(*DOCTOR).stdout
    assert max(map(len, text.splitlines())) <= 80
    for word in ("fancy fake", "tile=128", "regs", "least", "H100, H200"):
        assert word in text


def test_doctor_reports_kernels_that_cannot_be_examined(backend, tools):
    backend("raise")
    document = json.loads(invoke(*DOCTOR, "--json", code=1).stdout)
    problems = [kernel["problem"] for kernel in document["kernels"]]
    assert "cuobjdump failed" in problems[0] and "no such intrinsic" in problems[2]
    assert "no such intrinsic" in " ".join(invoke(*DOCTOR, code=1).stdout.split())


def test_doctor_says_what_the_options_go_with(backend):
    check_one_line_error("doctor", "--shape", "64x64", says="go with --arch")
    check_one_line_error("doctor", "--arch", "sm_1", says="arch must be one of")


def test_doctor_reads_the_cache():
    cache = BinaryCache()
    for seed in range(3):
        cache.store_failure(fake(seed=seed), "boom" if seed else "no such intrinsic")
    (cache.folder / "broken.kernel").write_bytes(b"garbage")
    found = json.loads(invoke("doctor", "--json", "--timeout", 0.1).stdout)["compiled_kernels"]
    assert found["binaries"] == 1 and "broken.kernel" in found["damaged"][0] and len(found["failed"]) == 3
    text = " ".join(invoke("doctor", "--timeout", 0.1).stdout.split())
    assert "it is compiled again when needed" in text
    assert "2 kernels: boom" in text and "1 kernel: no such intrinsic" in text


def test_doctor_shows_what_the_environment_sets(monkeypatch):
    monkeypatch.setenv("DMUON_GRAPHS", "off")
    monkeypatch.delenv("DMUON_AUTOTUNE", raising=False)
    settings = json.loads(invoke("doctor", "--json", "--timeout", 0.1).stdout)["settings"]
    assert settings["DMUON_GRAPHS"] == "off" and "DMUON_AUTOTUNE" not in settings
    assert "DMUON_GRAPHS off" in " ".join(invoke("doctor", "--timeout", 0.1).stdout.split())
