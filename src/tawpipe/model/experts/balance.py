"""Balancing loss of mixtures of experts, computed layer by layer from the tokens that are computed at one time.

A router sends every token to the k experts with the largest logits. For the tokens of one piece (a micro-batch, or what
a device computes of it at one time), let f be the tokens per expert over all tokens, and P the mean of the softmax of
the logits, one number each per expert. The piece's loss in one layer is E * sum(f * P), as in transformers' function
for one layer. Padding is left out. A step adds the mean over pieces, each weighted by its labels that count, and over
routers, times the coefficient: to gradients only. The loss that is reported stays that of the tokens.

Routers are what transformers declares as sources of ``router_logits``. A hook notes their logits while a layer runs. A
node in the layer's graph, which changes nothing else, adds the gradient of the loss to that of the logits, and sums up
the numbers for the metrics. It runs once per layer and piece, whatever is recomputed, and never in an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch, tokens_of
from tawpipe.model.stubs import LayerCall

SETTING = "experts.balance"
NONE, AUTO = "none", "auto"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Config keys for the coefficient of this loss."""
_OTHERS = ("aux_loss_alpha", "router_z_loss_coef", "z_loss_coefficient")
"""Config keys for coefficients of other losses of routers, which are not trained."""


@dataclass(frozen=True)
class Router:
    """Router of a layer.

    Args:
        module: the module.
        index: index of the logits in its output, if that is a tuple.
        experts: number of its experts.
        chosen: number of experts for one token.
    """

    module: nn.Module
    index: int
    experts: int
    chosen: int


class ExpertBalance:
    """Balancing loss of a model.

    Args:
        routers: routers of all layers.
        coefficient: factor of the mean over routers.
    """

    def __init__(self, routers: Sequence[Router], coefficient: float) -> None:
        self.routers, self.coefficient = routers, coefficient
        self.width = 1 + max(router.experts for router in routers)
        """Numbers per router that ``StepBalance`` sums up."""
        self._hooks: list[Any] = []
        self._noted: dict[int, list[Any]] | None = None
        """Routers that have run in the present layer, by index: logits and chosen experts of each time."""

    def install(self) -> None:
        """Begin to note what routers compute."""
        for number, router in enumerate(self.routers):
            self._hooks.append(router.module.register_forward_hook(partial(self._note, number)))

    def remove(self) -> None:
        """End what ``install`` has begun."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """Note the logits of a router that has run, and the experts that it has chosen if it returns them."""
        if self._noted is not None:
            outputs = output if isinstance(output, tuple) else (output,)
            logits = outputs[self.routers[number].index].flatten(0, -2)
            tables = (each for each in outputs if isinstance(each, Tensor) and not each.is_floating_point())
            chosen = next((each for each in tables if each.ndim == 2 and len(each) == len(logits)), None)
            self._noted.setdefault(number, []).append((logits, chosen))

    def around(self, layer: Callable[[], Tensor], call: LayerCall, piece: RoutedTokens | None) -> Tensor:
        """Return ``layer()``, whose graph adds the gradient of the balancing loss in its backward pass.

        Args:
            layer: runs a layer.
            call: the layer's arguments.
            piece: tokens that the layer computes; None to add nothing.

        Raises:
            UserError: a router returns another number of logits than it has experts.
        """
        self._noted = {}
        try:
            output, noted = layer(), self._noted
        finally:
            self._noted = None
        for number, parts in noted.items() if torch.is_grad_enabled() else ():
            # several parts if documents run one by one
            logits, chosen = (None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True))
            router = self.routers[number]
            if parts[0][0].shape[-1] != router.experts:
                value = f"{parts[0][0].shape[-1]} logits for {router.experts} experts"
                raise UserError(SETTING, value, f"{NONE} for {type(router.module).__name__}")
            gradient = partial(piece.gradient, number, groups=getattr(call, "groups", None)) if piece else None
            output = _WithGradient.apply(output, gradient, logits, chosen)
        return output


class _WithGradient(torch.autograd.Function):
    """Returns its first input unchanged, and adds a gradient to that of the logits in the backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Any, logits: Tensor, chosen: Tensor | None) -> Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(logits, chosen)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> Any:  # type: ignore[override]
        return arriving, None, None if ctx.gradient is None else ctx.gradient(*ctx.saved_tensors), None


@dataclass(eq=False)
class StepBalance:
    """Sums of one step on one rank.

    Args:
        balance: the balancing loss.
        scale: factor of every token's loss in the backward pass.
        sums: [routers, 1 + experts], fp64: the losses of pieces times their labels, and the tokens of each expert; None
            before the first piece.
    """

    balance: ExpertBalance
    scale: float
    sums: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of ``sums``."""
        return len(self.balance.routers), self.balance.width

    def piece(self, batch: MicroBatch, ranges: Sequence[tuple[int, int]] | None) -> RoutedTokens:
        """Return the tokens of ``batch``, or those in ``ranges`` of its only row, as a piece.

        Padding is a document whose positions are all 0. A document of one token looks alike and is left out as well."""
        if self.sums is None:
            self.sums = torch.zeros(self.shape, dtype=torch.float64, device=batch.position_ids.device)
        position, after = batch.position_ids, torch.zeros_like(batch.position_ids)
        after[:, :-1] = position[:, 1:]
        counts = (position != 0) | (after == 1), batch.labels != IGNORE
        return RoutedTokens(self, *(each if ranges is None else tokens_of(each, ranges) for each in counts))

    def values(self, sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the balancing loss, and the tokens of the busiest expert of any layer relative to an even share.

        Routers without a backward pass are left out of both.

        Args:
            sums: ``sums``, summed over all ranks.
            tokens: labels that count, over all ranks.
        """
        counts, experts = sums[:, 1:], sums.new_tensor([router.experts for router in self.balance.routers])
        total = counts.sum(1)
        busiest = (counts.amax(1) / total.clamp(min=1) * experts).amax()
        return sums[:, 0].sum() / (tokens * (total > 0).sum()), busiest


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Tokens of a micro-batch that a layer computes at one time.

    Args:
        step: the sums of the step.
        real: [b, S], False for padding.
        learned: [b, S], True for labels that count.
    """

    step: StepBalance
    real: Tensor
    learned: Tensor

    def cut(self, tokens: slice) -> RoutedTokens:
        """Return a chunk of the tokens of every row as a piece; the piece itself if the chunk is as long."""
        if tokens.stop - tokens.start == self.real.shape[1]:  # also of a slice, whose tokens count from a document's
            return self
        return RoutedTokens(self.step, self.real[:, tokens], self.learned[:, tokens])

    def gradient(self, number: int, logits: Tensor, chosen: Tensor | None, *, groups: Any) -> Tensor:
        """Return the gradient of this piece's loss by the logits of a router, and add to the sums of the step.

        Args:
            number: index of the router.
            logits: its logits, [tokens, experts].
            chosen: the experts that it has chosen, [tokens, k]; None for those with the largest logits.
            groups: ``in_turn.Groups`` in whose order the tokens are, or None for that of the rows.
        """
        balance, sums = self.step.balance, self.step.sums
        assert sums is not None
        experts, dtype = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
        parts = [self.real] if groups is None else groups.split(self.real)
        real = torch.cat([part.flatten() for part in parts]).to(dtype)
        count, learned = real.sum().clamp(min=1), self.learned.sum()
        probabilities = logits.to(dtype).softmax(-1)

        def tokens_per_expert(indices: Tensor) -> Tensor:
            return real @ torch.zeros_like(probabilities).scatter_(1, indices, 1.0)

        largest = probabilities.topk(balance.routers[number].chosen).indices
        share = tokens_per_expert(largest) / count
        each = probabilities @ share
        sums[number, 0] += learned * experts * (real @ each) / count
        sums[number, 1 : experts + 1] += tokens_per_expert(largest if chosen is None else chosen)
        factor = balance.coefficient / len(balance.routers) * self.step.scale * experts
        by_token = (real * learned * factor / count)[:, None]
        return (by_token * probabilities * (share - each[:, None])).to(logits.dtype)


def balance_of(model: Any, layers: Sequence[nn.Module], value: Any, *, asked: bool) -> tuple[ExpertBalance | None, str]:
    """Return the balancing loss of a model, None for none, and a sentence about it, or ``""``.

    Args:
        model: the model.
        layers: its layers.
        value: the setting: ``none``, ``auto`` for the coefficient in the model's config, or a coefficient. None means
            ``auto`` if the config asked for the loss, else ``none``.
        asked: True if the config asked for it by ``output_router_logits``.

    Raises:
        UserError: ``value`` is unknown, or the model has no router that can be balanced.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if value not in (None, NONE, AUTO) and not number:
        raise UserError(SETTING, value, f"{NONE}, {AUTO} or a number of at least 0")
    text = model.config.get_text_config()
    settings: dict[str, Any] = {key: getattr(text, key, None) for key in (*COEFFICIENTS, *_OTHERS)}
    present = {key: each for key, each in settings.items() if isinstance(each, int | float) and each > 0}
    key = next((key for key in COEFFICIENTS if key in present), "")
    if value == NONE or (value is None and not asked):
        listed = ", ".join(f"{name} {each:g}" for name, each in present.items())
        instead = f"--{SETTING} {AUTO} trains it" if key else f"--{SETTING} takes a coefficient"
        words = f"the auxiliary loss for load balancing of experts is not trained ({listed} in config.json; {instead})"
        return None, words if present else ""
    if not number and not key:
        words = "no loss balances experts: config.json has no coefficient of transformers' loss"
        return None, f"{words} (--{SETTING} takes a number)"
    if not (routers := list(_routers(model, layers, value))):
        without = f"{type(model).__name__} has no layer with a router"
        if number:
            raise UserError(SETTING, value, f"{NONE}: {without}")
        return None, f"no loss balances experts: {without}"
    coefficient: Any = value if number else present[key]
    why = f"--{SETTING}" if number else f"{key} in config.json; --{SETTING} {NONE} leaves it out"
    why = f"output_router_logits is true and {why}" if value is None else why
    words = f"experts are balanced by a loss with coefficient {coefficient:g} ({why})"
    return ExpertBalance(routers, coefficient), words


def _routers(model: nn.Module, layers: Sequence[nn.Module], value: object) -> Iterator[Router]:
    """Yield the routers of all layers, as transformers declares them.

    Raises:
        UserError: a router does not tell its number of experts, or how many it chooses.
    """
    from transformers.utils.output_capturing import OutputRecorder

    declared = []
    for module in model.modules():
        of_class = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for each in of_class if isinstance(of_class, list) else [of_class]:
            declared.append(each if isinstance(each, OutputRecorder) else OutputRecorder(each, index=1))
    for layer in layers:
        indices: dict[nn.Module, int] = {}
        for name, module in layer.named_modules():
            for recorder in declared:
                if isinstance(module, recorder.target_class) and f".{recorder.layer_name or name}." in f".{name}.":
                    indices.setdefault(module, recorder.index)
        for module, index in indices.items():
            if any(part in indices for part in module.modules() if part is not module):
                continue  # its own router is a module as well
            rows = next((parameter.shape[0] for parameter in module.parameters() if parameter.ndim == 2), None)
            experts, chosen = getattr(module, "num_experts", rows), getattr(module, "top_k", None)
            if not isinstance(experts, int) or not isinstance(chosen, int):
                expected = f"{NONE}: {type(module).__name__} does not tell how many experts it has, or chooses"
                raise UserError(SETTING, value, expected)
            yield Router(module, index, experts, chosen)
