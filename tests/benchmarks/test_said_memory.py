"""What a run says of its memory before the first step is what its largest process then holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from said_memory import RUNS, is_right, measured, text


@pytest.mark.parametrize("name", list(RUNS)[:3])
def test_the_largest_process_holds_what_was_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(variable, raising=False)
    text(tmp_path / "text.jsonl")
    row = measured(name, tmp_path)
    assert is_right(row), row
