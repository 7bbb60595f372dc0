"""The example and the guide's quick start run as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, script, *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    script = tmp_path / "train.py"
    script.write_text(code[1], encoding="utf-8")
    torchrun(2, script)


@pytest.mark.slow
def test_the_example_goes_on_elsewhere(tmp_path: Path) -> None:
    example, out = ROOT / "examples" / "train_fsdp.py", ("--out", str(tmp_path), "--resume")
    printed = torchrun(2, example, "--steps", "12", "--save-every", "5", *out)
    assert "from step 0" in printed
    printed += torchrun(4, example, "--steps", "21", "--hsdp", "2", *out)
    assert "24 owned parameters on 4 ranks" in printed and "from step 12" in printed
    printed += torchrun(1, example, "--steps", "31", *out)
    assert "from step 21" in printed
    steps = [int(step) for step in re.findall(r"step +([0-9]+)  loss", printed)]
    assert steps == [0, 10, 11, 20, 30]
    assert f"{tmp_path / 'last'} is at step 31 already" in torchrun(1, example, "--steps", "31", *out)
    losses = [float(loss) for loss in re.findall(r"  loss ([0-9.]+)", printed)]
    # Had a run begun anew, its loss would be the first again.
    assert max(losses[1:]) < 0.6 * losses[0] and sum(losses[3:]) < sum(losses[1:3])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--zero", "2", "--bf16", "--accumulate", "2")])
def test_the_example_learns(options: tuple[str, ...], tmp_path: Path) -> None:
    printed = torchrun(
        2, ROOT / "examples" / "train_fsdp.py", "--steps", "31", "--out", str(tmp_path), *options
    )
    losses = [float(loss) for loss in re.findall(r"  loss ([0-9.]+)", printed)]
    assert "24 owned parameters on 2 ranks" in printed
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0]
    assert f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last" in printed


@pytest.mark.slow
def test_the_example_goes_on_with_and_without_tensor_parallelism(tmp_path: Path) -> None:
    example, out = ROOT / "examples" / "train_fsdp.py", ("--out", str(tmp_path), "--resume")
    printed = torchrun(4, example, "--tp", "2", "--steps", "21", *out)
    assert "24 owned parameters on 2 ranks of 2 tensor-parallel ones each" in printed
    printed += torchrun(4, example, "--tp", "2", "--hsdp", "2", "--steps", "31", *out)
    printed += torchrun(2, example, "--steps", "41", *out)
    assert "from step 21" in printed and "from step 31" in printed
    losses = [float(loss) for loss in re.findall(r"step .* loss ([0-9.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[1] and max(losses[1:]) < 0.6 * losses[0]
