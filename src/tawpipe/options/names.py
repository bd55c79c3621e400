"""The name that was meant: by somebody who mistyped one, or who knows a setting under another trainer's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def option_of(key: str) -> str:
    """How a setting is called on the command line.

    >>> option_of("optimizer.clip_norm")
    '--optimizer.clip-norm'
    """
    return "--" + key.replace("_", "-")


@dataclass(frozen=True)
class Change:
    """Another value of a setting.

    Args:
        setting: its key (``optimizer.clip_norm``).
    """

    setting: str
    value: object


def spelled(changes: Iterable[Change]) -> str:
    """Return the words of the command line that make these changes.

    >>> spelled([Change("optimizer.clip_norm", 0), Change("schedule.early_updates", True)])
    '--optimizer.clip-norm 0 --schedule.early-updates true'
    """
    values = ((change.setting, change.value) for change in changes)
    return " ".join(f"{option_of(key)} {str(v).lower() if isinstance(v, bool) else v}" for key, v in values)


class Names:
    """All names that a command or a file may use.

    Args:
        known: the settings by their keys (``optimizer.clip_norm``).
        elsewhere: names that other programs use, with dashes, and what takes their place here: words in which
            ``{key}`` stands for a setting. Those with a setting that is not known are left out.
        options: whether names are written as on the command line (``--clip-norm``), or as keys of a file.
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
        """A hint for who wrote ``unknown``; empty if nothing comes near.

        >>> names = Names(["learning_rate", "optimizer.clip_norm"], {"lr": "{learning_rate}"}, options=True)
        >>> names.meant("--lr"), names.meant("--learning-rte")
        ('here it is --learning-rate', 'did you mean --learning-rate?')
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
