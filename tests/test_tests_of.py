"""Every module has a test that looks at it, and the tool that says which finds what a test imports, however it does."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests_of
from tests_of import ROOT, SRC, defining, imported, path_of, reached

PACKAGE = SRC / "tawpipe"


def test_every_module_is_imported_by_a_test() -> None:
    modules = [path for path in sorted(SRC.rglob("*.py")) if path.name != "__init__.py"]
    assert PACKAGE / "__main__.py" in modules and SRC / "tawpipe_lab" / "command.py" in modules and len(modules) > 250
    looked_at = {file for test in (ROOT / "tests").rglob("test_*.py") for file in reached(test)}
    assert [str(path.relative_to(SRC)) for path in modules if path not in looked_at] == []


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / f"test_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import tawpipe.schedule.cp_groups", "schedule/cp_groups.py"),
        ("import tawpipe.schedule.cp_groups as other", "schedule/cp_groups.py"),
        ("from tawpipe.schedule import cp_groups", "schedule/cp_groups.py"),
        ("from tawpipe.schedule.cp_groups import with_cp_groups", "schedule/cp_groups.py"),
        ("def f():\n    from tawpipe.schedule.cp_groups import with_cp_groups as other", "schedule/cp_groups.py"),
        ("from tawpipe.simulate import LinkModel", "simulate/cost_model.py"),  # a package hands it on
        ("from tawpipe.simulate import LinkModel as Link", "simulate/cost_model.py"),
        ("from tawpipe import World", "runtime/world.py"),
        ("pool.run('tawpipe.prove.exactness:exact', 1, 2)", "prove/exactness.py"),  # for a worker process
        ("from cases import llama", "pipeline/pipeline.py"),  # through tests/support
    ],
)
def test_tests_of_finds_the_imports_of_a_test(tmp_path: Path, text: str, module: str) -> None:
    assert (PACKAGE / module).exists()
    assert PACKAGE / module in reached(file_with(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from tawpipe.no import x",
        "'tawpipe.schedule.cp_groups'",
        "'see tawpipe.schedule.cp_groups: x'",
        "'a:b:c'",
    ],
)
def test_module_names_in_plain_strings_are_not_imports(tmp_path: Path, text: str) -> None:
    assert not reached(file_with(tmp_path, text))


def test_indirect_imports_of_a_module_do_not_count_for_its_tests(tmp_path: Path) -> None:
    """Or nearly every test would be one of nearly every module."""
    found = reached(file_with(tmp_path, "from tawpipe.schedule.cp_groups import with_cp_groups"))
    assert found == {PACKAGE / "schedule/cp_groups.py"}


def test_defining_finds_the_module_that_defines_a_name() -> None:
    assert defining("tawpipe.simulate", "play") == PACKAGE / "simulate/clock.py"
    assert defining("tawpipe.schedule", "cp_groups") == PACKAGE / "schedule/cp_groups.py"
    assert defining("tawpipe.simulate", "nothing") == PACKAGE / "simulate/__init__.py"
    assert defining("torch", "Tensor") is None
    assert path_of("cases") == ROOT / "tests/support/cases.py" and path_of("tawpipe") == PACKAGE / "__init__.py"
    assert ROOT / "tests/support/pipelines.py" in imported(ROOT / "tests/support/cases.py")


def test_tests_of_a_folder_include_those_of_its_files() -> None:
    own, all_of_them = (
        tests_of.tests_of(PACKAGE / "schedule/routes/ring.py"),
        tests_of.tests_of(PACKAGE / "schedule/routes"),
    )
    assert ROOT / "tests/schedule/test_ring.py" in own and set(own) < set(all_of_them)


@pytest.mark.parametrize("words", [[], ["src/tawpipe/missing.py"], ["tests/test_topology.py"], [str(ROOT)]])
def test_path_outside_src_is_refused_with_the_right_usage(words, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("subprocess.call", lambda *_, **__: pytest.fail("no test is run"))
    assert tests_of.main(words) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"FILE: got {words[0] if words else ''!r}; a file or folder of src: make test-of FILE=src/")


def test_tests_of_prints_and_runs_tests_with_extra_arguments(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    ran: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda command, **_: ran.append(command) or 5)
    assert tests_of.main(["src/tawpipe/topology.py", "-x"]) == 5
    named = capsys.readouterr().out.split()
    assert "tests/test_topology.py" in named and ran[0][1:] == ["-m", "pytest", *named, "-x"]
    monkeypatch.setattr(tests_of, "tests_of", lambda _: [])
    assert tests_of.main(["src/tawpipe/topology.py"]) == 1 and len(ran) == 1
    assert "no test imports src/tawpipe/topology.py" in capsys.readouterr().out
