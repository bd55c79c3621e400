"""Scripts for one GPU: they are imported, parsed and, where a CPU can, run."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tawpipe
from gpu import checks, coding, common, ranks, steps
from tawpipe.prove.checks import CHECKS
from tawpipe.runtime.transport import exact
from tawpipe.schedule.strategies.table import strategies

FOLDER = Path(common.__file__).parent
SHELL = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_is_imported_without_a_gpu_and_has_a_main(path: Path) -> None:
    module = importlib.import_module(f"gpu.{path.stem}")
    assert path.stem == "common" or callable(module.main)


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.stem)
def test_shell_scripts_parse_and_name_existing_modules_and_checks(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    for name in re.findall(r"-m gpu\.(\w+)", text):
        assert (FOLDER / f"{name}.py").exists(), name
    for setting in re.findall(r'"(side=[^"$]*)"', text):
        assert steps.Setting.read(setting).side in steps.SIDES
    for names in re.findall(r"prove:([\w,]+)", text) + re.findall(r'prove\[@\]\}" ([\w ]+?) --out', text):
        assert set(re.split("[ ,]", names)) <= {check.name for check in CHECKS}, names
    for names in re.findall(r"--strategies ([\w,-]+)", text):
        assert set(names.split(",")) <= strategies().keys()
    for words in re.findall(r"^ranks \d \d \d+ ([a-z0-9 ]+)$", text, re.MULTILINE):
        assert set(words.split()) <= checks.CHECKS.keys(), words


def test_readme_lists_every_leg_of_the_gpu_scripts_with_its_time_limit() -> None:
    readme = (FOLDER / "README.md").read_text()
    for path in SHELL:
        for name, limit in re.findall(r"^leg (\w+) (\d+)", path.read_text(), re.MULTILINE):
            assert f"| `{name}` | {limit} s |" in readme, name


def test_failed_and_late_legs_are_reported_and_the_next_leg_runs(tmp_path: Path) -> None:
    script = tmp_path / "legs.sh"
    legs = ("leg good 20 echo holds it", "leg bad 20 false", "BUDGET=$((SECONDS + 3))", "leg late 9 true")
    script.write_text("\n".join([f'source "{FOLDER}/common.sh"', *legs, ""]))
    done = subprocess.run(["bash", str(script), str(tmp_path / "out")], capture_output=True, text=True, timeout=60)
    lines = (tmp_path / "out" / "times.txt").read_text().splitlines()
    assert [line.split(" after")[0] for line in lines] == [
        "-- good: exit code 0",
        "-- bad: exit code 1",
        "-- late: no time left",
    ]
    assert "holds it" in done.stdout
    assert subprocess.run(["bash", str(script)], capture_output=True).returncode == 2


def test_unknown_step_setting_is_refused() -> None:
    assert steps.Setting.read("side=plain shape=8b:4 most=72").config().num_hidden_layers == 4
    with pytest.raises(ValueError, match="got colour=2; expected NAME=VALUE with one of side, shape"):
        steps.Setting.read("side=ours colour=2")


def test_coding_benchmark_reports_equal_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exact, "GPU_SEGMENT", exact.GPU_SEGMENT)
    coding.measure(*coding.changed(20_000, torch.device("cpu")), 14)
    assert json.loads(capsys.readouterr().out)["same_bits"]


def test_gpu_ranks_reports_exit_codes_and_output_of_failed_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("import os, sys\nsys.exit(f'no {os.environ[\"NCCL_HOSTID\"]}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ranks.run(2, 1, 60, ["fails"]) == 1
    said = capfd.readouterr()
    assert "--- rank 1: exit code 1\nno host1" in said.out and "exit codes [1, 1]" in said.out


def run(*words: str, beside: str = "") -> str:
    """The output of a module on the CPU, which has ended well; ``beside`` is a folder of more modules."""
    path = f"{Path(tawpipe.__file__).parents[1]}:{FOLDER.parent}:{beside}"
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"), [(("1", "2"), ("sum", "slices", "generate")), (("2", "2"), ("exact", "nf4")), ((), ("serve",))]
)
def test_gpu_checks_pass_on_a_cpu(ranks: tuple[str, ...], names: tuple[str, ...]) -> None:
    first = ("gpu.ranks", *ranks, "300") if ranks else ()
    said = run(*first, "gpu.checks", "--device", "cpu", *names)
    assert re.findall(r"^holds (\w+):", said, re.MULTILINE) == list(names)


STAND_IN = """
import torch.nn.functional as F

def liger_fused_linear_cross_entropy(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)
"""


@pytest.mark.slow
def test_gpu_step_benchmark_runs_every_side_on_a_cpu(tmp_path: Path) -> None:
    """With Liger's loss, for which a CPU has a stand-in, the losses are those of a loss in chunks."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package / "functional.py").write_text(STAND_IN)
    sides = [f"side={side} shape=tiny tokens=16 rows=2 steps=2 warm=0" for side in steps.SIDES]
    sides += [f"{side} recompute=none micro=2 fused_loss=1" for side in sides if "ours" not in side]
    printed = run("gpu.steps", "--device", "cpu", *sides, beside=str(tmp_path))
    losses = {line["what"]: line["losses"] for line in map(json.loads, printed.splitlines()) if "losses" in line}
    assert [*losses] == sides
    for side in sides[1:3]:
        assert losses[f"{side} recompute=none micro=2 fused_loss=1"] == pytest.approx(losses[side], abs=0.02)
