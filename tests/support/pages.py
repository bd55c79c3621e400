"""The commands that pages show: collected from their blocks of code, and read by the parsers that will get them."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch.distributed.run import get_args_parser

from tawpipe.cli import COMMANDS
from tawpipe.commands.brought import brought
from tawpipe.errors import UserError
from tawpipe.train.settings.config import load_config, train_options

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/faults.md", "benchmarks/results/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PROGRAMS = ("tawpipe", "torchrun", "make", "python")
LEFT_OUT = "..."
"""Stands in a command for options that the reader knows already."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    @property
    def tawpipe(self) -> list[str] | None:
        """The words after ``tawpipe``, however it is started; None for another program."""
        words = list(self.words)
        if words[0] == "tawpipe":
            return words[1:]
        if words[0] == "torchrun":
            return words[words.index("-m") + 2 :]
        if words[:2] == ["make", "train"]:
            settings = dict(word.split("=", 1) for word in words[2:] if "=" in word)
            return ["train", *shlex.split(settings.get("ARGS", ""))]
        return None


def commands(page: Path) -> list[Command]:
    """The commands in the blocks of code of a page, in their order."""
    found: list[Command] = []
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language not in ("", "bash", "sh"):
            continue
        pending = ""
        for line in block.splitlines(keepends=True):
            if not pending and not _is_command(line):
                continue
            pending += line
            if pending.endswith("\\\n"):
                pending = pending.removesuffix("\\\n")
                continue
            with contextlib.suppress(ValueError):  # inside of quotation marks
                words = _program_first(shlex.split(pending, comments=True))
                pending = ""
                found.append(Command(page.name, tuple(words)))
        assert not pending, f"{page.name}: no end of {pending}"
    return found


def _is_command(line: str) -> bool:
    words = _program_first(line.split())
    return bool(words) and words[0] in PROGRAMS


def _program_first(words: list[str]) -> list[str]:
    """Without ``sudo``, settings of the environment and the folder of the program."""
    while words and (words[0] == "sudo" or re.fullmatch(r"\w+=\S*", words[0])):
        words = words[1:]
    program = re.sub(r"^\S*/bin/", "", words[0]) if words else ""
    return [re.sub(r"^python3$", "python", program), *words[1:]] if words else []


def inline_options(page: Path) -> Iterator[tuple[str, str]]:
    """Options in the text of a page, each with the code that it stands in."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        if code.startswith(("--", "tawpipe ", "torchrun ")):
            for option in re.findall(r"(?:^|\s)(--[a-z][\w.-]*)", code):
                yield option, code


def inline_scripts(page: Path) -> Iterator[tuple[str, ...]]:
    """The words of every ``python FILE ...`` in the text of a page, where a command may go over two lines."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        words = _program_first(code.split())
        words = words[2:] if words[:3:2] == ["python", "pytest"] else words
        if words[:1] in (["python"], ["pytest"]) and len(words) > 1 and not words[1].startswith("-"):
            yield tuple(words[1:])


def known_options() -> set[str]:
    """Every option of every command of tawpipe, and of torchrun."""
    options = {"--import", "--config", "--print-config", *(leaf.option for leaf in train_options().leaves.values())}
    for name in [*COMMANDS, *brought()]:
        module = _command(name)
        parsers = [module._parser()] if hasattr(module, "_parser") else []
        while parsers:
            one = parsers.pop()
            options |= set(one._option_string_actions)
            subparsers = one._subparsers._group_actions if one._subparsers else ()
            parsers += [other for action in subparsers for other in (action.choices or {}).values()]
    torchrun = {spelled for one in get_args_parser()._option_string_actions for spelled in (one, one.replace("_", "-"))}
    return options | torchrun


def _command(name: str) -> ModuleType:
    """The module of one of tawpipe's commands."""
    return importlib.import_module(f"tawpipe.commands.{name}") if name in COMMANDS else brought()[name]


def complaint(command: Command) -> str:
    """What the parsers say against a command, without running it; nothing if they take it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            _read(command)
    except (UserError, AssertionError) as error:
        return str(error)
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return ""


def _read(command: Command) -> None:
    words = list(command.words)
    if words[0] == "torchrun":
        place = words.index("-m")
        own = [word for word in words[:place] if word != LEFT_OUT]
        get_args_parser().parse_args([*own[1:], "-m", "tawpipe"])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        asked = [word for word in words[1:] if "=" not in word]
        assert set(asked) <= set(targets), f"the Makefile has no target {asked}"
    elif words[0] == "python" and not words[1].startswith("-"):
        assert (ROOT / words[1]).exists(), f"{words[1]} is not there"
    if (given := command.tawpipe) is not None:
        _read_tawpipe(given)


def _read_tawpipe(words: list[str]) -> None:
    assert words and words[0] in [*COMMANDS, *brought()], f"no such command: {words}"
    name, given, partly = words[0], words[1:], LEFT_OUT in words
    while "--import" in given:
        place = given.index("--import")
        assert (ROOT / given[place + 1]).exists(), f"{given[place + 1]} is not there"
        del given[place : place + 2]
    given = [word for word in given if word != LEFT_OUT]
    module = _command(name)
    if name == "train":
        if "--config" in given and not Path(given[given.index("--config") + 1]).exists():
            del given[given.index("--config") : given.index("--config") + 2]  # the reader's own file
        load_config(given)
    elif partly:
        unknown = {word.split("=")[0] for word in given if word.startswith("--")} - known_options()
        assert not unknown, f"no such options: {unknown}"
    else:
        given = given[: given.index("--")] if "--" in given else given
        module._parser().parse_args(given)
