"""Random numbers of blocks: equal wherever and whenever a block computes a micro-batch, and independent of other code.

A forward pass and its recomputation must draw equal numbers (dropout, a router's noise), on any rank and in any order.
torch's default generators are not suitable: other threads of the process draw from them, too (a second pipeline or the
user's script), and seeding them would change their numbers. So on CPUs every operation of a block that draws gets a
generator of its own. GPU kernels accept none: there the default generators are seeded while the block is issued, and
restored afterwards. Only the issuing thread draws from the device's generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_default_lock = threading.Lock()


def seed_of(*numbers: int) -> int:
    """Return a 64-bit seed that depends on all of ``numbers``, each 0 or more."""
    high, low = np.random.SeedSequence(numbers).generate_state(2)
    return int(high) << 32 | int(low)


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if this call of an operator draws random numbers.

    Attention is marked as random in torch even without dropout; this returns False for it then.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


class OwnGenerator(TorchDispatchMode):
    """Mode in which every random operation on the CPU uses ``generator`` instead of the default one.

    ``drew`` becomes True when an operation has drawn.
    """

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator, self.drew = generator, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; if it draws random numbers, run it with ``generator`` and set ``drew``."""
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": self.generator})
        name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
        if name in func._overloadpacket.overloads():
            return getattr(func._overloadpacket, name)(*args, **{**kwargs, "generator": self.generator})
        with _default_lock:  # the few operations that accept no generator
            theirs = torch.default_generator.get_state()
            torch.default_generator.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(theirs)


class BlockRandomness:
    """Random numbers for the forward passes of blocks.

    Args:
        device: Device of the blocks.
        compiled: True if layers are compiled. Compiled code always draws from the default generators.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self._device, self._swap = device, compiled or device.type != "cpu"
        self._draws: dict[Hashable, bool] = {}

    def run(self, block: Hashable, seed: int, forward: Callable[[], T]) -> T:
        """Return ``forward()``, run with random numbers that start from ``seed``; torch's generators stay unchanged.

        Intercepting every operation costs time. So on CPUs a block that drew nothing in its first run is not
        intercepted later. If the default generator changes during such a run, by another thread or by the block, the
        block runs again, intercepted.

        Args:
            block: Key of the block.
            seed: Seed of its random numbers.
            forward: Function without side effects.
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

    def seeded(self, seed: int) -> AbstractContextManager[object]:
        """Return a context in which the blocks that this thread runs draw random numbers that start from ``seed``.

        On CPUs, operations that draw are intercepted. On GPUs and for compiled layers, torch's default generators are
        seeded, and restored at the end."""
        if self._swap:
            return self._default_generators_seeded(seed)
        return OwnGenerator(torch.Generator().manual_seed(seed))

    @contextmanager
    def _default_generators_seeded(self, seed: int) -> Iterator[None]:
        """Seed torch's default generators in this context, of the CPU and of this GPU; restore their states afterwards.

        Holds a lock meanwhile: another thread that enters such a context waits."""
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
