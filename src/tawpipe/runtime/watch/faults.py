"""Fault injection: faults that are triggered on purpose, to test what a run does after them.

    tawpipe train --inject "rank=2,step=7,at=push:3,kind=kill"

One fault happens on one rank in one step, before the first action there that ``at`` names. It happens once in the life
of a run: after a restart it is not repeated (``restart=N`` moves it to the Nth restart instead). If the rank's schedule
has no such action, an error is raised, so that no test passes because nothing happened.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tawpipe.environment import restart_count
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, home_weight
from tawpipe.schedule.step import Schedule

SETTING = "injector"
PLACES = ("pull", "gather", "forward", "backward", "reduce", "push", "update", "save", "load")
"""Values of ``at``.

Weights between nodes, and inside a node; computing forward and backward; gradients inside a node, and between nodes;
the optimizer; a checkpoint being written, and being read.
"""
KINDS = ("kill", "exit", "hang", "slow", "error", "nan", "bitflip", "disk-full")
"""Kinds of faults.

SIGKILL; an exit with code 3; an action that never ends; an action that takes ``seconds`` longer; an action that raises
an error; nan in the values that the action writes; one flipped bit in these values, or in a checkpoint's file; no space
left on a disk.
"""
BUFFERS = ("pull", "gather", "backward", "reduce", "push", "update")
ONLY = {"disk-full": ("save",), "nan": BUFFERS, "bitflip": (*BUFFERS, "save")}
"""Kind of fault -> places that it is limited to."""
EXIT_CODE = 3


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Args:
        rank: Rank on which it happens.
        step: Step as the log counts, from 1. For ``save``, the step that is saved; ignored for ``load``.
        place: One of ``PLACES``.
        kind: One of ``KINDS``.
        number: Unit of the action, or block for computing; None for the first action.
        seconds: Delay of ``slow``.
        restart: Start of the run in which it happens, 0 for the first.
    """

    rank: int
    step: int
    place: str
    kind: str
    number: int | None = None
    seconds: float = 1.0
    restart: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault such as ``rank=2,step=7,at=push:3,kind=kill``; ``seconds=`` and ``restart=`` may follow.

        >>> Fault.parse("rank=2,step=7,at=PUSH:3,kind=kill")
        Fault(rank=2, step=7, place='push', kind='kill', number=3, seconds=1.0, restart=0)

        Raises:
            UserError: If the text has another form or a value is not allowed.
        """
        form = "for example rank=2,step=7,at=push:3,kind=kill"
        words: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals or name in words:
                raise UserError(SETTING, text, form)
            words[name] = value.strip()
        if unknown := words.keys() - {"rank", "step", "at", "kind", "seconds", "restart"}:
            raise UserError(SETTING, ", ".join(sorted(unknown)), form)
        if missing := {"rank", "step", "at", "kind"} - words.keys():
            raise UserError(SETTING, text, f"{', '.join(sorted(missing))} as well; {form}")
        place, colon, number = words["at"].lower().partition(":")
        kind = words["kind"].lower()
        if place not in PLACES:
            raise UserError(SETTING, words["at"], f"at one of {', '.join(PLACES)}")
        if kind not in KINDS:
            raise UserError(SETTING, words["kind"], f"a kind out of {', '.join(KINDS)}")
        if place not in ONLY.get(kind, PLACES):
            raise UserError(SETTING, text, f"{kind} at one of {', '.join(ONLY[kind])}")
        counts = {"rank": words["rank"], "step": words["step"], "restart": words.get("restart", "0")}
        counts |= {"at": number} if colon else {}
        for name, value in counts.items():
            if not value.isdecimal() or (name == "step" and int(value) < 1) or len(value) > 9:
                raise UserError(SETTING, f"{name}={value}", "a whole number; steps count from 1")
        try:
            seconds = float(words.get("seconds", "1"))
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e6:
            raise UserError(SETTING, f"seconds={words['seconds']}", "a number of seconds above 0")
        target = int(number) if colon else None
        return cls(int(words["rank"]), int(words["step"]), place, kind, target, seconds, int(counts["restart"]))


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults that are separated by semicolons.

    Raises:
        UserError: See ``Fault.parse``.
    """
    return tuple(Fault.parse(part) for part in text.split(";") if part.strip())


def place_of(action: Action) -> str:
    """Return the name in ``PLACES`` of an action, or ``""`` if it has none."""
    computing = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.UPDATE: "update"}
    moving = {Lane.INTER_W: "pull", Lane.GATHER: "gather", Lane.REDUCE: "reduce", Lane.INTER_G: "push"}
    if action.op in computing:
        return computing[action.op]
    return moving.get(action.lane, "") if action.op in (Op.EXCHANGE, Op.COLLECTIVE) else ""


class Injector:
    """Triggers the faults of one rank.

    Args:
        faults: Faults of all ranks.
        rank: This rank.
        restart: Number of restarts of the run so far; read from the environment if None.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, *, restart: int | None = None) -> None:
        restart = restart_count() if restart is None else restart
        self._waiting = [fault for fault in faults if fault.rank == rank and fault.restart == restart]

    def check(self, schedule: Schedule, rank: int) -> None:
        """Check that every waiting fault can happen in the schedule of ``rank``.

        Raises:
            UserError: If the rank's schedule has no action that a fault names.
        """
        program = schedule.programs[rank]
        for fault in self._waiting:
            if fault.place in ("save", "load") or any(_matches(fault, action) for action in program):
                continue
            places = sorted({place for action in program if (place := place_of(action))})
            number = "" if fault.number is None else f":{fault.number}"
            raise UserError(SETTING, f"{fault.place}{number}", f"a place that rank {rank} has: {', '.join(places)}")

    def around(
        self, action: Action, step: int, run: Callable[[], None], buffers: Mapping[Buffer, Any]
    ) -> Callable[[], None]:
        """Return ``run``, or a function that runs it with a fault if a waiting fault names this action and step.

        The fault is then no longer waiting.

        Args:
            action: The action that ``run`` executes.
            step: Step, from 1.
            run: Executes the action.
            buffers: Tensors of the buffers, which ``nan`` and ``bitflip`` change.
        """
        fault = next((waiting for waiting in self._waiting if waiting.step == step and _matches(waiting, action)), None)
        if fault is None:
            return run
        self._waiting.remove(fault)

        spoils = fault.kind in ("nan", "bitflip")
        only_sends = bool(action.transfers) and all(transfer.send for transfer in action.transfers)

        def faulty() -> None:
            """Trigger the fault and run the action. Values to send are changed before it runs, all others after it."""
            strike(fault)
            if spoils and only_sends:
                spoil(fault.kind, action, buffers)
            run()
            if spoils and not only_sends:
                spoil(fault.kind, action, buffers)

        return faulty

    def before_save(self, step: int) -> None:
        """Trigger faults of ``save`` in ``step``, except ``bitflip``.

        Call it before this rank writes the checkpoint of ``step``."""
        self._strike_at("save", step)

    def before_load(self) -> None:
        """Trigger faults of ``load`` of any step; call it before this rank reads a checkpoint."""
        self._strike_at("load", None)

    def after_save(self, step: int, path: Path) -> None:
        """Flip a bit of ``path``, this rank's file of the complete checkpoint of ``step``, if a fault asks for it."""
        for fault in list(self._waiting):
            if (fault.place, fault.kind, fault.step) == ("save", "bitflip", step):
                self._waiting.remove(fault)
                flip_a_bit(path)

    def _strike_at(self, place: str, step: int | None) -> None:
        """Trigger the waiting faults of ``place`` and ``step``, except ``bitflip``, and remove them.

        If ``step`` is None, faults of any step are triggered."""
        for fault in list(self._waiting):
            if fault.place == place and step in (None, fault.step) and fault.kind != "bitflip":
                self._waiting.remove(fault)
                strike(fault)


def _matches(fault: Fault, action: Action) -> bool:
    """Return True if the fault names this action: its place, and its unit or block if given."""
    if place_of(action) != fault.place:
        return False
    if fault.number is None:
        return True
    units = {action.unit, *(transfer.unit for transfer in action.transfers)}
    return fault.number in (units if action.block < 0 else {action.block})


def strike(fault: Fault) -> None:
    """Carry out a fault that acts before its action: end, block or delay this process, or raise an error."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exit":
        os._exit(EXIT_CODE)
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "error":
        raise RuntimeError(f"injected at {fault.place} in step {fault.step}")
    elif fault.kind == "disk-full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spoil(kind: str, action: Action, buffers: Mapping[Buffer, Any]) -> None:
    """Change the values of an action: fill them with nan, or flip a high bit of the first value.

    The tensor is the first that exists of: written buffers, received and sent buffers, read buffers, the home weight.

    Args:
        kind: ``nan`` or ``bitflip``.
        action: The action.
        buffers: Tensors of the buffers.

    Raises:
        UserError: If the action has no tensor.
    """
    import torch

    moved = sorted(action.transfers, key=lambda transfer: transfer.send)  # received buffers before sent ones
    used = (*action.writes, *(transfer.buffer for transfer in moved), *action.reads, home_weight(action.unit))
    tensors = [buffers[buffer] for buffer in used if isinstance(buffers.get(buffer), torch.Tensor)]
    if not tensors:
        raise UserError(SETTING, f"{kind} at {place_of(action)}", "a place whose action writes a buffer")
    with torch.no_grad():
        values = tensors[0].view(-1)
        if kind == "nan":
            values.fill_(float("nan"))
        else:
            values[:1].view(torch.uint8)[-1] ^= 0x40  # a high bit of the exponent


def flip_a_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
