"""Check the English of the sources, as far as a program can: first lines of docstrings, names, what a change touched.

python tests/support/english.py                  # list first lines and names that break a rule; then exit code 1
python tests/support/english.py --same REVISION  # exit code 0 if only docstrings and comments differ from REVISION
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).parents[2] / "src"
WORDS = Path(__file__).parents[2] / "benchmarks" / "words.yaml"
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
BEGINNINGS = re.compile(r"(?:What|Where|Who|That|Whether|Of|The same)\b")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield the owner, the line and the text of every docstring, and of every string below a field."""
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, DEFINITIONS):
            continue
        for previous, node in zip([owner, *owner.body], owner.body, strict=False):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str):
                yield previous, node.lineno, text


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every first line that breaks the rule.

    A first line begins with a verb or a noun. In a docstring it ends with a full stop; a field's text may go on.
    """
    for owner, line, text in docstrings(source):
        first = text.strip().partition("\n")[0]
        if BEGINNINGS.match(first) or (isinstance(owner, DEFINITIONS) and not first.endswith(".")):
            yield line, first


def defined_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every name that ``source`` defines: functions, classes, arguments, variables."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield line, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield line, node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield line, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield line, node.asname


def retired_names(path: Path, words: dict[str, dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every name that contains a retired word: the file's and all that it defines.

    Args:
        path: the source file.
        words: retired word -> its other ``forms``, and the names in which it ``stays``, each with the reason.
    """
    for line, name in [(0, path.stem), *defined_names(path.read_text())]:
        parts = [part.lower() for part in PARTS.findall(name)]
        for word, rules in words.items():
            is_verb = word == "set" and parts[:1] == ["set"]
            if {word, *rules["forms"]} & set(parts) and not is_verb and name not in rules["stays"]:
                yield line, f"{name}: the word {word!r} is retired"


def code_of(source: str) -> str:
    """Return the syntax tree of ``source`` as text, without docstrings, comments and positions."""
    tree = ast.parse(source)
    for owner in ast.walk(tree):
        if isinstance(owner, DEFINITIONS):
            texts = [node.value for node in owner.body if isinstance(node, ast.Expr)]
            gone = {id(text) for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}
            owner.body = [node for node in owner.body if not isinstance(node, ast.Expr) or id(node.value) not in gone]
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
        words = yaml.safe_load(WORDS.read_text())
        lines = [
            f"{path.relative_to(SOURCES.parent)}:{line}: {text}"
            for path in sorted(SOURCES.rglob("*.py"))
            for line, text in [*faults(path.read_text()), *retired_names(path, words)]
        ]
    print("\n".join([*lines, f"{len(lines)} faults"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
