"""Suggestions for mistyped names of settings, and for names that other trainers use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def option_of(key: str) -> str:
    """Return the command-line option of a setting.

    >>> option_of("optimizer.clip_norm")
    '--optimizer.clip-norm'
    """
    return "--" + key.replace("_", "-")


@dataclass(frozen=True)
class Change:
    """New value of a setting.

    Args:
        setting: key of the setting (``optimizer.clip_norm``).
    """

    setting: str
    value: object


def spelled(changes: Iterable[Change]) -> str:
    """Return the command-line arguments that make ``changes``.

    >>> spelled([Change("optimizer.clip_norm", 0), Change("schedule.early_updates", True)])
    '--optimizer.clip-norm 0 --schedule.early-updates true'
    """
    values = ((change.setting, change.value) for change in changes)
    return " ".join(f"{option_of(key)} {str(v).lower() if isinstance(v, bool) else v}" for key, v in values)


class Names:
    """Names that a command or a file accepts, and names of other programs.

    Args:
        known: keys of the settings (``optimizer.clip_norm``).
        elsewhere: names that other programs use, with dashes, and their replacements here: words in which ``{key}``
            stands for a setting. A name is left out if its setting is not known.
        options: True to write names as on the command line (``--clip-norm``), False to write keys of a file.
    """

    def __init__(self, known: Iterable[str], elsewhere: Mapping[str, str], *, options: bool) -> None:
        self._write = option_of if options else str
        self._known = {_plain(key): self._write(key) for key in known}
        self._elsewhere = {
            name: re.sub(r"\{(.*?)\}", lambda match: self._write(match[1]), words)
            for name, words in elsewhere.items()
            if all(_plain(key) in self._known for key in re.findall(r"\{(.*?)\}", words))
        }

    def meant(self, unknown: str) -> str:
        """Return a hint for a user who wrote the unknown name ``unknown``; ``""`` if no name is similar.

        >>> names = Names(["learning_rate", "optimizer.clip_norm"], {"lr": "{learning_rate}"}, options=True)
        >>> names.meant("--lr"), names.meant("--learning-rte")
        ('in tawpipe it is --learning-rate', 'did you mean --learning-rate?')
        >>> names.meant("--clip_norm"), names.meant("--zzz")
        ('did you mean --optimizer.clip-norm?', '')
        """
        word = _plain(unknown)
        if last := [name for name in self._known if name.rpartition(".")[2] == word]:
            return f"did you mean {self._known[last[0]]}?"
        for name in [word, *difflib.get_close_matches(word, [*self._known, *self._elsewhere], n=1, cutoff=0.6)]:
            if name in self._elsewhere:
                return f"in tawpipe it is {self._elsewhere[name]}"
            if name in self._known:
                return f"did you mean {self._known[name]}?"
        return ""


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")
