"""A layer's backward pass in two parts: first all gradients except weight gradients of matrix products, then those.

Other ranks wait for the first part. It runs through the whole graph, which is freed. For every product it keeps the
input and the gradient of the output, which is all that the second part needs. Weights are neither kept nor needed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Layer = Callable[[Tensor], Tensor]
Views = tuple[Callable[[Tensor], Tensor], ...]
"""Functions that make a view of a parameter, applied one after the other."""


@dataclass(frozen=True)
class _Product:
    """A product of an input with a weight, [.., in] -> [.., out].

    Args:
        parameter: The weight, or the parameter from which ``views`` make the weight.
        views: Functions that make the weight from the parameter.
        transposed: True if the weight is [out, in], as in ``nn.Linear``; else it is [in, out], or [experts, in, out].
        offsets: Ends of the experts' rows in the input, for grouped products; else None.
        scale: Factor on the product.
    """

    parameter: nn.Parameter
    views: Views
    transposed: bool
    offsets: Tensor | None
    scale: float

    def multiply(self, first: Tensor, second: Tensor) -> Tensor:
        """Multiply two tensors with the kind of product that this is: plain or grouped."""
        return first @ second if self.offsets is None else F.grouped_mm(first, second, offs=self.offsets)

    def add_gradient(self, inputs: Tensor, arriving: Tensor, target: Tensor) -> None:
        """Add the weight's gradient to ``target``.

        Args:
            inputs: Input of the product.
            arriving: Gradient of its output.
            target: Gradient of the parameter.
        """
        for view in self.views:
            target = view(target)
        if target.ndim == 2:
            inputs, arriving = inputs.flatten(0, -2), arriving.flatten(0, -2)
        first, second = (arriving, inputs) if self.transposed else (inputs, arriving)
        if target.stride(-1) != 1:  # transposed, so that both operands are read row by row
            target, first, second = target.mT, second, first
        target.add_(self.multiply(first.mT, second), alpha=self.scale)


class DeferredProducts(TorchFunctionMode):
    """Context for the forward pass of a layer, whose backward pass then leaves out weight gradients of products.

    Afterwards it holds what these gradients are computed from. Only products with a parameter, or a plain view of one,
    are handled. All others, also products of two weights, get their gradients in the first part.

    Args:
        parameters: Parameters of the layer. Frozen ones are ignored.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = tuple(parameters)
        self._weights: dict[int, tuple[Tensor, nn.Parameter, Views]] = {}
        """Trainable parameters and views of them, by ``id``, while the layer runs."""
        self._storages: set[int] = set()
        self._noted: list[tuple[_Product, Tensor, Tensor]] = []

    def __enter__(self) -> DeferredProducts:
        self._storages = {p.untyped_storage()._cdata for p in self._parameters}
        self._weights = {id(p): (p, p, ()) for p in self._parameters if p.requires_grad}
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._weights = {}
        super().__exit__(*error)

    def around(self, layer: Layer) -> Layer:
        """Return a function that runs ``layer`` inside this context."""

        def run(hidden: Tensor) -> Tensor:
            with self:
                return layer(hidden)

        return run

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are kept. An input of several products counts once."""
        kept = [tensor.untyped_storage() for _, *both in self._noted for tensor in both]
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values())

    def run(self, target: Callable[[nn.Parameter], Tensor]) -> None:
        """Run the second part: add each weight gradient to ``target(parameter)``.

        The kept tensors are freed one by one.
        """
        self._noted.reverse()
        with torch.no_grad():
            while self._noted:
                product, inputs, arriving = self._noted.pop()
                product.add_gradient(inputs, arriving, target(product.parameter))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Track views of parameters, and replace products with them by products whose weight gradient is deferred."""
        kwargs = kwargs or {}
        if func in _VIEWS and args and id(args[0]) in self._weights:
            _, parameter, views = self._weights[id(args[0])]
            view = func(*args, **kwargs)
            if view._is_view():
                again = partial(_call_on_first, func, args[1:], kwargs)
                self._weights[id(view)] = view, parameter, (*views, again)
            return view
        if func in _PRODUCTS and torch.is_grad_enabled() and (taken := _PRODUCTS[func](*args, **kwargs)) is not None:
            inputs, weight, bias, transposed, offsets = taken
            if id(weight) in self._weights and self._defers(inputs, weight, offsets):
                _, parameter, views = self._weights[id(weight)]
                product = _Product(parameter, views, transposed, offsets, kwargs.get("alpha", 1))
                return _Apart.apply(partial(func, *args, **kwargs), product, self._noted, inputs, weight, bias)
        return func(*args, **kwargs)

    def _defers(self, inputs: Tensor, weight: Tensor, offsets: Tensor | None) -> bool:
        """Return True if a product's shapes are supported, its input is no weight, and autocast is off."""
        if weight.ndim == 2:
            fits = inputs.ndim > 1
        elif offsets is not None:
            fits = (inputs.ndim, weight.ndim) == (2, 3)
        else:
            fits = inputs.ndim == weight.ndim == 3 and inputs.shape[0] == weight.shape[0]
        no_weight = inputs.untyped_storage()._cdata not in self._storages  # a weight would be gone by the second part
        return fits and no_weight and not torch.is_autocast_enabled(weight.device.type)


class _Apart(torch.autograd.Function):
    """Product that gives its weight no gradient, and appends what the gradient is computed from to ``noted``."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Tensor],
        product: _Product,
        noted: list[tuple[_Product, Tensor, Tensor]],
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Run the product, and save input and weight for the backward pass."""
        ctx.product, ctx.noted, ctx.bias = product, noted, None if bias is None else bias.shape
        ctx.save_for_backward(inputs, weight)
        output = run()
        if output is bias:  # the product was added to it in place
            ctx.mark_dirty(output)
            return output
        return output.data  # ``data``, as some products return a view, which models could not change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> Any:  # type: ignore[override]
        """Append input and output gradient to ``noted``; return the gradients of input and bias only."""
        inputs, weight = ctx.saved_tensors
        ctx.noted.append((ctx.product, inputs.detach(), arriving))
        of_inputs = of_bias = None
        if ctx.needs_input_grad[3]:
            of_inputs = ctx.product.multiply(arriving, weight if ctx.product.transposed else weight.mT)
            of_inputs = of_inputs if ctx.product.scale == 1 else of_inputs * ctx.product.scale
        if ctx.needs_input_grad[5]:
            of_bias = arriving.sum_to_size(ctx.bias)
        return None, None, None, of_inputs, None, of_bias


# Arguments of each handled function as (input, weight, bias, transposed, offsets); None for calls that are not handled.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return input, weight, bias, True, None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, alpha: float = 1, **others: Any) -> Any:
    return None if others else (mat1, mat2, input, False, None)


def _matmul(input: Tensor, other: Tensor | None = None, **others: Any) -> Any:
    return None if others or other is None else (input, other, None, False, None)


def _grouped(input: Tensor, mat2: Tensor, *, offs: Tensor | None = None, **others: Any) -> Any:
    plain = offs is not None and all(other is None for other in others.values())
    return (input, mat2, None, False, offs) if plain else None


def _call_on_first(func: Any, args: Any, kwargs: Any, tensor: Tensor) -> Tensor:
    return func(tensor, *args, **kwargs)


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.addmm, Tensor.addmm, Tensor.addmm_), _addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _matmul),
    torch._grouped_mm: _grouped,  # type: ignore[attr-defined]  # what F.grouped_mm calls
}
_TURNED: list[Any] = [Tensor.T, Tensor.mT]
_VIEWS = {Tensor.__getitem__, Tensor.transpose, torch.transpose, Tensor.t, torch.t, *(t.__get__ for t in _TURNED)}
"""Functions whose view holds each element of a parameter at most once."""
