"""LoRA adapters on experts that are stacked in one parameter, computed without a merged copy of the experts.

``peft`` makes, names and saves these adapters (``target_parameters``), with one ``ParamWrapper`` around the experts for
each adapted parameter. Its own forward pass adds ``scaling * B A`` to all experts, in a copy, and its backward pass
makes the gradient of the whole copy. Here each token passes through ``A`` and ``B`` of its experts:
``y = W x + scaling * B (A x)``. The backward pass keeps what the activation function reads, and gathers the tokens of
each expert again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tawpipe.model.refuse import unsupported

GROUPED = 16
"""Alignment in bytes of rows and columns that the grouped product of torch needs."""


class LowRank(NamedTuple):
    """Adapter of one parameter of experts.

    Attributes:
        first: ``lora_A``, [E * r, in], expert by expert.
        second: ``lora_B``, [out, r * E]: number i of the rank of expert e is column i * E + e.
        experts: number of experts, E.
        scaling: factor on the adapter's output.
    """

    first: Tensor
    second: Tensor
    experts: int
    scaling: float

    @classmethod
    def of(cls, wrapper: Any, values: Mapping[str, Tensor | None] | None = None) -> LowRank:
        """Return the active adapter of a ``ParamWrapper`` of peft.

        Args:
            wrapper: the layer of peft.
            values: name of a parameter in ``wrapper`` -> its value; None takes the parameters themselves.
        """
        (name,) = wrapper.active_adapters
        names = [f"{part}.{name}.weight" for part in ("lora_A", "lora_B")]
        first, second = (wrapper.get_parameter(each) if values is None else values[each] for each in names)
        assert first is not None and second is not None
        return cls(first, second, wrapper.num_experts, wrapper.scaling[name])

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors [E, in, r] and [E, r, out]."""
        second = self.second.view(len(self.second), -1, self.experts).permute(2, 1, 0)
        return self.first.view(self.experts, -1, self.first.shape[1]).mT, second.contiguous()

    def merged(self, weight: Tensor, *, transposed: bool) -> Tensor:
        """Add the adapter to the experts' matrices, in place, expert by expert, and return them.

        Args:
            weight: [E, in, out] if ``transposed`` is True, otherwise [E, out, in].
            transposed: layout of ``weight``.
        """
        for matrix, first, second in zip(weight, *(factor.to(weight) for factor in self.factors()), strict=True):
            (matrix if transposed else matrix.mT).addmm_(first, second, alpha=self.scaling)
        return weight


class SortedPairs(NamedTuple):
    """Chosen experts of all tokens, sorted by expert. There are S = T * k pairs of a token and an expert.

    Attributes:
        tokens: token of each pair, [S].
        order: position of each pair in the order of tokens, [S].
        experts: expert of each pair, [S], ascending.
        ends: end of each expert's pairs, int32 [E].
    """

    tokens: Tensor
    order: Tensor
    experts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, index: Tensor, experts: int) -> SortedPairs:
        """Sort the choices ``index`` [T, k] among a number of ``experts``."""
        chosen, order = index.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(experts, device=index.device, dtype=chosen.dtype), right=True)
        return cls(order // index.shape[-1], order, chosen, ends.int())

    def sum_by_token(self, values: Tensor, choices: int) -> Tensor:
        """Sum the pairs [S, n] of every token: [T, n], in an order that does not depend on the device."""
        unsorted = torch.empty_like(values)
        unsorted[self.order] = values
        return unsorted.view(-1, choices, values.shape[1]).sum(dim=1)

    def product(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply the pairs [S, in] with the matrices [E, in, out] of their experts: [S, out]."""
        if _aligned(rows, weights):
            return F.grouped_mm(rows, weights, offs=self.ends)
        output = rows.new_empty(len(rows), weights.shape[2])
        for expert, begin, end in self._spans():
            torch.mm(rows[begin:end], weights[expert], out=output[begin:end])
        return output

    def outer(self, first: Tensor, second: Tensor) -> Tensor:
        """Return [E, m, n]: for each expert the sum over its pairs of [S, m] times [S, n], or 0 without pairs."""
        if _aligned(first, second):
            empty = self.ends == F.pad(self.ends[:-1], (1, 0))  # kernels need not write results of no pairs
            return F.grouped_mm(first.mT, second, offs=self.ends).masked_fill_(empty[:, None, None], 0)
        output = first.new_zeros(len(self.ends), first.shape[1], second.shape[1])
        for expert, begin, end in self._spans():
            torch.mm(first[begin:end].mT, second[begin:end], out=output[expert])
        return output

    def _spans(self) -> list[tuple[int, int, int]]:
        """Return (expert, begin, end) of every expert that has pairs; empty on the meta device, on which plans run."""
        ends = [] if self.ends.is_meta else self.ends.tolist()
        spans = zip(range(len(ends)), [0, *ends], ends, strict=False)
        return [span for span in spans if span[1] < span[2]]


def _aligned(*operands: Tensor) -> bool:
    """Return True if the grouped product of torch takes these operands: bf16 on a GPU, with aligned rows."""
    return all(
        operand.is_cuda
        and operand.dtype == torch.bfloat16
        and operand.data_ptr() % GROUPED == 0
        and all(stride == 1 or stride * operand.itemsize % GROUPED == 0 for stride in operand.stride())
        and all(size * operand.itemsize % GROUPED == 0 for size in operand.shape[-1:])
        for operand in operands
    )


class _ExpertLinear(NamedTuple):
    """Linear layer of all experts with its adapter.

    Attributes:
        weight: the experts' matrices, [E, in, out].
        bias: [E, out], or None.
        low_rank: the adapter, or None.
    """

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None

    def forward(self, rows: Tensor, pairs: SortedPairs) -> Tensor:
        """Return the outputs [S, out] of inputs [S, in]."""
        output = pairs.product(rows, self.weight)
        if self.low_rank is not None:
            first, second = self.low_rank.factors()
            output.add_(pairs.product(pairs.product(rows, first), second), alpha=self.low_rank.scaling)
        return output if self.bias is None else output.add_(self.bias[pairs.experts])

    def to_input(self, arriving: Tensor, pairs: SortedPairs) -> Tensor:
        """Return the gradient [S, in] of the inputs, from the gradient [S, out] of the outputs."""
        gradient = pairs.product(arriving, self.weight.mT)
        if self.low_rank is not None:
            first, second = self.low_rank.factors()
            low = pairs.product(arriving, second.mT.contiguous())
            gradient.add_(pairs.product(low, first.mT), alpha=self.low_rank.scaling)
        return gradient

    def to_parameters(self, rows: Tensor, arriving: Tensor, pairs: SortedPairs, needs: tuple[bool, ...]) -> list[Any]:
        """Return the gradients of weight [E, in, out], bias, ``lora_A`` and ``lora_B``; None where not needed.

        Args:
            rows: inputs [S, in].
            arriving: gradient of the outputs, [S, out].
            pairs: the pairs of tokens and experts.
            needs: which of the four are needed.
        """
        weight = pairs.outer(rows, arriving) if needs[0] else None
        bias = None
        if needs[1] and self.bias is not None:
            bias = torch.zeros_like(self.bias).index_add_(0, pairs.experts, arriving)
        if self.low_rank is None or not (needs[2] or needs[3]):
            return [weight, bias, None, None]
        first, second = self.low_rank.factors()
        scaling = self.low_rank.scaling
        low_arriving = pairs.product(arriving, second.mT.contiguous()).mul_(scaling)
        of_first = pairs.outer(low_arriving, rows).flatten(0, 1)
        low = pairs.product(rows, first).mul_(scaling)
        of_second = pairs.outer(low, arriving).permute(2, 1, 0).flatten(1)
        return [weight, bias, of_first, of_second]


class _Adapted(torch.autograd.Function):
    """Experts with adapters on one or both of their linear layers.

    Of the chosen experts' intermediate results the graph keeps only the output of the first layer, [S, 2 I]."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        experts: Any,
        scalings: tuple[float, float],
        hidden: Tensor,
        index: Tensor,
        chances: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        """Return the output [T, H].

        Args:
            ctx: context of autograd.
            experts: the module of the experts.
            scalings: factors of the two adapters.
            hidden: [T, H].
            index: chosen experts, [T, k].
            chances: their weights, [T, k].
            parameters: weight, bias, ``lora_A`` and ``lora_B`` of the first layer, then of the second.
        """
        first, second = _layers(parameters, scalings, experts.is_transposed)
        pairs = SortedPairs.of(index, len(first.weight))
        before = first.forward(hidden[pairs.tokens], pairs)
        output = second.forward(_activated(experts, before), pairs)
        output = output * chances.reshape(-1)[pairs.order, None]
        ctx.experts, ctx.scalings = experts, scalings
        ctx.save_for_backward(hidden, index, chances, before, *parameters)
        return pairs.sum_by_token(output, index.shape[-1]).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, index, chances, before, *parameters = ctx.saved_tensors
        experts, (_, _, to_hidden, _, to_chances, *needs) = ctx.experts, ctx.needs_input_grad
        first, second = _layers(parameters, ctx.scalings, experts.is_transposed)
        pairs = SortedPairs.of(index, len(first.weight))
        weights = chances.reshape(-1)[pairs.order, None]
        with torch.enable_grad():
            leaf = before.detach().requires_grad_()
            active = _activated(experts, leaf)
        rows = active.detach()
        arriving = arriving[pairs.tokens]
        gradient = second.to_input(arriving, pairs)
        of_chances = None
        if to_chances:
            products = (gradient * rows).sum(dim=1, dtype=chances.dtype)
            if second.bias is not None:
                products += (arriving * second.bias[pairs.experts]).sum(dim=1, dtype=chances.dtype)
            of_chances = torch.empty_like(products)
            of_chances[pairs.order] = products
            of_chances = of_chances.view_as(chances)
        arriving, gradient = (arriving * weights).to(rows.dtype), (gradient * weights).to(rows.dtype)
        of_second = second.to_parameters(rows, arriving, pairs, tuple(needs[4:]))
        del arriving, rows
        (gradient,) = torch.autograd.grad(active, leaf, gradient)
        del active, leaf
        of_first = first.to_parameters(hidden[pairs.tokens], gradient, pairs, tuple(needs[:4]))
        of_hidden = None
        if to_hidden:
            of_hidden = pairs.sum_by_token(first.to_input(gradient, pairs), index.shape[-1])
        if not experts.is_transposed:
            of_first[0], of_second[0] = (each[0] if each[0] is None else each[0].mT for each in (of_first, of_second))
        return None, None, of_hidden, None, of_chances, *of_first, *of_second


def _layers(parameters: Any, scalings: tuple[float, float], transposed: bool) -> list[_ExpertLinear]:
    """Return the two linear layers of experts from their parameters, in the order of ``_Adapted.forward``.

    Args:
        parameters: weight, bias, ``lora_A`` and ``lora_B`` of both layers.
        scalings: factors of the two adapters.
        transposed: True if weights are stored as [E, in, out], otherwise as [E, out, in].
    """
    layers = []
    for (weight, bias, low, high), scaling in zip((parameters[:4], parameters[4:]), scalings, strict=True):
        adapter = None if low is None else LowRank(low, high, len(weight), scaling)
        layers.append(_ExpertLinear(weight if transposed else weight.mT, bias, adapter))
    return layers


def _activated(experts: Any, before: Tensor) -> Tensor:
    """Return the input [S, I] of the second layer, from the output [S, 2 I] of the first, or [S, I] without gates."""
    return experts._apply_gate(before) if experts.has_gate else experts.act_fn(before)


def layer_names(experts: Any) -> tuple[str, str] | None:
    """Return the names of the parameters of experts that can have adapters, or None if none can.

    They can have adapters if transformers knows their form (its experts interface), and no norm follows each expert."""
    known = hasattr(experts, "_apply_gate") and hasattr(experts, "has_gate")
    if not known or getattr(experts, "has_post_expert_norm", False):
        return None
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def stacked_experts(model: nn.Module) -> list[str]:
    """Return the names of the stacked experts of a model that can have adapters, from behind the layer's number.

    >>> stacked_experts(nn.Linear(1, 1))
    []
    """
    names = set()
    for path, module in model.named_modules():
        if not path.endswith(".base_layer"):
            names |= {f"{path}.{name}" for name in layer_names(module) or ()}
    return sorted({re.sub(r".*\.\d+\.", "", name) for name in names})


@cache
def _adapted_class() -> type:
    """Return the subclass of peft's ``ParamWrapper`` that computes adapters of experts without a merged copy."""
    from peft.tuners.lora.layer import ParamWrapper

    class AdaptedExperts(ParamWrapper):
        """Experts with adapters. The outermost of several wrappers around the experts computes all adapters."""

        @torch.compiler.disable
        def forward(self, hidden: Tensor, index: Tensor, chances: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            """Return the output [T, H] of hidden states [T, H] for the chosen experts [T, k] and their weights."""
            if self.disable_adapters or self.merged:
                return self.base_layer(hidden, index, chances)
            adapters = dict[str, LowRank]()
            wrapper: Any = self
            experts: Any = self.get_base_layer()
            while wrapper is not experts:
                adapters[wrapper.parameter_name] = LowRank.of(wrapper)
                wrapper = wrapper.base_layer
            parameters, scalings = list[Any](), list[float]()
            for name in layer_names(experts) or ():
                adapter = adapters.get(name)
                bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
                parameters += getattr(experts, name), bias, *((None, None) if adapter is None else adapter[:2])
                scalings.append(0.0 if adapter is None else adapter.scaling)
            return _Adapted.apply(experts, tuple(scalings), hidden, index, chances, *parameters)  # pyright: ignore[reportReturnType]

    return AdaptedExperts


def take_adapters(model: nn.Module) -> None:
    """Make the adapters of experts in ``model`` compute without a merged copy of the experts, in place.

    Raises:
        UserError: an adapter is on a parameter other than stacked experts in a form that transformers knows, or several
            adapters are active.
    """
    for name, module in model.named_modules():
        if type(module).__name__ != "ParamWrapper":
            continue
        wrapper: Any = module
        if wrapper.parameter_name not in (layer_names(wrapper.get_base_layer()) or ()):
            expected = "target_modules for other layers; target_parameters are for stacked experts in the form of "
            raise unsupported(f"{name}.{wrapper.parameter_name}", f"{expected}transformers' experts interface")
        if len(wrapper.active_adapters) != 1:
            raise unsupported(f"{name}.{wrapper.parameter_name}", "experts take one active adapter")
        wrapper.__class__ = _adapted_class()
