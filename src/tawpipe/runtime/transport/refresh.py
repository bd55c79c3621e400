"""Copies of weights that stay on a rank from step to step, and are changed there by what their owners send.

In the beginning, after weights were replaced, and wherever that is shorter a copy comes whole; otherwise as its change
(exact.py). Once a step all members of a group agree on the form for every unit, in one small exchange, the only one
that the issuing thread waits for. What is frozen never comes again.

Every ``CHECK_EVERY`` of these exchanges carries a checksum of every copy. Where members differ (a bit has turned, or
something here is wrong) they say so, and the unit comes whole before anybody reads it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tawpipe.model.units import Unit
from tawpipe.runtime.transport.compression import Sent
from tawpipe.runtime.transport.exact import ABSENT, CODED, WHOLE, ChangeForm, best_form, changes, checksum
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer

logger = logging.getLogger(__name__)
CHECK_EVERY = 100
"""Exchanges of sizes, of steps and evaluations, from one comparison of checksums to the next."""
_COUNTS = 1 + len(CODED)


class Refresh:
    """The copies of one rank.

    Its methods run in lanes; those of one step end before the next one's begin.
    """

    def __init__(self, units: Sequence[Unit], transport: Transport) -> None:
        self._units, self._transport = units, transport
        self._present: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        """Unit -> its copy, which is what owners have sent on all members of the group, and these."""
        self._forms: dict[int, ChangeForm] = {}
        self._exchanges = 0
        self.check_every = CHECK_EVERY
        self.healed: list[int] = []
        """Units whose copies were found to differ."""
        self.sent = Sent()
        """To each of the others."""
        self.change_bytes: float | None = None
        """Of a trained weight, when something had last changed; None before."""

    def forget(self) -> None:
        """All copies come whole next time: weights were replaced. With nothing under way."""
        self._present.clear()

    @torch.no_grad()
    def size(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Run SIZE: agree on the form of every unit."""
        homes, copies = action.reads[::2], action.reads[1::2]
        self._exchanges += 1
        checks = self._exchanges % self.check_every == 0
        table = torch.zeros(len(homes), _COUNTS + 2, dtype=torch.int64, device=self._transport.device)
        for row, home, copy in zip(table, homes, copies, strict=True):
            unit = home.at[0]
            if unit not in self._present:
                row[:_COUNTS] = ABSENT
            elif self._units[unit].trainable:
                row[:_COUNTS] = changes(buffers[home], self._own_part(action, buffers[home], buffers[copy]))
            if checks and unit in self._present:
                row[_COUNTS] = checksum(buffers[copy])
                row[_COUNTS + 1] = -row[_COUNTS]
        self._transport.largest(action, table)
        self._forms, trained = {}, Sent()
        for home, (*counts, most, least) in zip(homes, table.cpu().tolist(), strict=True):
            unit, elements = home.at[0], buffers[home].numel()
            self._forms[unit] = best_form(counts, elements)
            if counts[0] < ABSENT and most != -least:
                self._forms[unit] = ChangeForm(WHOLE)
                self._say(action, unit)
            if counts[0] < ABSENT and self._units[unit].trainable:
                trained.add(self._forms[unit].message_bytes(elements), elements)
        self.change_bytes = trained.share() or self.change_bytes

    def gather(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Run the all_gather of a unit's changes."""
        home, copy = action.reads[:2]
        form, members = self._forms[action.unit], self._transport.topology.group(action.group, self._transport.rank)
        self._transport.refresh(action, buffers[home], buffers[copy], form)
        self._present[action.unit] = buffers[copy], members
        self.sent.add(form.message_bytes(buffers[home].numel()), buffers[home].nbytes)

    def checksums(self) -> Iterator[tuple[int, int, str]]:
        """Of every copy the first rank of its group, the unit and a checksum. With nothing under way."""
        for unit, (copy, members) in self._present.items():
            yield members[0], unit, f"{int(checksum(copy)):08x}"

    def _own_part(self, action: Action, home: Tensor, copy: Tensor) -> Tensor:
        """The part of a copy whose owner is this rank."""
        members = self._transport.topology.group(action.group, self._transport.rank)
        return copy.view(len(members), home.numel())[members.index(self._transport.rank)]

    def _say(self, action: Action, unit: int) -> None:
        self.healed.append(unit)
        members = self._transport.topology.group(action.group, self._transport.rank)
        if self._transport.rank == members[0]:
            logger.warning(
                (
                    "unit %d: the copies of its weights on ranks %s differ: a flipped bit or a fault. Whole "
                    "weights are sent now; steps and evaluations since the last comparison, %d ago, may have used "
                    "different ones"
                ),
                unit,
                ", ".join(map(str, members)),
                self.check_every,
            )
