"""The kernel that attention is computed with: the fastest that the device and the installed software have.

* Flash attention 3 on Hopper, where its package is installed and computes the model's heads (``activate_flash``); torch
  puts it under its own name of flash attention 2, so that the call for packed documents stays the same.
* cuDNN on Hopper and Blackwell for rows of one document whose length recurs (``recurs``), where torch itself takes it
  first: it is faster there than flash attention 2, and on Ampere slower.
* Flash attention 2 otherwise, and torch's fused kernels document by document for what it cannot do.
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
"""Lengths of rows that are set are multiples of it, as a rule; those of rows that are filled seldom."""


@dataclass(frozen=True)
class Offer:
    """What a device and the software offer for attention.

    Args:
        capability: CUDA compute capability; None on the CPU.
        flash: the flash attention that torch calls, FA2 unless it was told otherwise.
        cudnn: torch takes cuDNN before flash attention.
    """

    capability: tuple[int, int] | None = None
    flash: str = "FA2"
    cudnn: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Offer:
        """The offer of this process's device, as it is now."""
        if device.type != "cuda":
            return cls()
        capability, cudnn = _fixed(device)
        usable = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
        return cls(capability, flash_in_use(), cudnn and usable)


@cache
def _fixed(device: torch.device) -> tuple[tuple[int, int], bool]:
    """Compute capability, and whether torch prefers cuDNN on it: from cuDNN 9.15.1 on, on Hopper and Blackwell."""
    capability = torch.cuda.get_device_capability(device)
    version = 0 if torch.version.hip else torch.backends.cudnn.version() or 0
    return capability, capability[0] in (9, 10) and version > 91500


def activate_flash(device: torch.device, dtype: torch.dtype, text_config: Callable[[], Any]) -> None:
    """Let torch use flash attention 3 in this process: on Hopper, where its package is installed and has what the model
    needs; packages are built without some sizes of heads, without windows, or without a backward pass.

    For processes that are ours: it replaces a kernel for everything in the process, and has no dropout.

    Args:
        text_config: the model's, which is asked for only if it matters.
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
    except Exception as problem:  # whatever a package raises that was built without it
        library.restore_flash_attention_impl()
        words = f"heads of size {head_dim}" + (f" and a window of {window}" if window else "")
        first = (str(problem).splitlines() or [type(problem).__name__])[0]
        logger.warning("flash attention 2 is used: the package of 3 fails on %s in %s (%s)", words, dtype, first)


def try_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Run the kernel for packed documents forward and backward on two small ones, and that for chunks on a row's last
    tokens. Raises what they raise.
    """
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
        torch.cuda.synchronize(device)  # or a fault of the device would be another kernel's


def choose_kernel(offer: Offer, dtype: torch.dtype, problem: str | None, *, whole_rows: bool) -> tuple[Kernel, str]:
    """The kernel for some documents, and why it is not the one for packed documents.

    Args:
        problem: what the kernel for packed documents lacks (``kernels.why_not_varlen``).
        whole_rows: every row is one document of a length that recurs, without a window, and cuDNN takes the heads.
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
    """The kernel's name for the reader, before anything has run."""
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
    """True for sizes of heads that cuDNN computes forward and backward in every release."""
    return head_dim <= 128 and head_dim % 8 == 0


def recurs(tokens: int) -> bool:
    """True for lengths of rows that come again and again. cuDNN makes a plan for every other length, forward and
    backward, which takes up to a second; unless it is told to round lengths.
    """
    return tokens % FIXED == 0 or os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"


def kernel_of_model(config: Any, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> str:
    """``attention_kernel`` of a model, by its text config and the names of its parameters."""
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
