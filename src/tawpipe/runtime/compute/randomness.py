"""Random numbers of blocks: the same wherever and whenever a block computes a micro-batch, whoever else draws.

A forward pass and its recomputation must draw the same numbers (dropout, a router's noise), on whatever rank and in
whatever order. torch's default generators do not serve for that: other threads of the process draw from them too, a
second pipeline or the user's own script, and seeding them would change what those see. So on CPUs every operation of a
block that draws is given a generator of its own. Kernels on GPUs take none: there the default generators are seeded for
the time of the block and then put back; only the thread that issues the kernels draws from the device's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_default_lock = threading.Lock()


def seed_of(*numbers: int) -> int:
    """64 bits that depend on all of ``numbers``, each 0 or more."""
    high, low = np.random.SeedSequence(numbers).generate_state(2)
    return int(high) << 32 | int(low)


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if this call of an operator draws random numbers. Attention is marked so even without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


class OwnGenerator(TorchDispatchMode):
    """Gives every operation that draws random numbers on the CPU ``generator`` in the place of the default one."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator, self.drew = generator, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": self.generator})
        name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
        if name in func._overloadpacket.overloads():
            return getattr(func._overloadpacket, name)(*args, **{**kwargs, "generator": self.generator})
        with _default_lock:  # the few that take no generator at all
            theirs = torch.default_generator.get_state()
            torch.default_generator.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(theirs)


class BlockRandomness:
    """Seeds the forward passes of blocks.

    Args:
        device: where blocks compute.
        compiled: layers are compiled: such code draws from the default generators whatever stands around it.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self._device, self._swap = device, compiled or device.type != "cpu"
        self._draws: dict[Hashable, bool] = {}

    def run(self, block: Hashable, seed: int, forward: Callable[[], T]) -> T:
        """``forward()`` with random numbers that start from ``seed``; torch's generators are left as they were.

        Args:
            block: what runs. Intercepting every operation costs time, so those that drew nothing when they first ran go
                without from then on. Should the default generator have moved on during such a run, by another thread or
                because the block draws after all, it is run again and watched.
            forward: changes nothing but what it returns.
        """
        if self._swap:
            with self.seeded(seed):
                return forward()
        if not self._draws.get(block, True):
            before = torch.default_generator.get_state()
            result = forward()
            if torch.equal(before, torch.default_generator.get_state()):
                return result
        with OwnGenerator(torch.Generator().manual_seed(seed)) as mode:
            result = forward()
        self._draws[block] = self._draws.get(block, False) or mode.drew
        return result

    def again(self, block: Hashable, seed: int) -> AbstractContextManager[object]:
        """A context for a block that has run: within it, this thread draws the same numbers once more."""
        return self.seeded(seed) if self._swap or self._draws[block] else nullcontext()

    def seeded(self, seed: int) -> AbstractContextManager[object]:
        """A context in which this thread's random numbers start from ``seed``; torch's generators stay as they were."""
        if self._swap:
            return self._default_generators_seeded(seed)
        return OwnGenerator(torch.Generator().manual_seed(seed))

    @contextmanager
    def _default_generators_seeded(self, seed: int) -> Iterator[None]:
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index or torch.cuda.current_device()])
        with _default_lock:
            states = [generator.get_state() for generator in generators]
            for generator in generators:
                generator.manual_seed(seed)
            try:
                yield
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)
