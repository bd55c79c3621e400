"""The names that a library user finds, and what finding them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tawpipe


def test_public_names_are_listed_without_loading_torch() -> None:
    """In a process of its own: here everything has been imported."""
    code = "import sys, tawpipe; print(dir(tawpipe)); print(sorted({'torch', 'transformers', 'yaml'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    assert names == str(sorted(tawpipe.__all__)) and loaded == "[]"


def test_every_public_name_resolves() -> None:
    assert dir(tawpipe) == sorted(tawpipe.__all__)
    assert all(getattr(tawpipe, name) is not None for name in tawpipe.__all__)
    assert {*tawpipe._HOMES, "register_strategy"} == {*tawpipe.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        tawpipe.Trainer  # noqa: B018
