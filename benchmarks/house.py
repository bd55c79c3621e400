"""How large the house is, and how long the way of the settings through it.

    python benchmarks/house.py [src]

Counts code lines (without docstrings, comments, blank lines and imports) of every room beside its ceiling, those of
benchmarks, files of the largest folder, parameters of ``Pipeline``, reads of what a strategy is by others, docstrings,
names of classes that exist twice, assigned names that say nothing, and the stops of a walk: from ``train.run.run`` and
its like, every call that passes settings on (``TrainConfig``, or one of its groups), each callee walked once. What
settings are is read from annotations, so the walk sees what a reader sees; a value of one setting (``config.seed``) is
no longer settings.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
PROPERTIES = ("axis", "travels", "splits", "orders_host", "arranges", "searches_stages", "improves")
"""Properties of a strategy that only ``schedule`` reads."""
FILLERS = ("one", "own", "found", "made")
"""Names that say nothing of what they stand for."""
BEGIN = "TrainConfig"
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Module:
    name: str
    tree: ast.Module
    text: str

    @cached_property
    def code_lines(self) -> int:
        """Lines with code; those of docstrings and imports are none."""
        left_out: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring(node):
                left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        return sum(bool(line.strip()) and line.strip()[0] != "#" and n not in left_out for n, line in lines)

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name there)."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        return names


def is_docstring(node: ast.AST) -> bool:
    """A text that stands alone: of a module, class or function, or under a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def modules_of(source: Path) -> dict[str, Module]:
    """Every module below a folder, by its dotted name."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, ast.parse(text), text)
    return modules


@dataclass
class Walk:
    """The way of the settings, from the functions that begin with them."""

    modules: dict[str, Module]
    stops: list[tuple[str, int, str]] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)

    @cached_property
    def scopes(self) -> dict[tuple[str, str], Scope]:
        """(module, name) -> a function or class at the top of a module, or (module, Class.method)."""
        known: dict[tuple[str, str], Scope] = {}
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, Scope):
                    known[module.name, node.name] = node
                if isinstance(node, ast.ClassDef):
                    inner = [member for member in node.body if isinstance(member, ast.FunctionDef)]
                    known |= {(module.name, f"{node.name}.{method.name}"): method for method in inner}
        return known

    @cached_property
    def settings(self) -> dict[str, dict[str, str]]:
        """Class of settings -> its fields that are settings, each with its class."""
        classes = {name: node for (_, name), node in self.scopes.items() if isinstance(node, ast.ClassDef)}
        groups: dict[str, dict[str, str]] = {}
        waiting = [BEGIN]
        while waiting:
            name = waiting.pop()
            typed = [member for member in classes[name].body if isinstance(member, ast.AnnAssign)]
            hints = {ast.unparse(member.target): ast.unparse(member.annotation) for member in typed}
            groups[name] = {member: hint for member, hint in hints.items() if hint in classes}
            waiting += [hint for hint in groups[name].values() if hint not in groups]
        return groups

    def resolve(self, module: Module, name: str) -> tuple[str, str] | None:
        """Where a name that a module uses is defined, if it is here."""
        if (module.name, name) in self.scopes:
            return module.name, name
        there = module.imported.get(name)
        while there is not None and there not in self.scopes:
            there = self.modules[there[0]].imported.get(there[1]) if there[0] in self.modules else None
        return there

    def hint(self, annotation: ast.expr | None) -> str:
        """The class of settings that an annotation names; empty if none."""
        words = {node.id for node in ast.walk(annotation or ast.Constant(0)) if isinstance(node, ast.Name)}
        return next((name for name in self.settings if name in words), "")

    def kind(self, value: ast.expr, known: dict[str, str], module: Module) -> str:
        """The class of settings that an expression is; empty if it is none."""
        if isinstance(value, ast.Name):
            return known.get(value.id, "")
        if isinstance(value, ast.Attribute):
            return self.settings.get(self.kind(value.value, known, module), {}).get(value.attr, "")
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            if value.func.id == "replace" and value.args:
                return self.kind(value.args[0], known, module)
            place = self.resolve(module, value.func.id)
            scope = self.scopes.get(place) if place else None
            return self.hint(scope.returns) if isinstance(scope, ast.FunctionDef) else ""
        return ""

    def follow(self, place: tuple[str, str], above: dict[str, str]) -> None:
        """Walk through a function, whose parameters say which settings it is given."""
        if place in self.seen:
            return
        self.seen.add(place)
        scope, module = self.scopes[place], self.modules[place[0]]
        if isinstance(scope, ast.ClassDef):
            if (start := (place[0], f"{place[1]}.__init__")) in self.scopes:
                self.follow(start, above)
            return
        known = dict(above)
        for argument in [*scope.args.args, *scope.args.kwonlyargs]:
            if name := self.hint(argument.annotation):
                known[argument.arg] = name
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    names = target.elts if isinstance(target, ast.Tuple) else [target]
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
                    for part, value in zip(names, values, strict=False):
                        if isinstance(part, ast.Name) and (name := self.kind(value, known, module)):
                            known.setdefault(part.id, name)
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                self.call(node, known, module, place)

    def call(self, node: ast.Call, known: dict[str, str], module: Module, place: tuple[str, str]) -> None:
        passed = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not any(self.kind(value, known, module) for value in passed):
            return
        called = ast.unparse(node.func)
        if called == "replace":
            return
        self.stops.append((".".join(place), node.lineno, called))
        if called.startswith("self.") and "." in place[1]:
            target: tuple[str, str] | None = (place[0], f"{place[1].split('.')[0]}.{called.removeprefix('self.')}")
        else:
            target = self.resolve(module, called.split(".")[0])
            if target and "." in called:
                target = (target[0], f"{target[1]}.{called.partition('.')[2]}")
        if target in self.scopes:
            self.follow(target, {})


def assigned(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def rooms_of(modules: dict[str, Module]) -> dict[str, int]:
    """Code lines of every room, the part of a name after the package."""
    rooms: dict[str, int] = defaultdict(int)
    for name, module in modules.items():
        rooms[".".join(name.split(".")[:2])] += module.code_lines
    return dict(rooms)


def ceilings() -> dict[str, int]:
    """Code lines that a room may have (benchmarks/ceilings.yaml)."""
    return yaml.safe_load((REPOSITORY / "benchmarks" / "ceilings.yaml").read_text(encoding="utf-8"))


def properties_read(modules: dict[str, Module]) -> list[str]:
    """Reads of ``PROPERTIES`` outside ``schedule``, but for those of positions, which have an axis as well."""
    outside = {name: module for name, module in modules.items() if name.startswith("tawpipe.")}
    reads = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, module in outside.items()
        if not name.startswith("tawpipe.schedule.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in PROPERTIES and isinstance(node.ctx, ast.Load)
    ]
    return [read for read in reads if "positions." not in read]


def largest_folder(source: Path) -> tuple[int, str]:
    """Python files directly in the folder that has most of them, and its name."""
    counts = Counter(path.parent.relative_to(source).as_posix() for path in (source / "tawpipe").rglob("*.py"))
    return max((count, folder) for folder, count in counts.items())


def parameters_of_pipeline(modules: dict[str, Module]) -> int:
    """Parameters of ``Pipeline.__init__``, ``self`` among them."""
    start = Walk(modules).scopes["tawpipe.pipeline.pipeline", "Pipeline.__init__"]
    assert isinstance(start, ast.FunctionDef)
    return len([*start.args.posonlyargs, *start.args.args, *start.args.kwonlyargs])


def main() -> None:
    source = Path(sys.argv[1] if sys.argv[1:] else "src")
    modules, most = modules_of(source), ceilings()
    rooms = rooms_of(modules)
    for room, lines in sorted(rooms.items()):
        print(f"{lines:7,} {room}" + (f", at most {most[room]:,}" if room in most else ""))
    for package in sorted({room.split(".")[0] for room in rooms}):
        print(f"{sum(lines for room, lines in rooms.items() if room.split('.')[0] == package):7,} in {package}")
    print(f"{sum(rooms.values()):7,} code lines")
    scripts = [*(REPOSITORY / "benchmarks").glob("*.py")]
    lines = sum(Module(path.stem, ast.parse(text := path.read_text("utf-8")), text).code_lines for path in scripts)
    print(f"{lines:7,} in {len(scripts)} scripts of benchmarks, gpu/ apart")
    folders = sum(path.is_dir() for path in (REPOSITORY / "benchmarks" / "results").iterdir())
    print(f"{folders:7,} folders of results")
    print("{:7,} files directly in {}".format(*largest_folder(source)))
    print(f"{parameters_of_pipeline(modules):7,} parameters of Pipeline.__init__")
    print(f"{len(properties_read(modules)):7,} reads of what a strategy is, outside of schedule")
    nodes = [node for module in modules.values() for node in ast.walk(module.tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    said = sum(ast.get_docstring(node) is not None for node in functions)
    print(f"{said / len(functions):7.0%} of {len(functions):,} functions have a docstring")
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = sorted(name for name, count in classes.items() if count > 1)
    print(f"{len(twice):7,} names of classes exist twice: {', '.join(twice)}")
    names = Counter(name for module in modules.values() for name in assigned(module.tree))
    print(f"{sum(names[name] for name in FILLERS):7,} times one of {', '.join(FILLERS)} is assigned")
    walk = Walk(modules)
    walk.follow(("tawpipe.train.run", "run"), {})
    print(f"{len(walk.stops):7,} stops of the settings, in {len(walk.seen)} functions")
    if "--stops" in sys.argv:
        for function, line, called in walk.stops:
            print(f"        {function}:{line} {called}")


if __name__ == "__main__":
    main()
