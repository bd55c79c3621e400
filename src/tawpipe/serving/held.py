"""Models whose requests can share a pass, and loading of weights that then stay on their device."""

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
    """Return the reason why requests cannot share a pass of this model; empty if they can."""
    return chain.in_turn or ("its layers carry a state along a row" if chain.mixing else "")


def refuse_serving(chain: Chain, context: int) -> None:
    """Raise UserError if requests cannot share a pass of this model, or if ``context`` exceeds its positions.

    Args:
        chain: the model.
        context: number of positions of a KV-cache slot.

    Raises:
        UserError: with the reason, and with other programs that can serve the model.
    """
    if why := why_not_served(chain):
        instead = "transformers serve takes the folder that tawpipe export writes, and so does vLLM if it knows it"
        raise UserError("model", chain.name, f"one whose tokens mix in attention by our mask alone: {why}; {instead}")
    if context > (most := longest_context(chain)):
        uses = chain.positions
        why = "; longer ones have other angles, and so would all requests beside them" if uses.scaled_from else ""
        raise UserError("context", context, f"at most {most}, the positions of {chain.name}{why}")


def longest_context(chain: Chain) -> int:
    """Return the maximum number of positions of a KV-cache slot for this model, or 2**31 if nothing limits it."""
    config, uses = chain.config.get_text_config(), chain.positions
    limits = [getattr(config, "max_position_embeddings", None), uses.scaled_from]
    limits.append(None if uses.limit is None else uses.limit - uses.first)
    return min((limit for limit in limits if limit), default=2**31)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes for each element of every unit, for weights that stay on their device.

    Attributes:
        held: bytes in memory.
        few: bytes that a pass of at most ``FEW`` tokens reads.
        many: bytes that a pass of more tokens reads and writes.
    """

    held: tuple[float, ...]
    few: tuple[float, ...]
    many: tuple[float, ...]

    @classmethod
    def of(cls, chain: Chain, form: str, dtype: torch.dtype, device: str) -> WeightBytes:
        """Compute the bytes per element that each unit of ``chain`` has after ``hold_weights``. No weight is loaded.

        Args:
            chain: the model.
            form: format of the weights of linear layers, as in ``hold_weights``.
            dtype: type of all other weights.
            device: type of device, for example ``cuda``.

        Raises:
            UserError: the format is unknown, or no weight can have it.
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


def stored_form(chain: Chain, codes: Callable[[str], tuple[Tensor, Tensor] | None]) -> str:
    """Return the format of the first quantised weight in a folder; ``none`` if no weight is quantised.

    Args:
        chain: the model.
        codes: returns codes and scales of the parameter with this name, or None if it is not quantised.
    """
    names = (slot.name for unit in chain.units for slot in unit.slots)
    return next((form_of(pair[1]) for pair in map(codes, names) if pair is not None), EXACT)


def _modules_of(chain: Chain, form: str, units: Iterable[Unit]) -> dict[str, str]:
    """Map the names of the weights in ``units`` that ``form`` can quantise to the names of their modules.

    Only weights of layers are included, not those in the embedding or the head. Empty for the format ``none``.

    Raises:
        UserError: the format is unknown, or no weight can have it.
    """
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
    """Load the parameters of some blocks permanently, quantised if ``form`` says so. Call after ``Chain.prepare``.

    Args:
        chain: the model that receives the weights.
        blocks: numbers of the blocks.
        values: returns a unit's values in its flat layout, of any type and on any device.
        form: format of the weights of linear layers: ``none`` for the type of all other weights, ``w4`` or ``int8``.
            ``auto`` keeps weights that have codes in their format.
        codes: returns codes and scales of the parameter with this name if it is quantised already, else None. They are
            used if they have the format ``form``, or with ``auto``.

    Raises:
        UserError: the format is unknown, or no weight can have it.
    """
    wanted = set(blocks)
    units = [unit for unit in chain.units if wanted.intersection(unit.blocks)]
    modules = _modules_of(chain, form, units)
    for unit in units:
        flat = values(unit).to(chain.device, chain.dtype)
        coded = dict[str, tuple[Tensor, Tensor]]()
        for slot in unit.slots:
            slot_codes = codes(slot.name) if slot.name in modules else None
            if slot_codes is not None and form in (AUTO, form_of(slot_codes[1])):
                coded[slot.name] = slot_codes
            elif slot.name in modules and form != AUTO:
                coded[slot.name] = quantise_rows(slot.view(flat), form)
        chain.hold(unit.index, flat, without=coded)
        for name, pair in coded.items():
            put_few_bits(chain.model, modules[name], pair, flat)
