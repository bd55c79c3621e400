"""Values of settings: the values that a type allows, reading them from text and YAML, and describing them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin


class Open:
    """Number that the user has not set: the user sees ``null`` or ``auto``, and computations see the usual value.

    A run replaces it when it knows a suitable value.
    """

    word = "null"
    """Value as the user writes it."""


class _OpenInt(Open, int):
    pass


class _OpenFloat(Open, float):
    pass


def open_number(usual: Any, word: str = "null") -> Any:
    """Return the default of a setting that the run settles if the user does not: an ``Open`` number equal to ``usual``.

    >>> open_number(60) + 1, isinstance(open_number(60), Open), open_number(512, "auto").word
    (61, True, 'auto')

    Args:
        word: value as the user writes it.
    """
    number = (_OpenFloat if isinstance(usual, float) else _OpenInt)(usual)
    number.word = word
    return number


def bounded(
    default: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field for a number within bounds. ``None`` is allowed if the type allows it.

    Args:
        default: default value.
        minimum: least value.
        above: the value must be greater than this.
        maximum: greatest value.
        below: the value must be less than this.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


def describe_bounds(metadata: Mapping[str, Any]) -> str:
    """Return the bounds in a field's metadata as text, such as ``at least 1 and below 5``; ``""`` without bounds."""
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    return " and ".join(f"{words[name]} {metadata[name]:g}" for name in words if name in metadata)


def describe(hint: Any, bounds: str = "") -> str:
    """Return a description of the values that a type allows.

    >>> describe(int | None, "at least 1"), describe(Literal["a", "b"])
    ('a whole number at least 1 or null', 'one of a, b')

    Args:
        hint: the type.
        bounds: words about bounds of numbers.
    """
    words = {int: f"a whole number {bounds}".strip(), float: f"a number {bounds}".strip(), bool: "true or false"}
    words |= {str: "a text", types.NoneType: "null"}

    def one(kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "one of " + ", ".join(map(str, get_args(kind)))
        if get_origin(kind) in (tuple, list):
            return "a list of " + {str: "texts", int: "whole numbers", float: "numbers"}[get_args(kind)[0]]
        return words[kind]

    return " or ".join(map(one, kinds_of(hint)))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint allows: ``int | None`` -> ``(int, NoneType)``."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Words for true and false, as in YAML."""


def read_scalar(kind: Any, value: object) -> Any:
    """Convert a value from YAML, or a word from the command line, to the type ``kind``.

    >>> read_scalar(float, "3e-4"), read_scalar(bool, "true"), read_scalar(types.NoneType, "null")
    (0.0003, True, None)

    Raises:
        ValueError: it is no value of this type.
    """
    text = value if isinstance(value, str) else None
    if get_origin(kind) is Literal:
        if value in (allowed := get_args(kind)):
            return value
        switch = {True: "on", False: "off"}.get(read_scalar(bool, value))  # YAML reads on and off as booleans
        if switch in allowed:
            return switch
    elif kind is types.NoneType:
        if value is None or text == "null":
            return None
    elif kind is str:
        if text is not None:
            return text
    elif kind is bool:
        answer = BOOLEANS.get(text.lower()) if text else value
        if isinstance(answer, bool):
            return answer
    elif text is not None or type(value) in (int, kind):
        return kind(value)
    raise ValueError(value)
