"""Finds the norms, rotary embeddings and gates of a model's layers, and computes them by other functions.

A place is recognised by its behaviour: the module computes what the definition computes, of random numbers. Only the
classes of single modules change. transformers' own classes, functions and modules stay as they are, as do parameter
names.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from inspect import signature
from itertools import product
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tawpipe.model.fused.operations import ACTIVATIONS, EAGER, GEMMA, LLAMA, Operations, forget_call, noted
from tawpipe.model.stubs import shallow

ROTARY = "apply_rotary_pos_emb"
"""Function of a modeling module of transformers that rotates queries and keys."""
PROJECTIONS = "gate_proj", "up_proj", "down_proj"
KINDS = {"norm": "norms", "rotary": "rotary embeddings", "gate": "gates"}
"""Name of a function in ``Operations`` -> word for its places."""
_PLAIN = "_tawpipe_plain"
"""Attribute of a changed class: the class before."""
_close = partial(torch.allclose, rtol=1e-9, atol=1e-12)


class Place(NamedTuple):
    """Form of a place.

    Attributes:
        kind: name of the function in ``Operations``.
        arguments: its arguments besides tensors.
        width: size of the last dimension of its tensors.
    """

    kind: str
    arguments: tuple[Any, ...]
    width: int


def find_places(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Place]]:
    """Yield every module of ``layers`` that computes a norm or a gate, or calls a rotary embedding, with its form.

    Each module is yielded once. Left out are modules that compute anything else, such as a norm that subtracts the
    mean, and modules with a forward pass of their own."""
    for module in dict.fromkeys(module for layer in layers for module in layer.modules()):
        for judge in () if "forward" in vars(module) else (_norm, _rotary, _gate):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                try:
                    place = judge(module)
                except Exception:  # the module takes other arguments, or other shapes
                    place = None
            if place is not None:
                yield module, place


def _norm(module: Any) -> Place | None:
    """Return the form of a norm: a module with an epsilon and a vector as its only parameter; None for others."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    shapes = [parameter.shape for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(epsilon, float) or [*map(len, shapes)] != [1] or len(signature(module.forward).parameters) != 1:
        return None
    copy, weight, rows = shallow(module), torch.randn(shapes[0]), torch.randn(4, *shapes[0])
    for arguments in product((epsilon,), (0.0, 1.0), (LLAMA, GEMMA)):
        apart = []
        for dtype in (torch.float32, torch.bfloat16):
            copy.__dict__["_parameters"] = {"weight": weight.to(dtype)}
            expected = EAGER.norm(rows.to(dtype), weight.to(dtype), *arguments).float()
            apart.append((copy(rows.to(dtype)).float() - expected).abs())
        # In bf16 a few numbers may be rounded the other way, but not a tenth of them, as with the other casting.
        if apart[0].max() < 1e-4 and (apart[1] > 0).float().mean() < 0.03:
            return Place("norm", arguments, *shapes[0])
    return None


def _gate(module: Any) -> Place | None:
    """Return the form of a gated MLP with three projections; None for other modules."""
    if not module._modules.keys() >= set(PROJECTIONS) or len(signature(module.forward).parameters) != 1:
        return None
    copy = shallow(module)
    rows, *factors = torch.randn(4, 32, dtype=torch.float64)
    copy._modules.update({name: partial(torch.mul, factor) for name, factor in zip(PROJECTIONS, factors, strict=True)})
    for activation in ACTIVATIONS:
        if _close(copy(rows), factors[2] * EAGER.gate(factors[0] * rows, factors[1] * rows, activation)):
            return Place("gate", (activation,), module.down_proj.in_features)
    return None


def _rotary(module: Any) -> Place | None:
    """Return the form of an attention whose forward pass calls ``ROTARY``, if that rotates halves of heads, else None.

    Calls with a part of every head, for example, still use transformers' code (see ``_twin``)."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY not in {*forward.__code__.co_names} & forward.__globals__.keys():
        return None
    query, key = torch.randn(2, 2, 4, 3, module.head_dim, dtype=torch.float64)
    angles = torch.randn(2, 3, module.head_dim // 2, dtype=torch.float64).repeat(1, 1, 2)
    inputs = query, key[:, :2], angles.cos(), angles.sin()
    rotated = zip(forward.__globals__[ROTARY](*inputs), EAGER.rotary(*inputs), strict=True)
    return Place("rotary", (), module.head_dim) if all(_close(*pair) for pair in rotated) else None


def change_places(layers: Iterable[nn.Module], operations: Operations) -> Counter[Place]:
    """Compute the places of ``layers`` by ``operations``, in place; return the number of places of each form.

    Call ``plain_again`` before choosing other operations."""
    places = Counter[Place]()
    for module, place in [*find_places(layers)]:
        module.__class__ = _changed(type(module), operations, place.kind, place.arguments)
        places[place] += 1
    return places


def plain_again(model: nn.Module) -> None:
    """Undo ``change_places`` for all modules of ``model``."""
    for module in model.modules():
        module.__class__ = getattr(type(module), _PLAIN, type(module))


@cache
def _changed(plain: type, operations: Operations, kind: str, arguments: tuple[Any, ...]) -> type:
    """Return the subclass of ``plain`` that computes its place by ``operations``. Equal places share one class."""

    def norm(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())
        return noted(operations.norm, hidden, self.weight, *arguments)

    def gate(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())
        return self.down_proj(noted(operations.gate, self.gate_proj(hidden), self.up_proj(hidden), *arguments))

    forward: Any = {"norm": norm, "gate": gate}.get(kind)
    if forward is None:
        eager: Any = plain.forward  # pyright: ignore[reportAttributeAccessIssue]
        twin = vars(_twin(eager.__globals__["__name__"], operations))
        forward = FunctionType(eager.__code__, twin, eager.__name__, eager.__defaults__, eager.__closure__)
        forward.__kwdefaults__, forward.__annotations__ = eager.__kwdefaults__, eager.__annotations__
    return type(plain.__name__, (plain,), {"forward": forward, "__module__": __name__, _PLAIN: plain})


@cache
def _twin(name: str, operations: Operations) -> ModuleType:
    """Return a copy of the module ``name`` with another rotary embedding.

    It is a module of its own among ``sys.modules``, because torch.compile looks up globals by the module's name."""
    twin = ModuleType(f"{name}_{operations.name.split()[0].replace('-', '_')}")
    vars(twin).update({key: value for key, value in vars(sys.modules[name]).items() if key != "__name__"})
    eager = getattr(twin, ROTARY)

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rotate by ``operations`` where shapes and types are those of the definition, else by transformers' code."""
        whole = [each.ndim for each in (query, key, cos)] == [4, 4, 3] and query.dtype == key.dtype == cos.dtype
        if args or kwargs or not whole or not query.shape[-1] == key.shape[-1] == cos.shape[-1] or cos.requires_grad:
            return eager(query, key, cos, sin, *args, **kwargs)
        for heads in (query, key):
            forget_call(heads)
        return operations.rotary(query, key, cos, sin)

    setattr(twin, ROTARY, rotate)
    sys.modules[twin.__name__] = twin
    return twin


def largest_difference(place: Place, operations: Operations, device: torch.device, dtype: torch.dtype) -> float:
    """Return how much outputs and gradients of random inputs differ between ``operations`` and the definition.

    It is the largest norm of a difference, divided by the norm of the definition's value."""
    drawn = torch.Generator().manual_seed(0)
    shapes = {"norm": [(2, 64), ()], "gate": [(2, 64)] * 2, "rotary": [(2, 4, 64), (2, 2, 64)]}[place.kind]
    inputs = [torch.randn(*shape, place.width, generator=drawn).to(device, dtype) for shape in shapes]
    angles = torch.randn(2, 64, place.width // 2, generator=drawn).repeat(1, 1, 2).to(device)
    others = [angles.cos().to(dtype), angles.sin().to(dtype)] if place.kind == "rotary" else []
    values: list[list[Tensor]] = []
    for each in (EAGER, operations):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        # copies, because kernels work in place
        outputs = getattr(each, place.kind)(*(leaf.clone() for leaf in leaves), *others, *place.arguments)
        outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
        results = [output.detach().clone() for output in outputs]
        values.append([*results, *torch.autograd.grad(outputs, leaves, [result.roll(1, -1) for result in results])])
    return max(((value - expected).norm() / expected.norm()).item() for expected, value in zip(*values, strict=True))
