"""Parameters of which only the quick ones run in every run of the tests, and a fixture's work for just these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_ones(titles: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """All titles as parameters, marked slow where they are not among the quick ones."""
    return [title if title in quick else pytest.param(title, marks=pytest.mark.slow) for title in titles]


def asked_for(request: pytest.FixtureRequest) -> list[str]:
    """Every `title` that the selected tests of the fixture's module have, once."""
    own = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    params: list[dict[str, Any]] = [vars(item.callspec)["params"] for item in own if hasattr(item, "callspec")]
    return list(dict.fromkeys(one["title"] for one in params if "title" in one))
