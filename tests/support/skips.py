"""Skips that CI allows: ``tests/skips.yaml`` lists them with their reasons."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

TESTS = Path(__file__).parents[1]
LISTED: dict[str, dict[str, str]] = yaml.safe_load((TESTS / "skips.yaml").read_text(encoding="utf-8"))
"""File below ``tests`` that skips -> beginning of the reason -> why no package below 200 MB can serve the test."""
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def listed(file: str, reason: str) -> bool:
    """True if a skip by ``file`` for ``reason`` is listed."""
    path = Path(file).resolve()
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else file
    return any(reason.startswith(beginning) for beginning in LISTED.get(name, {}))


def fail_unlisted(report: Report) -> Report:
    """Return the report; in CI a skip that is not listed becomes a failure."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        file, line, message = report.longrepr
        reason = message.removeprefix("Skipped: ")
        if not listed(file, reason):
            report.outcome = "failed"
            report.longrepr = f"{file}:{line}: skipped, but tests/skips.yaml does not list the reason: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return fail_unlisted((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return fail_unlisted((yield))
