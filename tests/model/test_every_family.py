"""Every causal LM that transformers knows trains as the plain model does, or is refused for a reason that is known."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers

import every_family
from every_family import PACKED, equal_families, families, outcome, page
from family_configs import tiny_config, uncrossed
from selected import quick_ones
from tawpipe.model.tested import TESTED_TRANSFORMERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SAME_RELEASE = transformers.__version__.startswith(f"{TESTED_TRANSFORMERS}.")
same_release = pytest.mark.skipif(not SAME_RELEASE, reason="written with another transformers")


QUICK = ("llama", "qwen3_next", "falcon_h1", "jamba", "lfm2", "bloom", "bart", "deepseek_v32", "mllama", "llama4_text")
"""A family of every kind; the others are slow."""


@pytest.mark.parametrize("family", quick_ones(families(), QUICK))
def test_every_model_family_matches_plain_training_or_is_refused(family):
    found = outcome(family)
    if found.kind == "not built" and not SAME_RELEASE:
        pytest.skip(f"its tiny configuration is for another release: {found.reason}")
    assert found.expected, f"{family} is {found.kind}: {found.reason}"
    if found.kind == "equal":
        assert not uncrossed(tiny_config(family), max(map(max, PACKED)))


def test_chunked_attention_without_position_counts_cuts_documents(monkeypatch):
    config: Any = tiny_config("llama4_text")
    config.attn_temperature_tuning = False
    monkeypatch.setattr(every_family, "tiny_config", lambda _: deepcopy(config))
    found = outcome.__wrapped__("llama4_text")
    assert found.kind == "equal" and found.runs == every_family.Runs("attention")


@pytest.mark.slow
@same_release
def test_models_page_lists_the_outcome_of_every_family():
    written = PAGE.read_text(encoding="utf-8")
    versions = re.search(r"with (transformers \S+ and torch \S+);", written)
    assert versions
    assert written == page({family: outcome(family) for family in families()}, versions[1])


@pytest.mark.slow
@same_release
def test_list_of_tested_families_matches_their_outcomes():
    written = (ROOT / "src" / "tawpipe" / "model" / "tested.py").read_text(encoding="utf-8")
    assert written == equal_families({family: outcome(family) for family in families()})
