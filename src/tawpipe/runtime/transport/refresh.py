"""Copies of weights that stay on a rank from step to step, and are updated there from messages of their owners.

A copy is sent whole at first, after weights were replaced, and whenever that is shorter. Otherwise its change is sent
(exact.py). Once per step all members of a group agree on the form for every unit, in one small exchange. It is the only
exchange for which the issuing thread waits. Frozen weights are sent only once.

Every ``CHECK_EVERY``-th of these exchanges also carries a checksum of every copy. If members differ (a bit has flipped,
or this code has a fault), they log it, and the unit is sent whole before it is read again.
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
"""Exchanges of sizes, in steps and evaluations, between two comparisons of checksums."""
_COUNTS = 1 + len(CODED)


class Refresh:
    """Copies of weights of one rank, and the messages that update them.

    Its methods run in lanes. All methods of one step end before any method of the next step begins.
    """

    def __init__(self, units: Sequence[Unit], transport: Transport) -> None:
        self._units, self._transport = units, transport
        self._present: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        """Unit -> its copy, equal on all members of the group, and these members."""
        self._forms: dict[int, ChangeForm] = {}
        self._exchanges = 0
        self.check_every = CHECK_EVERY
        self.healed: list[int] = []
        """Units whose copies were found to differ between members."""
        self.sent = Sent()
        """Bytes sent to each of the other members."""
        self.change_bytes: float | None = None
        """Bytes per trained weight in the last step in which weights had changed; None before."""

    def forget(self) -> None:
        """Mark all copies as absent, so that each is sent whole the next time. Call it after weights were replaced.

        No action may be under way."""
        self._present.clear()

    @torch.no_grad()
    def size(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Run SIZE: count the changes of every unit, and agree with the group on the form in which each unit is sent.

        The result is kept for ``gather``. The calling thread waits for the group. Every ``check_every`` calls it also
        compares checksums. A unit whose copies differ is sent whole, and is added to ``healed``."""
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
        """Run the all_gather that updates this rank's copy of a unit, in the form chosen by ``size``."""
        home, copy = action.reads[:2]
        form, members = self._forms[action.unit], self._transport.topology.group(action.group, self._transport.rank)
        self._transport.refresh(action, buffers[home], buffers[copy], form)
        self._present[action.unit] = buffers[copy], members
        self.sent.add(form.message_bytes(buffers[home].numel()), buffers[home].nbytes)

    def checksums(self) -> Iterator[tuple[int, int, str]]:
        """Yield for every copy the first rank of its group, the unit and a checksum. Call with no action under way."""
        for unit, (copy, members) in self._present.items():
            yield members[0], unit, f"{int(checksum(copy)):08x}"

    def _own_part(self, action: Action, home: Tensor, copy: Tensor) -> Tensor:
        """Return the part of a copy whose owner is this rank."""
        members = self._transport.topology.group(action.group, self._transport.rank)
        return copy.view(len(members), home.numel())[members.index(self._transport.rank)]

    def _say(self, action: Action, unit: int) -> None:
        """Add ``unit`` to ``healed``; on the first rank of the group, log a warning."""
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
