"""What a run says before its first step: little, in plain words, and nothing about settings that nobody set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tawpipe.cli import main
from tawpipe.options.files import read_mapping

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["--nproc", "1", "--device", "cpu", "--evaluation.every", "0", "--export.enabled", "false"]
JARGON = re.compile(r"\b(homes?|visits?|look-ahead|rounds?|units?)\b")


def before_the_first_step(said: str) -> list[str]:
    lines = said.partition("\nstep ")[0].splitlines()
    return [line for line in lines if not re.match(r"measuring for |planning: .* so far\)$", line)]  # of a slow machine


@pytest.mark.parametrize("data", [pytest.param([], marks=pytest.mark.slow), ["--data", __file__, "--plan", "none"]])
def test_run_prints_few_plain_lines_before_its_first_step(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with the defaults, and a smaller one."""
    words = ["train", *SHORT, *data, "--steps", "1", "--sequence-length", "64", "--sample.tokens", "0"]
    assert main([*words, "--validation-fraction", "0" if data else "0.02", "--output", str(tmp_path / "run")]) == 0
    lines = before_the_first_step(capsys.readouterr().out)
    assert len(lines) <= 22, "\n".join(lines)
    assert not any(line.startswith("note:") or "left out" in line for line in lines)
    assert [line for line in lines if JARGON.search(line)] == []
    assert any("warm-up: 10 steps, but the run has 1," in line for line in lines)


@pytest.mark.slow
def test_sample_of_a_chat_model_is_a_question_from_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *SHORT, "--steps", "1", "--sequence-length", "64", "--vocab-size", "300", "--plan", "none"]
    words += ["--data", str(EXAMPLES / "chats.jsonl"), "--sample.tokens", "2", "--global-batch", "2"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    (sample,) = re.findall(r"  sample +'(.*?)': '", said)
    assert re.search(r"capital of \w+", sample) and sample.endswith("<|assistant|>"), said


def test_dtype_float16_is_refused_as_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dtype", "float16"]) == 2
    assert "--dtype: got 'float16'; float16 is not supported: its narrow range" in capsys.readouterr().err


def test_yaml_error_is_reported_with_its_line(tmp_path: Path) -> None:
    for text, said in (("a: 1\n\tb: 2\n", "line 2 has a tab; use spaces"), ("a: [1\n", "line 1: ")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(Exception, match=said):
            read_mapping(str(tmp_path / "bad.yaml"))
