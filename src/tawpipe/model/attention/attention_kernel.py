"""Choice of the attention kernel: the fastest one that the device and the installed software provide.

* Flash attention 3 on Hopper, if its package is installed and supports the model's heads (``activate_flash``). torch
  calls it under the name of flash attention 2, so that the call for packed documents stays the same.
* cuDNN on Hopper and Blackwell for rows of one document whose length recurs (``recurs``), if a trial run does not fail.
  torch prefers it there as well: it is faster than flash attention 2. On Ampere it is slower.
* Flash attention 2 otherwise. torch's fused kernels, document by document, for attention that it does not support.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.attention as library

from tawpipe.model import flash, kernels
from tawpipe.model.flash import Part
from tawpipe.model.kernels import Documents, flash_in_use
from tawpipe.model.shapes import head_size, setting_of

logger = logging.getLogger(__name__)
HALF = (torch.bfloat16, torch.float16)
Kernel = Literal["varlen", "cudnn", "documents"]
FIXED = 1024
"""Row lengths that are set by the user are usually multiples of it. Lengths of filled rows seldom are."""


@dataclass(frozen=True)
class Offer:
    """Attention kernels that the device and the software provide.

    Args:
        capability: CUDA compute capability; None on the CPU.
        flash: flash attention that torch calls, FA2 unless another one was activated.
        cudnn: True if torch prefers cuDNN to flash attention.
    """

    capability: tuple[int, int] | None = None
    flash: str = "FA2"
    cudnn: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Offer:
        """Return the kernels available on ``device`` in this process, in its present state."""
        if device.type != "cuda":
            return cls()
        capability, cudnn = _fixed(device)
        usable = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
        return cls(capability, flash_in_use(), cudnn and usable)


@cache
def _fixed(device: torch.device) -> tuple[tuple[int, int], bool]:
    """Return the compute capability of ``device``, and True if torch prefers cuDNN on it and it runs there.

    It does so from cuDNN 9.15.1 on, on Hopper and Blackwell. Some devices have no execution plan for it, and torch then
    raises an error instead of using another kernel."""
    capability = torch.cuda.get_device_capability(device)
    version = 0 if torch.version.hip else torch.backends.cudnn.version() or 0
    if capability[0] not in (9, 10) or version <= 91500:
        return capability, False
    try:
        with torch.enable_grad():
            query = torch.zeros(1, 2, FIXED, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
            output = kernels.whole_rows(query, query[:, :1], query[:, :1], 1.0)
            torch.autograd.grad(output.sum(), query)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as problem:
        logger.warning("cuDNN's attention is not used: it fails here (%s)", str(problem).splitlines()[0])
        return capability, False
    return capability, True


def activate_flash(device: torch.device, dtype: torch.dtype, text_config: Callable[[], Any]) -> None:
    """Make torch use flash attention 3 in this process, if the device is a Hopper and the package supports the model.

    Packages are built without some head sizes, without windows, or without a backward pass. If a trial run fails, flash
    attention 2 is restored and a warning is logged. Call it only in processes that this library started: it replaces a
    kernel for the whole process, and the new kernel has no dropout.

    Args:
        device: device of this process.
        dtype: dtype in which attention computes.
        text_config: function that returns the model's text config. It is called only if needed.
    """
    activate = getattr(library, "activate_flash_attention_impl", None)
    if device.type != "cuda" or torch.version.hip or activate is None or flash_in_use() != "FA2" or dtype not in HALF:
        return
    if torch.cuda.get_device_capability(device)[0] != 9:
        return
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError, AttributeError, OSError) as problem:
        logger.info("flash attention 3 is not used: %s", problem)
        return
    config = text_config()
    head_dim, window = head_size(config), setting_of(config, "sliding_window")
    try:
        for tried_window in {None, window or None}:
            try_kernels(device, dtype, head_dim, tried_window)
    except Exception as problem:  # a package built without it may raise any exception
        library.restore_flash_attention_impl()
        words = f"heads of size {head_dim}" + (f" and a window of {window}" if window else "")
        first = (str(problem).splitlines() or [type(problem).__name__])[0]
        logger.warning("flash attention 2 is used: the package of 3 fails on %s in %s (%s)", words, dtype, first)


def try_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Run the attention kernels forward and backward on small inputs, and raise the exceptions that they raise.

    The kernel for packed documents runs on two documents, the kernel for chunks on the last tokens of a row."""
    query = torch.zeros(1, 2, 256, head_dim, dtype=dtype, device=device, requires_grad=True)
    documents, window = Documents.of((100, 156), (1, 256), device), window and min(window, 64)
    with torch.enable_grad():
        output = kernels.varlen(query, query, query, documents, window, 1.0)
        torch.autograd.grad(output.sum(), query)
    row = query.detach()
    last, seen = row[:, :, 156:], (row[:, :1], row[:, :1])
    part = Part(slice(0, 100), slice(0, 256), -1 if window is None else window - 1, 0)
    output, sums = flash.attention(last, *seen, [part], 1.0)
    targets = torch.zeros_like(seen[0], dtype=torch.float32), torch.zeros_like(seen[1], dtype=torch.float32)
    flash.gradients(last, last, output, sums, seen, targets, [part], 1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # otherwise a device error would appear in a later kernel


def choose_kernel(offer: Offer, dtype: torch.dtype, problem: str | None, *, whole_rows: bool) -> tuple[Kernel, str]:
    """Return the kernel for some documents, and the reason for ``documents`` (``""`` for other kernels).

    ``varlen`` computes packed documents, ``cudnn`` whole rows, and ``documents`` one document after another, which is
    slower.

    Args:
        offer: kernels that the device provides.
        dtype: dtype of the queries.
        problem: reason why the kernel for packed documents cannot be used (``kernels.why_not_varlen``), or None.
        whole_rows: True if every row is one document of a recurring length, without a window, and cuDNN supports the
            heads.
    """
    if offer.capability is None:
        return "documents", "on the CPU"
    if dtype not in HALF:
        return "documents", f"no kernel for packed documents computes in {str(dtype).removeprefix('torch.')}"
    if offer.capability[0] < 8:
        return "documents", "flash attention needs a device of compute capability 8"
    if problem is not None:
        return "documents", problem
    return "cudnn" if whole_rows and offer.cudnn and offer.flash == "FA2" else "varlen", ""


def attention_kernel(
    offer: Offer,
    dtype: torch.dtype,
    head_dim: int,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: bool = False,
) -> str:
    """Return a description of the attention kernel that a model will use. Nothing is run.

    Args:
        offer: kernels that the device provides.
        dtype: dtype of the queries.
        head_dim: elements of a head.
        dropout: dropout probability.
        softcap: cap of the scores, or None.
        sinks: True if the model has attention sinks.
    """
    problem = kernels.why_not_varlen(head_dim, head_dim, dropout, None, None, None)
    kernel, why = choose_kernel(offer, dtype, problem, whole_rows=False)
    if sinks and softcap is None and kernel == "varlen":
        return f"flash attention {offer.flash.removeprefix('FA')}, one document at a time, sinks from its log-sum-exp"
    if softcap is not None or sinks or (dropout > 0 and offer.capability is None):
        what = "soft caps" if softcap is not None else "sinks" if sinks else "dropout on the CPU"
        return f"scores computed in parts, because no fused kernel has {what}"
    if kernel == "documents":
        return f"torch's fused kernels (SDPA), one document at a time: {why}"
    name = f"flash attention {offer.flash.removeprefix('FA')} (varlen)"
    if offer.flash == "FA2" and offer.capability is not None and offer.capability[0] == 9:
        name += "; flash attention 3 would be faster but is not installed or activated"
    if choose_kernel(offer, dtype, problem, whole_rows=cudnn_takes(head_dim))[0] == "cudnn":
        name += f"; cuDNN for rows of one document and a multiple of {FIXED:,} tokens"
    return name


def cudnn_takes(head_dim: int) -> bool:
    """Return True for head sizes that cuDNN supports, forward and backward, in every release."""
    return head_dim <= 128 and head_dim % 8 == 0


def recurs(tokens: int) -> bool:
    """Return True for row lengths in tokens that recur, or if cuDNN is set to round lengths.

    For every new length cuDNN makes a plan, forward and backward, which takes up to a second."""
    return tokens % FIXED == 0 or os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"


def kernel_of_model(config: Any, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> str:
    """Return ``attention_kernel`` of a model.

    Args:
        config: the model's text config.
        names: names of the model's parameters.
        device: device on which it runs.
        dtype: dtype in which it computes.
    """
    head_dim = head_size(config)
    dropouts = [
        getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    ]
    return attention_kernel(
        Offer.of(device),
        dtype,
        head_dim,
        dropout=max((dropout for dropout in dropouts if isinstance(dropout, float)), default=0.0),
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=any(name.endswith("sinks") for name in names),
    )
