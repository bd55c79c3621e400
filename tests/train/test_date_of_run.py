"""The day of a run, and runs of versions that had none: texts go on, chats that become other documents are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runs import command, rows
from small import make_small
from tawpipe.checkpoint.format import SEAL, read_manifest, sealed
from tawpipe.checkpoint.names import MARKER, complete_states
from tawpipe.checkpoint.resume import read_run
from tawpipe.cli import main

QUIET = ("--nproc", "1", "--device", "cpu", "--sample.tokens", "0", "--export.enabled", "false", "--resume", "auto")
DATED = (
    "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else eos_token }}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    make_small(folder, files=20, layers=1, positions=256)
    said = [[{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"yes {n}"}] for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in said))
    (folder / "dated.jinja").write_text(DATED)
    return folder


def words(home: Path, output: str, *others: str) -> list[str]:
    data = (
        [] if output == "text" else ["--data", str(home / "chats.jsonl"), "--chat-template", str(home / "dated.jinja")]
    )
    return [*command(home, output, *QUIET, *data)[2:], *others]


def on(monkeypatch, date: str) -> None:
    monkeypatch.setattr("tawpipe.train.start.today", lambda: date)


def as_before(home: Path, output: str, **changed: str) -> Path:
    """Make the newest state one of a version that kept no day; ``changed`` are parts of its fingerprint."""
    folder = complete_states(home / output / "checkpoints")[-1]
    manifest = {name: value for name, value in read_manifest(folder).items() if name != SEAL}
    del manifest["run"]["settled"]["date"]
    for name, digest in changed.items():
        manifest["run"]["fingerprint"] = re.sub(rf"{name}:\w+", f"{name}:{digest}", manifest["run"]["fingerprint"])
    (folder / MARKER).write_text(json.dumps(sealed(manifest)))
    return folder


@pytest.mark.slow
def test_run_keeps_its_date_and_chats_of_an_older_version_are_refused(home, monkeypatch, capsys):
    on(monkeypatch, "2024-02-29")
    assert main(words(home, "chats", "--steps", "2")) == 0
    first = read_run(complete_states(home / "chats" / "checkpoints")[-1])
    on(monkeypatch, "2024-03-01")
    assert main(words(home, "chats", "--steps", "3")) == 0
    state = read_run(complete_states(home / "chats" / "checkpoints")[-1])
    assert state.settled["date"] == "2024-02-29" and state.fingerprint == first.fingerprint
    assert "data has changed" not in "".join(capsys.readouterr())

    folder = as_before(home, "chats", documents="0123456789abcdef")
    before = {path: path.stat().st_mtime_ns for path in (home / "chats").rglob("*")}
    for more in ((), ("--dry-run",)):
        assert main(words(home, "chats", "--steps", "4", *more)) == 2
        said = "".join(capsys.readouterr())
        refusal = rf"--resume: got '{re.escape(str(folder))}'.*a run of this version. tawpipe \d.*commit 1eeab342"
        assert re.search(refusal, said)
        assert "documents changed" in said
    assert {path: path.stat().st_mtime_ns for path in (home / "chats").rglob("*")} == before


@pytest.mark.slow
def test_run_on_texts_of_an_older_version_resumes(home, monkeypatch, capsys):
    on(monkeypatch, "2024-02-29")
    assert main(words(home, "text", "--steps", "2")) == 0
    as_before(home, "text")
    assert main(words(home, "text", "--steps", "3")) == 0
    said = "".join(capsys.readouterr())
    assert "data has changed" not in said and rows(home, "text")[-1]["step"] == 3
    as_before(home, "text", documents="0123456789abcdef")
    assert main(words(home, "text", "--steps", "4")) == 0
    assert "the data has changed since then (documents)" in "".join(capsys.readouterr())
    assert rows(home, "text")[-1]["step"] == 4
