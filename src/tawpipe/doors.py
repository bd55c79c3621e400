"""Doors: where a lower room calls what a higher one does.

A room never imports one that stands higher. Where it offers what only a higher room can do, it keeps a door: the
higher room registers the function when it is imported, and the first call through the door imports that room by name.
"""

from __future__ import annotations

import importlib
from typing import Generic, TypeVar

T = TypeVar("T")


class Door(Generic[T]):
    """A function, or a group of functions, that a higher room registers.

    Args:
        module: the module of the higher room that registers it.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._registered: T | None = None

    def register(self, function: T) -> T:
        """Put a function behind the door, in place of an earlier one; returns it."""
        self._registered = function
        return function

    def __call__(self) -> T:
        """Return what is registered; the first call imports the module that registers it."""
        if self._registered is None:
            importlib.import_module(self._module)
        assert self._registered is not None, f"{self._module} registers nothing"
        return self._registered
