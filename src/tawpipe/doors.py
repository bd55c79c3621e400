"""Doors: calls from a lower-level package into a higher-level one, without importing it.

A package never imports a package of a higher level. If it offers a function that only a higher-level package
implements, it keeps a :class:`Door`. The higher-level package registers the function when it is imported. The first
call through the door imports that package by name.
"""

from __future__ import annotations

import importlib
from typing import Generic, TypeVar

T = TypeVar("T")


class Door(Generic[T]):
    """Access to a function, or a group of functions, that a higher-level package registers.

    Args:
        module: name of the module that registers the function.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._registered: T | None = None

    def register(self, function: T) -> T:
        """Register ``function`` behind this door, replacing an earlier one, and return it. Usable as a decorator."""
        self._registered = function
        return function

    def __call__(self) -> T:
        """Return the registered function or group. The first call imports the module that registers it."""
        if self._registered is None:
            importlib.import_module(self._module)
        assert self._registered is not None, f"{self._module} registers nothing"
        return self._registered
