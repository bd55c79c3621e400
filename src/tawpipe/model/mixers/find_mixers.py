"""Finds the mixers of a layer by their calls of a cache when the layer runs, on the meta device or a real one.

A list of known mixers could not keep up with transformers."""

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
    """Modules of a layer that mix tokens.

    Args:
        mixers: names of the modules that carry a state.
        attention: True if a module passes keys and values to its cache.
        unknown: names of modules that take a cache, but were seen to use it in neither way.
        why_not_chunks: reason why a mixer cannot continue from a state; ``""`` if all can.
        state_bytes: bytes of the states that mixers pass on for a row, from one chunk to the next.
    """

    mixers: tuple[str, ...] = ()
    attention: bool = False
    unknown: tuple[str, ...] = ()
    why_not_chunks: str = ""
    state_bytes: int = 0


@dataclass
class _Asked(Carrier):
    """Carrier that records a module's calls of its cache, and the module's output."""

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

    def has_previous_state(self, *args: Any) -> bool:  # before transformers 5.21 all mixers call this first
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
    """Find the modules of a layer that mix tokens, by calling the layer once, and again from the states that it left.

    Args:
        layer: the layer.
        call: its arguments besides the hidden states.
        hidden: hidden states [b, S, H] of a few tokens.

    Returns:
        Names of the mixers, and whether the layer has attention and can run in chunks.
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
    """Call a layer with the carriers in ``asked`` as caches of its modules, and return ``asked``.

    Errors of the layer, except UserError, are ignored: some layers cannot run on the meta device.

    Args:
        layer: the layer.
        call: its arguments besides the hidden states.
        hidden: its hidden states.
        asked: module name -> its carrier, which records the module's calls and output.
        modules: module name -> the module.
    """
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
        with patch.object(torch.compiler, "is_exporting", lambda: True):  # use torch code: kernels cannot run on meta
            call(layer, hidden)
    except UserError:
        raise
    except Exception:  # code that branches on values (a router) does not run on meta; mixers run before it
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return asked


def _why_not(asked: _Asked) -> str:
    """Return the reason why a mixer cannot continue from given states, or ``""`` if it can or did not run."""
    if not asked.before:
        return "has its state in a form that cannot be handed from one chunk to the next"
    if asked.output is None:
        return ""
    gradients = torch.autograd.grad(asked.output.sum(), list(asked.before.values()), allow_unused=True)
    return GOES_ON_WRONGLY if any(gradient is None for gradient in gradients) else ""
