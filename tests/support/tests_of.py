"""The tests of a source file, by what they import: `tests_of.py src/tawpipe/topology.py` names and runs them.

A test file tests a module if it imports it, itself or through a module of tests/support. A name that a package hands on
counts for the module that defines it. So these are the tests that look at a module, not the many that merely run it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
HELPERS = (ROOT / "tests" / "support", ROOT / "benchmarks")


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of this repository, tests/support and benchmarks included; None if there is none."""
    for source in (SRC, *HELPERS):
        base = source.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
    return None


@cache
def imported(path: Path) -> frozenset[Path]:
    """The files whose names a file imports, or whose functions it names for worker processes ("module:function")."""
    files: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            files |= {file for name in node.names if (file := path_of(name.name))}
        elif isinstance(node, ast.ImportFrom) and node.module:
            files |= {file for name in node.names if (file := defining(node.module, name.name))}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(":") == 1:
            module, _, function = node.value.partition(":")
            if function.isidentifier() and module.replace(".", "").isidentifier() and (file := path_of(module)):
                files.add(file)
    return frozenset(files)


@cache
def defining(module: str, name: str) -> Path | None:
    """The file that defines what `from module import name` gives."""
    if (file := path_of(f"{module}.{name}")) is not None:
        return file
    file = path_of(module)
    if file is None or file.name != "__init__.py":
        return file
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for handed in node.names:
                if name == (handed.asname or handed.name):
                    return defining(node.module, handed.name)
    return file


@cache
def reached(test: Path) -> frozenset[Path]:
    """The files of src that a test file imports."""
    seen: set[Path] = set()
    waiting = [test]
    while waiting:
        for file in imported(waiting.pop()):
            if file not in seen:
                seen.add(file)
                if any(file.is_relative_to(place) for place in HELPERS):
                    waiting.append(file)
    return frozenset(file for file in seen if file.is_relative_to(SRC))


def tests_of(path: Path) -> list[Path]:
    """The test files of a file of src, or of all files of a folder."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [test for test in tests if any(file.is_relative_to(path.resolve()) for file in reached(test))]


def main(words: list[str]) -> int:
    """Names and runs the tests of a path; further words go to pytest."""
    path = Path(words[0]) if words else None
    if path is None or not path.exists() or not path.resolve().is_relative_to(SRC):
        print(f"FILE: got {str(path or '')!r}; a file or folder of src: make test-of FILE=src/tawpipe/topology.py")
        return 2
    tests = [str(test.relative_to(ROOT)) for test in tests_of(path)]
    print(*tests or [f"no test imports {path}"], sep="\n", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *tests, *words[1:]], cwd=ROOT) if tests else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
