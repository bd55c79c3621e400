"""A plugin for pytest that says where the seconds of the tests go.

    PYTHONPATH=tests/support .venv/bin/python -m pytest -p seconds --seconds DIR

A thread looks fifty times a second at what the main thread does. The innermost call that a rule knows names the kind.
What other processes do is one kind, waiting for them, as a stack says no more about it. DIR gets `README.md`, with the
slowest tests and files, and `seconds.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

INTERVAL_S = 0.02
TESTS = 50
# The first rule that fits the innermost frame that any rule fits: a part of the file's path, names of functions (all,
# if empty).
RULES: list[tuple[str, str, tuple[str, ...]]] = [
    ("imports", "importlib._bootstrap", ()),
    ("building models", "transformers/modeling_utils.py", ("__init__", "from_pretrained", "_from_config", "post_init")),
    ("building models", "transformers/models/auto/auto_factory.py", ()),
    ("proofs", "tawpipe/schedule/proof", ()),
    ("schedules and plans", "tawpipe/schedule/", ()),
    ("schedules and plans", "tawpipe/simulate/", ()),
    ("schedules and plans", "tawpipe/plan/", ()),
    ("starting processes", "multiprocessing/popen_", ()),
    ("starting processes", "subprocess.py", ("_execute_child",)),
    ("waiting for processes", "subprocess.py", ()),
    ("waiting for processes", "multiprocessing/", ()),
    ("waiting for processes", "torch/distributed/", ()),
    ("waiting for processes", "selectors.py", ()),
    ("random examples (hypothesis)", "hypothesis/internal/", ()),
    ("computing", "torch/", ()),
    ("computing", "transformers/", ()),
    ("the tests' own code", "/tests/", ()),
]
OTHER = "other"
KINDS = [*dict.fromkeys(kind for kind, _, _ in RULES), OTHER]


def kind_of(frame: FrameType | None) -> str:
    """The kind of what a stack does, its innermost frame given."""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        for kind, part, names in RULES:
            if part in path and (not names or name in names):
                return kind
        frame = frame.f_back
    return OTHER


class Sampler(threading.Thread):
    """Counts the kinds of what the main thread does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._main = threading.main_thread().ident

    def run(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self.counts[kind_of(sys._current_frames().get(self._main or 0))] += 1

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        taken, self.counts = self.counts, Counter()
        return dict(taken)


class Seconds:
    """The plugin: samples in the processes that run tests, and adds up where the reports arrive."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.tests: dict[str, Counter[str]] = defaultdict(Counter)
        self.collected_s: list[float] = []
        self.begin = time.monotonic()
        self.sampler = Sampler()
        self.sampler.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        report.seconds = self.sampler.take()  # travels to the controlling process with the report
        return report  # type: ignore[return-value]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.sampler.take()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["collected_s"] = time.monotonic() - self.begin

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.collected_s.append(getattr(node, "workeroutput", {}).get("collected_s", 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts = Counter(getattr(report, "seconds", {}))
        samples = counts.total()
        # Samples give the shares, the clock gives the sum.
        shares = {kind: count / samples for kind, count in counts.items()} if samples else {OTHER: 1.0}
        for kind, share in shares.items():
            self.tests[report.nodeid][kind] += report.duration * share  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        data = {
            "wall_s": round(time.monotonic() - self.begin, 1),
            "processors_busy_s": round(sum(os.times()[:4]), 1),
            "collection_s": [round(s, 1) for s in self.collected_s],
            "tests": {name: {kind: round(s, 2) for kind, s in kinds.items()} for name, kinds in self.tests.items()},
        }
        (self.folder / "seconds.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")
        files: dict[str, Counter[str]] = defaultdict(Counter)
        for name, kinds in self.tests.items():
            files[name.split("::")[0]].update(kinds)
        total = sum((Counter(kinds) for kinds in files.values()), Counter())
        words = [
            f"{len(self.tests)} tests in {len(files)} files: {data['wall_s']} s by the clock, of which each process"
            f" collected for {data['collection_s']} s; {data['processors_busy_s']} s of processors.",
            _table({"all": total, **files}, "file"),
            _table(self.tests, "test"),
        ]
        (self.folder / "README.md").write_text("\n\n".join(words) + "\n")


def _table(rows: dict[str, Counter[str]], what: str) -> str:
    lines = [f"| {what} | seconds | {' | '.join(KINDS)} |", f"| --- | {' | '.join('--:' for _ in ['', *KINDS])} |"]
    for name, kinds in sorted(rows.items(), key=lambda row: -row[1].total())[:TESTS]:
        cells = " | ".join(f"{kinds[kind]:.1f}" if kinds[kind] >= 0.05 else "" for kind in KINDS)
        lines.append(f"| {name.replace('|', chr(92) + '|')} | {kinds.total():.1f} | {cells} |")
    return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=Path, metavar="DIR", help="write into DIR where the seconds go")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--seconds")
    if folder is not None:
        controls = not hasattr(config, "workerinput")
        config.pluginmanager.register(Seconds(folder if controls else None), "seconds-sampler")
