"""Finds missing kernels of mixers: transformers runs torch code if their package is not installed."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Iterator

import torch
from torch import nn

from tawpipe.model.chain import Chain

KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Module name of a package with kernels of mixers -> name under which it is installed."""
OF_DECODING = "update", "recurrent"
"""Parts of the names of functions that compute one more token."""


def kernel_packages() -> Iterator[tuple[str, str]]:
    """Yield (name, version) of every package with kernels of mixers, with a note in place of a missing version."""
    for name in KERNELS.values():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed: Mamba and linear attention run as torch code without it"


def fallen_back(mixer: nn.Module) -> dict[str, list[str]]:
    """Return the functions that ``mixer`` runs as torch code: package that contains a kernel -> names of functions."""
    missing: dict[str, list[str]] = {}
    names = {name for kind in type(mixer).__mro__ for name in _names_in(kind)}
    for name, function in vars(sys.modules[type(mixer).__module__]).items():
        if name not in names or not inspect.isfunction(function) or any(part in name for part in OF_DECODING):
            continue
        closure = inspect.getclosurevars(function).nonlocals
        if closure.get("is_new_implementation") is False:
            package = str(closure["package"])
            missing.setdefault(KERNELS.get(package, package), []).append(str(closure["func_name"]))
    return missing


def _names_in(kind: type) -> tuple[str, ...]:
    """Return the names that the ``forward`` method of the class ``kind`` refers to."""
    code = getattr(inspect.unwrap(vars(kind).get("forward", object)), "__code__", None)
    return code.co_names if code else ()


def mixer_words(chain: Chain, device: torch.device, share: float) -> str:
    """Return a line about the code that computes a model's mixers: kernels or torch code; ``""`` without mixers.

    Args:
        chain: the model.
        device: device on which it runs.
        share: part of the layers' time that mixers take, for layers with mixers; 0 if it was not measured.
    """
    layers = zip(chain.layers, chain.mixing, strict=False)
    mixers = [layer.get_submodule(name) for layer, mixing in layers for name in mixing.mixers]
    if not mixers:
        return ""
    measured = f"; {share:.0%} of the time of their layers, measured" if share else ""
    if device.type == "cpu":
        return f"torch code, as on every CPU{measured}"
    missing: dict[str, list[str]] = {}
    for mixer in {type(mixer): mixer for mixer in mixers}.values():
        missing |= fallen_back(mixer)
    if not missing:
        return f"kernels of installed packages{measured}"
    parts = [f"{', '.join(functions)} of {package}" for package, functions in missing.items()]
    return f"torch code instead of {' and '.join(parts)}, not installed here{measured}"
