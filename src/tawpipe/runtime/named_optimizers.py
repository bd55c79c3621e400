"""Optimizers by name, all of them torch's own: vectors (norms, biases) are not decayed by any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tawpipe.runtime.optimizer import OptimizerFactory, adamw, decayed, whole_matrices
from tawpipe.runtime.storage import piece_of


def muon(
    learning_rate: float = 3e-4,
    *,
    muon_learning_rate: float | None = None,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> OptimizerFactory:
    """Muon for the matrices of layers, AdamW for embeddings, head and vectors, as Muon's authors advise.

    Args:
        learning_rate: of AdamW; and of Muon, whose updates are scaled to be as large as AdamW's (``match_rms_adamw``).
        muon_learning_rate: of Muon, without that scale (``original``).
        weight_decay: of all matrices.
        momentum: of Muon.
        betas, eps: of AdamW.
    """
    others = adamw(learning_rate, weight_decay=weight_decay, betas=betas, eps=eps)
    scaled = muon_learning_rate is None

    def make(parameters: list[nn.Parameter]) -> list[Optimizer]:
        hidden = [p for p in parameters if p.ndim == 2 and piece_of(p).in_layer]
        left = [p for p in parameters if not (p.ndim == 2 and piece_of(p).in_layer)]
        optimizers: list[Optimizer] = []
        if hidden:
            optimizers.append(
                torch.optim.Muon(
                    hidden,
                    lr=learning_rate if muon_learning_rate is None else muon_learning_rate,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    adjust_lr_fn="match_rms_adamw" if scaled else "original",
                )
            )
        if left:
            other = others(left)
            assert isinstance(other, Optimizer)
            optimizers.append(other)
        return optimizers

    make.__name__ = "Muon"
    return whole_matrices(make)


def _named(kind: Any, **usual: Any) -> Callable[..., OptimizerFactory]:
    def of(learning_rate: float, *, weight_decay: float = 0.0, **options: Any) -> OptimizerFactory:
        def make(parameters: list[nn.Parameter]) -> Optimizer:
            return kind(decayed(parameters, weight_decay), lr=learning_rate, **{**usual, **options})

        make.__name__ = kind.__name__
        return make

    return of


def _adafactor(learning_rate: float, *, weight_decay: float = 0.0) -> OptimizerFactory:
    return whole_matrices(_named(torch.optim.Adafactor)(learning_rate, weight_decay=weight_decay))


BY_NAME: Mapping[str, Callable[..., OptimizerFactory]] = {
    "adamw": adamw,
    "adam": _named(torch.optim.Adam, fused=True),
    "sgd": _named(torch.optim.SGD, momentum=0.9, fused=True),
    "rmsprop": _named(torch.optim.RMSprop),
    "adafactor": _adafactor,
    "muon": muon,
}
"""Name -> what makes its factory, from a learning rate and options; ``train/config.py`` says which it takes."""
