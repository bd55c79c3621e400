"""Run what people copy first: the example of README.md, the notebook and the script in examples/."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forked_commands import ForkedCommand
from runs import environment
from tawpipe.launch.launcher import Shape, reserved_port, worker_environment

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
SCRIPT = ROOT / "examples" / "from_trainer.py"
OF_FEW = """
import sys
from plan_requests import FEW, looking_at
from tawpipe.cli import main
with looking_at(*FEW):
    sys.exit(main())
"""
"""The notebook's ``tawpipe`` command, whose plans are of a few strategies."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process in an empty folder."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_librarys_example_in_the_readme_runs(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shape = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(shape).save_pretrained("path/to/model")
    rows = torch.randint(64, (2, 4, 16))
    batches = [{"input_ids": each, "labels": each} for each in rows]
    exec(compile(code, "README.md", "exec"), {"batches": batches, "held_out": batches[0]})
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in printed[:2]] == ["StepResult(loss"] * 2 and float(printed[2]) > 0
    AutoModelForCausalLM.from_pretrained("runs/first/model")


@pytest.mark.slow
def test_the_notebook_runs(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tawpipe"
    command.write_text(f"#!{sys.executable}\n{OF_FEW}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"), prepend=os.pathsep)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert re.search(r"tawpipe (\d\.\d+), transformers \1", said)
    assert re.search(r" chosen(, heuristic order)?\s*$", said, re.MULTILINE), said


def test_notebook_contains_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_from_trainer_script_runs_alone_and_as_two_processes(
    alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the variables that torchrun gives, which tests/launch starts."""
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[3] < losses[0]
    AutoModelForCausalLM.from_pretrained("runs/from_trainer/model")
    folder = tmp_path / "several"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with reserved_port() as port:
        started = []
        for rank in range(2):
            given = worker_environment(Shape(1, 2), rank, port=port)
            variables = environment() | {name: value for name, value in given.items() if "TAWPIPE" not in name}
            started.append(
                ForkedCommand([], variables, folder / f"out-{rank}", folder / f"error-{rank}", program=str(SCRIPT))
            )
        codes = [process.wait(240) for process in started]
    assert codes == [0, 0], [(folder / f"error-{rank}").read_text() for rank in range(2)]
    assert [(folder / f"out-{rank}").read_text() for rank in range(2)] == [printed, ""]
