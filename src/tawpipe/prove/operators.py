"""Attention operators that a check has really run, as torch's profiler reports them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd.profiler import profile

from tawpipe.model.kernels import flash_in_use

ATTENTION = re.compile("^(?!autograd::).*(attention|attn|scores)(?!.*Backward0)", re.IGNORECASE)
"""Names of attention operators. Nodes of the autograd graph are left out, as their operators have names of
their own."""


@contextmanager
def attention_seen(on: Callable[[Callable[[], None]], object] = lambda run: run()) -> Iterator[list[str]]:
    """Record the attention operators that run within the context; the yielded list is filled when the context ends.

    Only operators are profiled: profiling a device's kernels permanently takes memory and time. Flash attention 2 and 3
    share an operator, so the version is added to its name if it is not 2.

    Args:
        on: runs a function on the thread that computes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence its messages on standard error
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
