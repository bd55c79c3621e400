"""Check the English of the sources, as far as a program can: first lines of docstrings, and what a change touched.

python tests/support/english.py                  # list first lines that break the rule; exit code 1 if there are any
python tests/support/english.py --same REVISION  # exit code 0 if only docstrings and comments differ from REVISION
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
BEGINNINGS = re.compile(r"(?:What|Where|Who|That|Whether|Of|The same)\b")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield the owner, the line and the text of every docstring, and of every string below a field."""
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, DEFINITIONS):
            continue
        for previous, node in zip([owner, *owner.body], owner.body, strict=False):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield previous, node.lineno, node.value.value


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every first line that breaks the rule.

    A first line begins with a verb or a noun. In a docstring it ends with a full stop; a field's text may go on.
    """
    for owner, line, text in docstrings(source):
        first = text.strip().partition("\n")[0]
        if BEGINNINGS.match(first) or (isinstance(owner, DEFINITIONS) and not first.endswith(".")):
            yield line, first


def code_of(source: str) -> str:
    """Return the syntax tree of ``source`` as text, without docstrings, comments and positions."""
    tree = ast.parse(source)
    for owner in ast.walk(tree):
        if isinstance(owner, DEFINITIONS):
            texts = [node for node in owner.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
            owner.body = [node for node in owner.body if node not in texts or node.value.value is ...]
    return ast.dump(tree)


def changed_code(revision: str) -> list[str]:
    """Return the source files whose code, not only its docstrings and comments, differs from ``revision``."""
    git = ["git", "-C", str(SOURCES.parent)]
    listed = subprocess.run([*git, "diff", "--name-only", revision, "--", "src"], capture_output=True, check=True)
    changed = []
    for name in listed.stdout.decode().split():
        before = subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True)
        after = SOURCES.parent / name
        texts = name.endswith(".py") and before.returncode == 0 and after.exists()
        if not texts or code_of(before.stdout.decode()) != code_of(after.read_text()):
            changed.append(name)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same", metavar="REVISION", help="compare the code of src with this revision")
    revision = parser.parse_args().same
    if revision:
        lines = [f"{name}: the code differs from {revision}" for name in changed_code(revision)]
    else:
        lines = [
            f"{path.relative_to(SOURCES.parent)}:{line}: {first}"
            for path in sorted(SOURCES.rglob("*.py"))
            for line, first in faults(path.read_text())
        ]
    print("\n".join([*lines, f"{len(lines)} faults"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
