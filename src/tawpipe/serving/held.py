"""Models that requests can share: which ones, and their weights, which stay once they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.bits.lowbit import (
    AUTO,
    EXACT,
    check_weights_form,
    few_bits_modules,
    form_of,
    matrix_bytes,
    put_few_bits,
    quantise_rows,
)
from tawpipe.model.chain import Chain
from tawpipe.model.units import Unit


def why_not_served(chain: Chain) -> str:
    """The reason why requests cannot share a pass of this model; empty if they can."""
    return chain.in_turn or ("its layers carry a state along a row" if chain.mixing else "")


def refuse_serving(chain: Chain, context: int) -> None:
    """Refuse a model whose requests cannot share a pass, or a context that it has no positions for.

    Args:
        context: positions of a slot.

    Raises:
        UserError: says why, and what serves it.
    """
    if why := why_not_served(chain):
        instead = "transformers serve takes the folder that tawpipe export writes, and so does vLLM if it knows it"
        raise UserError("model", chain.name, f"one whose tokens mix in attention by our mask alone: {why}; {instead}")
    if context > (most := longest_context(chain)):
        uses = chain.positions
        why = "; longer ones have other angles, and so would all requests beside them" if uses.scaled_from else ""
        raise UserError("context", context, f"at most {most}, the positions of {chain.name}{why}")


def longest_context(chain: Chain) -> int:
    """The most positions that a slot may have; 2**31 where nothing limits them."""
    config, uses = chain.config.get_text_config(), chain.positions
    limits = [getattr(config, "max_position_embeddings", None), uses.scaled_from]
    limits.append(None if uses.limit is None else uses.limit - uses.first)
    return min((limit for limit in limits if limit), default=2**31)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of an element of each unit, of weights that stay.

    Attributes:
        held: in memory.
        few: that a pass of up to ``FEW`` tokens reads.
        many: that any other pass reads and writes.
    """

    held: tuple[float, ...]
    few: tuple[float, ...]
    many: tuple[float, ...]

    @classmethod
    def of(cls, chain: Chain, form: str, dtype: torch.dtype, device: str) -> WeightBytes:
        """Those of ``hold_weights`` on a type of device.

        Raises:
            UserError: nothing could have the form.
        """
        modules, units = _modules_of(chain, form, chain.units), list[tuple[float, ...]]()
        for unit in chain.units:
            slots = [
                matrix_bytes(form, slot.shape, dtype, device)
                if slot.name in modules
                else (slot.numel * dtype.itemsize,) * 3
                for slot in unit.slots
            ]
            units.append(tuple(sum(sizes) / unit.numel for sizes in zip(*slots, strict=True)))
        return cls(*zip(*units, strict=True))


def form_there(chain: Chain, codes: Callable[[str], tuple[Tensor, Tensor] | None]) -> str:
    """The form of the matrices of a folder, which is that of the first with codes; ``none`` if there is no such one."""
    names = (slot.name for unit in chain.units for slot in unit.slots)
    return next((form_of(pair[1]) for pair in map(codes, names) if pair is not None), EXACT)


def _modules_of(chain: Chain, form: str, units: Iterable[Unit]) -> dict[str, str]:
    """Weights of some units that can be in few bits -> the modules that they are of."""
    check_weights_form(form)
    ends = {0, len(chain.blocks) - 1}
    names = {slot.name for unit in units if ends.isdisjoint(unit.blocks) for slot in unit.slots}
    modules = {} if form == EXACT else few_bits_modules(chain.model, form, names)
    if names and form not in (AUTO, EXACT) and not modules:
        raise UserError("weights", form, f"{EXACT} for {chain.name}, which has no linear layer that can be in few bits")
    return modules


@torch.no_grad()
def hold_weights(
    chain: Chain,
    blocks: Iterable[int],
    values: Callable[[Unit], Tensor],
    *,
    form: str = EXACT,
    codes: Callable[[str], tuple[Tensor, Tensor] | None] = lambda name: None,
) -> None:
    """Give the parameters of some blocks their values for good. After ``Chain.prepare``.

    Args:
        values: of a unit in its flat layout, of any type and anywhere.
        form: of matrices of linear layers: ``none`` for that of all others, ``w4`` or ``int8``; ``auto`` for that of
            their codes, if they have some.
        codes: of a parameter that is in few bits already, its codes and scales: taken if the form is theirs.

    Raises:
        UserError: no such form, or nothing that could have it.
    """
    wanted = set(blocks)
    units = [unit for unit in chain.units if wanted.intersection(unit.blocks)]
    modules = _modules_of(chain, form, units)
    for unit in units:
        flat = values(unit).to(chain.device, chain.dtype)
        coded = dict[str, tuple[Tensor, Tensor]]()
        for slot in unit.slots:
            there = codes(slot.name) if slot.name in modules else None
            if there is not None and form in (AUTO, form_of(there[1])):
                coded[slot.name] = there
            elif slot.name in modules and form != AUTO:
                coded[slot.name] = quantise_rows(slot.view(flat), form)
        chain.hold(unit.index, flat, without=coded)
        for name, pair in coded.items():
            put_few_bits(chain.model, modules[name], pair, flat)
