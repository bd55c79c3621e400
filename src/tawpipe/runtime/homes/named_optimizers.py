"""Optimizers by name, all from torch; Adafactor has a step of its own. No optimizer decays vectors (norms, biases)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tawpipe.model.roles import MATRIX
from tawpipe.runtime.homes.optimizer import (
    ROLES,
    GroupedFactory,
    OptimizerFactory,
    adamw,
    decayed,
    role_by,
    whole_matrices,
)
from tawpipe.runtime.homes.storage import piece_of


def muon(
    learning_rate: float = 3e-4,
    *,
    muon_learning_rate: float | None = None,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    groups: str = ROLES,
) -> OptimizerFactory:
    """Return a factory of Muon for the matrices of linear layers, and AdamW for all other parameters.

    AdamW updates embeddings, head, stacked experts, kernels and vectors.

    Args:
        learning_rate: Learning rate of AdamW, and of Muon with updates scaled to the size of AdamW's
            (``match_rms_adamw``).
        muon_learning_rate: Learning rate of Muon without this scale (``original``); None to use ``learning_rate``.
        weight_decay: Decay of all parameters except vectors.
        momentum: Momentum of Muon.
        betas, eps: Of AdamW.
        groups: ``roles``; or ``shapes``, with which Muon takes every matrix of a layer, each stacked expert alone. Use
            it to resume from a checkpoint made that way.
    """
    scaled = muon_learning_rate is None
    rate, scale = (learning_rate, "match_rms_adamw") if scaled else (muon_learning_rate, "original")
    of_hidden = partial(torch.optim.Muon, lr=rate, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn=scale)

    def make(parameters: list[nn.Parameter], groups: str) -> list[Optimizer]:
        """Return Muon for the matrices of linear layers, and AdamW for the other parameters, by the rule ``groups``.

        An optimizer that would have no parameters is left out."""
        of_others: Any = adamw(learning_rate, weight_decay=weight_decay, betas=betas, eps=eps, groups=groups)
        hidden, others = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in parameters:
            is_table = parameter.ndim == 2 and piece_of(parameter).in_layer
            (hidden if is_table and role_by(groups, parameter) == MATRIX else others).append(parameter)
        return [of(some) for of, some in ((of_hidden, hidden), (of_others, others)) if some]

    return whole_matrices(GroupedFactory(make, "Muon", groups))


def _named(kind: Any, **usual: Any) -> Callable[..., OptimizerFactory]:
    """Return a function that makes factories of the optimizer class ``kind`` with the default options ``usual``."""

    def of(learning_rate: float, *, weight_decay: float = 0.0, groups: str = ROLES, **options: Any) -> OptimizerFactory:
        def make(parameters: list[nn.Parameter], groups: str) -> Optimizer:
            return kind(decayed(parameters, weight_decay, groups), lr=learning_rate, **{**usual, **options})

        return GroupedFactory(make, kind.__name__, groups)

    return of


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor with a step that never waits for a GPU; torch's own step reads two norms of every parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters. States and results equal ``torch.optim.Adafactor``."""
        for group in self.param_groups:
            lists: tuple[list[Any], ...] = ([], [], [], [], [], [])
            self._init_group(group, *lists)
            for value, gradient, rows, columns, squares, count in zip(*lists, strict=True):
                eps1, eps2 = group["eps"]
                eps1 = torch.finfo(value.dtype).eps if eps1 is None else eps1
                count += 1
                on_device = count.device == value.device
                number = count.double() if on_device else value.new_full((), float(count), dtype=torch.float64)
                fresh = (number ** group["beta2_decay"]).to(value.dtype)
                rate = (value.norm(2).double() / value.numel() ** 0.5).clamp(min=eps2)
                rate *= number.rsqrt().clamp(max=group["lr"])
                value.mul_(1 - group["lr"] * group["weight_decay"])
                if squares is None:
                    rows.lerp_(gradient.square().mean(-1, keepdim=True), fresh)
                    columns.lerp_(gradient.square().mean(-2, keepdim=True), fresh)
                    update = (rows @ columns).div_(rows.mean(-2, keepdim=True).clamp_(min=eps1))
                else:
                    update = squares.lerp_(gradient.square(), fresh).clone()
                update.clamp_(min=eps1**2).rsqrt_().mul_(gradient)
                most = (update.norm(2).double() / (update.numel() ** 0.5 * group["d"])).clamp(min=1)
                value.sub_(update.mul_(rate / most))


def _adafactor(learning_rate: float, *, weight_decay: float = 0.0, groups: str = ROLES) -> OptimizerFactory:
    """Return a factory of ``Adafactor`` on whole matrices."""
    return whole_matrices(_named(Adafactor)(learning_rate, weight_decay=weight_decay, groups=groups))


BY_NAME: Mapping[str, Callable[..., OptimizerFactory]] = {
    "adamw": adamw,
    "adam": _named(torch.optim.Adam, fused=True),
    "sgd": _named(torch.optim.SGD, momentum=0.9, fused=True),
    "rmsprop": _named(torch.optim.RMSprop),
    "adafactor": _adafactor,
    "muon": muon,
}
"""Optimizer name -> function that makes its factory from a learning rate and options.

``train/settings/config.py`` lists these names.
"""
