"""The attention that a check has really run: torch's operators, as its profiler sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd.profiler import profile

from tawpipe.model.kernels import flash_in_use

ATTENTION = re.compile("^(?!autograd::).*(attention|attn|scores)(?!.*Backward0)", re.IGNORECASE)
"""Not the graph's nodes, whose operators have names of their own."""


@contextmanager
def attention_seen(on: Callable[[Callable[[], None]], object] = lambda run: run()) -> Iterator[list[str]]:
    """A context whose list has, when it is over, the names of all operators and functions of attention that ran.

    Operators alone: a profiler of a device's kernels takes memory and time of it for good. Flash attention 2 and 3 have
    the same operator, so that the 3 is named.

    Args:
        on: runs a function on the thread that computes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says on standard error that it starts and stops
    names, watch = list[str](), profile()

    def start() -> None:
        watch.__enter__()

    def stop() -> None:
        watch.__exit__(None, None, None)

    on(start)
    try:
        yield names
    finally:
        on(stop)
    assert watch.kineto_results is not None
    seen = {event.name() for event in watch.kineto_results.events() if ATTENTION.search(event.name())}
    flash = flash_in_use()
    names += sorted(f"{name} ({flash})" if "flash" in name and flash != "FA2" else name for name in seen)
