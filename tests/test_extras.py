"""Commands that say how to install what is missing work where they are said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tawpipe import extras
from tawpipe.extras import CLONE, install_hint


def test_install_hint_names_the_clone_or_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CLONE)
    assert install_hint("plan") == "pip install -e '.[plan]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("plan") == f"pip install -e '{CLONE}[plan]'"
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    assert install_hint("peft") == "pip install 'tawpipe[peft]'"


def test_extras_named_by_install_hints_exist() -> None:
    defined = re.findall(r"^(\w+) = \[", (CLONE / "pyproject.toml").read_text(), flags=re.MULTILINE)
    sources = "\n".join(path.read_text() for path in (CLONE / "src").rglob("*.py"))
    named = set(re.findall(r"install_hint\(['\"](\w+)", sources))
    assert {"plan", "peft", "serve"} <= named <= set(defined)
    assert re.findall(r"pip install 'tawpipe\[", sources.replace("pip install 'tawpipe[{extra}]'", "")) == []
