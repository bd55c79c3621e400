"""Roles of a model's parameters: matrix of a linear layer, vector, or table (all others).

A shape does not tell the role: biases of experts and norms of heads are vectors that are stored as tables."""

from __future__ import annotations

import re

from torch import nn

MATRIX, VECTOR, TABLE = "matrix", "vector", "table"
"""Roles of parameters. Matrix: the weight of a linear layer or of a router. Vector: a norm, a bias or another parameter
without weight decay. Table: all others, such as embeddings, convolution kernels, stacked experts and their adapters."""
_OF_EXPERTS = re.compile(r"\.experts(\.base_layer)*\.lora_")
"""Pattern for names of adapters on stacked experts: one matrix holds the ranks of all experts."""
_VECTORS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)|(^|\.)(A_log|D)$", re.IGNORECASE)
"""Pattern for names of vectors, or of modules that hold them. It covers the names in transformers'
``Trainer.get_decay_parameter_names``, and the two parameters of Mamba's state space that its authors do not decay."""


def roles_of(model: nn.Module) -> dict[str, str]:
    """Return the role of every parameter of ``model``, by its name in ``named_parameters()``."""
    modules = dict(model.named_modules())
    return {name: _role(name, value, modules[name.rpartition(".")[0]]) for name, value in model.named_parameters()}


def _role(name: str, parameter: nn.Parameter, owner: nn.Module) -> str:
    """Return the role of a parameter; ``MATRIX``, ``VECTOR`` and ``TABLE`` say what belongs to each."""
    last, kind = ".".join(name.split(".")[-2:]), type(owner).__name__.lower()
    if _OF_EXPERTS.search(name):
        return TABLE
    if parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False):
        return VECTOR
    # A linear layer inside a module that is called a norm (DBRX, gated norms) keeps its role.
    embeds = isinstance(owner, nn.Embedding) or "embedding" in kind
    if not isinstance(owner, nn.Linear) and (("norm" in kind and not embeds) or _VECTORS.search(last)):
        return VECTOR
    return MATRIX if parameter.ndim == 2 and last.endswith(".weight") and not embeds else TABLE
