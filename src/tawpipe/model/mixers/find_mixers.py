"""The mixers of a layer, found by what they ask of a cache when the layer is called, on the meta device or another: no
list of known ones could keep up with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.mixers.carrier import Carrier, cache_argument
from tawpipe.model.mixers.mixers import GOES_ON_WRONGLY
from tawpipe.model.stubs import LayerCall


@dataclass(frozen=True)
class Mixing:
    """What mixes the tokens of a layer.

    Args:
        mixers: names of the modules that carry a state.
        attention: whether there is a module that hands on keys and values.
        unknown: names of modules that take a cache, of which neither was seen.
        why_not_chunks: why a mixer cannot go on from a state; empty if all can.
        state_bytes: what mixers hand on for a row, from one chunk to the next.
    """

    mixers: tuple[str, ...] = ()
    attention: bool = False
    unknown: tuple[str, ...] = ()
    why_not_chunks: str = ""
    state_bytes: int = 0


@dataclass
class _Asked(Carrier):
    """A carrier that notes what a module asks of it, and what the module gives."""

    before: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    after: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    states: bool = False
    keys: bool = False
    output: Any = None

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.states = True
        return super().get_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.states = True
        return super().get_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any) -> bool:  # what all ask first, before transformers 5.21
        self.states = True
        return super().has_previous_state(*args)

    def get_linear_cache(self, *_: object) -> None:
        self.states = True

    def set_linear_cache(self, *_: object) -> None:
        pass

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys = True
        return key, value


def mixing_of(layer: nn.Module, call: LayerCall, hidden: Tensor) -> Mixing:
    """Call a layer, and once more from the states that it has left.

    Args:
        hidden: [b, S, H] of a few tokens.
    """
    takers = {name: module for name, module in layer.named_modules() if name and cache_argument(module)}
    modules = {name: takers[name] for name in takers if not any(other.startswith(f"{name}.") for other in takers)}
    asked = _watched(layer, call, hidden, {name: _Asked() for name in modules}, modules)
    mixers = tuple(name for name, carrier in asked.items() if carrier.states and not carrier.keys)
    attention = [
        name for name, carrier in asked.items() if carrier.keys and not carrier.states and carrier.output is not None
    ]
    unknown = tuple(name for name in modules if name not in (*mixers, *attention))
    again = {
        name: _Asked({key: state.detach().requires_grad_() for key, state in asked[name].after.items()})
        for name in mixers
    }
    with torch.enable_grad():
        _watched(layer, call, hidden, again, modules)
        reasons = [
            f"{type(modules[name]).__name__} {why}" for name, carrier in again.items() if (why := _why_not(carrier))
        ]
    state_bytes = sum(state.nbytes for name in mixers for state in asked[name].after.values())
    return Mixing(mixers, bool(attention), unknown, "".join(reasons[:1]), state_bytes)


def _watched(
    layer: nn.Module, call: LayerCall, hidden: Tensor, asked: dict[str, _Asked], modules: dict[str, nn.Module]
) -> dict[str, _Asked]:
    """Call a layer whose modules are given these as their caches."""
    hooks = []
    for name, carrier in asked.items():
        argument = cache_argument(modules[name])
        assert argument is not None
        place = list(signature(modules[name].forward).parameters).index(argument)

        def give(_: nn.Module, args: Any, kwargs: Any, place=place, argument=argument, carrier=carrier) -> Any:
            return (args, kwargs) if len(args) > place else (args, {**kwargs, argument: carrier})

        def take(_: nn.Module, __: Any, output: Any, carrier=carrier) -> None:
            carrier.output = output[0] if isinstance(output, tuple) else output

        hooks += [modules[name].register_forward_pre_hook(give, with_kwargs=True)]
        hooks += [modules[name].register_forward_hook(take)]
    try:
        with patch.object(torch.compiler, "is_exporting", lambda: True):  # torch code, as kernels know no meta device
            call(layer, hidden)
    except UserError:
        raise
    except Exception:  # what depends on values (a router) does not run on the meta device; mixers stand before it
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return asked


def _why_not(asked: _Asked) -> str:
    """Why a mixer would not go on from the states that it was given; empty if it would, or where it was not seen."""
    if not asked.before:
        return "has its state in a form that cannot be handed from one chunk to the next"
    if asked.output is None:
        return ""
    gradients = torch.autograd.grad(asked.output.sum(), list(asked.before.values()), allow_unused=True)
    return GOES_ON_WRONGLY if any(gradient is None for gradient in gradients) else ""
