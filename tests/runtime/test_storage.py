"""Homes: the stripes of all ranks hold every parameter once, and what travels is what they hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from tawpipe.errors import UserError
from tawpipe.model.units import Unit, build_units
from tawpipe.runtime.homes.storage import Storage, piece_of
from tawpipe.schedule.placement import Home

CPU = torch.device("cpu")


class Numbered:
    """A source whose values are numbers that tell every element of the model from the others."""

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(unit.numel, dtype=dtype) / 7 + 1000 * unit.index


def units() -> tuple[Unit, ...]:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5), nn.Linear(5, 7))
    model[0].requires_grad_(False)
    return build_units(model, {name: (int(name[0]),) for name, _ in model.named_parameters()}, ("a", "b", "c"))


def stored(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Storage:
    made = units()
    homes = [Home.over(tuple(range(ranks)), unit.numel) for unit in made]
    return Storage(made, homes, rank, device=CPU, compute_dtype=dtype, master_dtype=torch.float32)


def collected(store: Storage, unit: Unit, **what: bool) -> torch.Tensor:
    found = store.collect(unit, None, **what)
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pieces_of_all_ranks_cover_every_parameter_once(ranks: int) -> None:
    stores = [stored(rank, ranks) for rank in range(ranks)]
    for unit in stores[0].units:
        for slot in unit.slots:
            pieces = [p for one in stores for p in one.pieces[unit.index] if p.name == slot.name]
            covered = sorted((piece.start, piece.start + piece.value.numel()) for piece in pieces)
            assert covered[0][0] == 0 and covered[-1][1] == slot.numel
            assert all(end == begin for (_, end), (begin, _) in pairwise(covered))
            assert all(piece.shape == slot.shape and piece.value.requires_grad == unit.trainable for piece in pieces)


def test_piece_is_a_view_of_its_home_with_its_parameter_name() -> None:
    store = stored(0, 1)
    piece = next(one for one in store.pieces[1] if one.name == "1.weight")
    with torch.no_grad():
        piece.value.fill_(3.0)
    piece.gradient.fill_(4.0)
    slot = next(one for one in store.units[1].slots if one.name == "1.weight")
    assert torch.equal(slot.view(store.master[1]), torch.full((5, 3), 3.0))
    assert torch.equal(slot.view(store.gradient[1]), torch.full((5, 3), 4.0))
    known = piece_of(piece.value)
    assert (known.name, known.shape, known.in_layer) == ("1.weight", (5, 3), True)
    assert not store.pieces[2][0].in_layer and 0 not in store.gradient
    (matrix,) = piece.matrices()
    assert matrix.value.shape == (5, 3) and matrix.value.data_ptr() == piece.value.data_ptr()
    with pytest.raises(UserError, match=r"piece_of: got 'a Parameter of shape \(2,\)'"):
        piece_of(nn.Parameter(torch.zeros(2)))


def test_filled_values_are_collected_without_padding() -> None:
    store, source = stored(0, 1), Numbered()
    store.fill(source, None, 1)
    for unit in store.units:
        assert torch.equal(collected(store, unit), source.unit(unit))
        assert not store.master[unit.index][unit.numel :].any()
    assert not collected(store, store.units[1], gradient=True).any()


def test_only_frozen_values_that_bf16_would_round_are_kept_exactly() -> None:
    store, source = stored(0, 1, torch.bfloat16), Numbered()
    store.fill(source, None, 1)
    frozen = store.units[0]
    assert store.exact == {0} and store.exact_bytes == store.homes[0].shard_size * 4
    assert torch.equal(collected(store, frozen), source.unit(frozen))
    assert torch.equal(store.compute_copy[0], store.master[0].bfloat16())
    rounded = stored(0, 1, torch.bfloat16)
    rounded.settle(None)  # zeros: nothing to round
    assert not rounded.exact and rounded.compute_copy[0] is rounded.master[0] and rounded.exact_bytes == 0


def test_stale_copy_is_reported_until_refreshed() -> None:
    store = stored(0, 1, torch.bfloat16)
    before = dict(store.checksums())
    with torch.no_grad():
        store.master[1].add_(1)
    assert dict(store.checksums())[1] == "stale"
    store.refresh(1)
    after = dict(store.checksums())
    assert after[1] not in ("stale", before[1]) and after[2] == before[2]


def test_only_the_first_of_several_copies_is_saved() -> None:
    made = units()
    homes = [Home.over((0,), unit.numel, replicas=((1,),)) for unit in made]
    first, second = (
        Storage(made, homes, rank, device=CPU, compute_dtype=torch.float32, master_dtype=torch.float32)
        for rank in range(2)
    )
    assert first.is_first_copy(1) and not second.is_first_copy(1) and second.pieces.keys() == first.pieces.keys()
