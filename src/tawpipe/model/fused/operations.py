"""Norm, rotary embedding and gate as functions: plain PyTorch, functions that keep only their inputs, and Liger's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PACKAGE = "liger-kernel"
LLAMA, GEMMA = "llama", "gemma"
"""Types in which a norm multiplies by its weight: that of its input, or fp32."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


_CALL = "_tawpipe_call"
"""Attribute of a result: the ``Again`` that computes it."""


class Operations(NamedTuple):
    """Implementation of the three functions.

    Attributes:
        name: name for messages.
        norm: (hidden [.., H], weight [H], epsilon, addend of the weight, LLAMA or GEMMA) -> [.., H].
        rotary: (query [b, heads, S, d], key [b, groups, S, d], cosines and sines [1 or b, S, d]) -> query and key.
        gate: (gate [.., I], up [.., I], key of ACTIVATIONS) -> activation(gate) * up.
    """

    name: str
    norm: Callable[[Tensor, Tensor, float, float, str], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor, Tensor, str], Tensor]


def _norm(hidden: Tensor, weight: Tensor, epsilon: float, addend: float, casting: str) -> Tensor:
    """Divide by the root of the mean square in fp32, and multiply by the weight (https://arxiv.org/abs/1910.07467)."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if casting == GEMMA:
        return (wide * (addend + weight.float() if addend else weight.float())).type_as(hidden)
    return (addend + weight if addend else weight) * wide.to(hidden.dtype)


def _rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of every head by the angles of its position (https://arxiv.org/abs/2104.09864)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(heads: Tensor) -> Tensor:
    """Return (-second half, first half) of every head."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


class Again:
    """Call of a function whose result is computed again in the backward pass, once, instead of being kept.

    Args:
        run: the function.
        inputs: its arguments. ``pack`` replaces the tensors among them by what is kept of them.
    """

    def __init__(self, run: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self._run, self._inputs = run, inputs
        self._packed = False
        self._value: Tensor | None = None

    def pack(self, pack: Callable[[Tensor], Any]) -> None:
        """Replace each tensor among the inputs by ``pack(tensor)``, at the first call."""
        if not self._packed:
            self._inputs = tuple(pack(each) if isinstance(each, Tensor) else each for each in self._inputs)
            self._packed = True

    def compute(self, unpack: Callable[[Any], Any]) -> Tensor:
        """Return the result; computed at the first call, from ``unpack(input)`` for every input."""
        if self._value is None:
            with torch.no_grad():
                self._value = self._run(*map(unpack, self._inputs))
        return self._value


def noted(run: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return ``run(*inputs)``; where a graph is made, ``again_of`` finds this call by the result or a view of it."""
    output = run(*inputs)
    if not torch.compiler.is_compiling() and output.requires_grad:
        vars(_whole(output))[_CALL] = Again(run, inputs)
    return output


def again_of(tensor: Tensor) -> Again | None:
    """Return the call that computed the tensor of which ``tensor`` is a view, or None."""
    return vars(_whole(tensor)).get(_CALL)


def forget_call(tensor: Tensor) -> None:
    """Let ``again_of`` find nothing for ``tensor``, whose memory is about to change."""
    if not torch.compiler.is_compiling():  # a compiler decides by itself what to compute again
        vars(_whole(tensor)).pop(_CALL, None)


def _whole(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


class _Again(torch.autograd.Function):
    """Function that keeps only its inputs, and computes itself again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        leaves = [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]
        with torch.enable_grad():
            output = ctx.run(*leaves)
        gradients = iter(torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], arriving))
        return None, *(next(gradients) if leaf.requires_grad else None for leaf in leaves)


def _again(definition: Callable[..., Tensor], first: Tensor, second: Tensor, *arguments: Any) -> Tensor:
    """Compute ``definition`` of two tensors, and keep only these. A compiler decides by itself what to keep."""
    if torch.compiler.is_compiling():
        return definition(first, second, *arguments)
    return _Again.apply(lambda *inputs: definition(*inputs, *arguments), first, second)  # pyright: ignore[reportReturnType]


def _in_place(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate, and destroy the inputs, as Liger's kernel does: a model that reads them again gets NaN."""
    outputs = _rotary(query, key, cos, sin)
    for heads in () if torch.compiler.is_compiling() else (query, key):
        heads.data.fill_(float("nan"))
    return outputs


EAGER = Operations("eager", _norm, _rotary, _gate)
"""The definitions, as autograd differentiates them."""
KEEPING_INPUTS = Operations("keeping-inputs", partial(_again, _norm), _rotary, partial(_again, _gate))
"""The definitions, where norms and gates keep only their inputs."""
STAND_IN = KEEPING_INPUTS._replace(name="stand-in", rotary=_in_place)
"""The definitions with the side effects of fused kernels: shows on a CPU that a model may use these."""


def missing_package() -> str:
    """Return the reason why Liger's kernels cannot be imported, or ``""``."""
    try:
        _ = version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed (pip install {PACKAGE})"
    return ""


def liger() -> Operations:
    """Return Liger's kernels, which run on GPUs and compute in fp32 or bf16."""
    from liger_kernel.ops import (  # pyright: ignore[reportMissingImports]
        LigerGELUMulFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    gates = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}

    def norm(hidden: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        """Compute the norm; not in place, as a norm behind attention shares its gradient with the residual."""
        return LigerRMSNormFunction.apply(hidden, weight, *arguments, False)

    def gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return gates[activation].apply(gate, up)

    return Operations(f"{PACKAGE} {version(PACKAGE)}", norm, LigerRopeFunction.apply, gate)
