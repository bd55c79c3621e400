"""Roles of parameters in a model: matrices of linear layers, vectors, and tables of anything else.

A shape does not tell them apart: biases of experts and norms of heads are vectors that are stored as tables.
"""

from __future__ import annotations

import re

from torch import nn

MATRIX, VECTOR, TABLE = "matrix", "vector", "table"
"""The weight of a linear layer or of a router; a norm, a bias or another parameter that does not decay; all else, such
as embeddings, kernels of convolutions and stacked experts."""
_VECTORS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)|(^|\.)(A_log|D)$", re.IGNORECASE)
"""Names of vectors, of a parameter or its module: those of transformers' ``Trainer.get_decay_parameter_names``, and of
the two in Mamba's state space that its authors do not decay."""


def roles_of(model: nn.Module) -> dict[str, str]:
    """Role of every parameter of ``model``, by its name in ``named_parameters()``."""
    modules = dict(model.named_modules())
    return {name: _role(name, value, modules[name.rpartition(".")[0]]) for name, value in model.named_parameters()}


def _role(name: str, parameter: nn.Parameter, owner: nn.Module) -> str:
    last, kind = ".".join(name.split(".")[-2:]), type(owner).__name__.lower()
    if parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False):
        return VECTOR
    # A linear layer keeps its role inside a module that is called a norm (DBRX, gated norms).
    embeds = isinstance(owner, nn.Embedding) or "embedding" in kind
    if not isinstance(owner, nn.Linear) and (("norm" in kind and not embeds) or _VECTORS.search(last)):
        return VECTOR
    return MATRIX if parameter.ndim == 2 and last.endswith(".weight") and not embeds else TABLE
