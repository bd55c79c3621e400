"""The list of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tawpipe.prove import documents, endings, exactness, memory, reserved, speed, waits
from tawpipe.prove.outcome import Outcome
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Check:
    """A check that the command ``prove`` runs.

    Args:
        name: name of the check.
        sentence: statement that is true if the check holds.
        run: the check; called on all ranks. With ``keeps`` it also takes ``keep``.
        alone: run on rank 0 only, while the other ranks wait.
        needs: requirements: ``cuda``, ``several`` (processes) or ``neighbours`` (several processes on one node).
            Without them the result is "unproven".
        keeps: ``run`` takes a function ``keep``, with which it writes an outcome of what it has measured so far.
        page: returns the HTML page of the check from ``Proof.setting`` and its row of ``Proof.checks``; None for none.
    """

    name: str
    sentence: str
    run: Callable[..., Outcome]
    alone: bool = False
    needs: tuple[str, ...] = field(default=())
    keeps: bool = False
    page: Callable[[dict[str, Any], dict[str, Any]], str] | None = None

    def missing(self, world: World) -> str:
        """Return the requirements that these processes do not meet, as text for the user; ``""`` if all are met."""
        neighbours = world.topology.local_size > 1
        here = {"cuda": world.device.type == "cuda", "several": world.size > 1, "neighbours": neighbours}
        words = {"cuda": "a GPU", "several": "several processes", "neighbours": "several processes on a node"}
        return " and ".join(words[need] for need in self.needs if not here[need])


CHECKS = (
    Check("kernel", "attention uses a kernel that is installed here", speed.kernel),
    Check(
        "documents",
        "packed documents have the gradients of each document alone, in bf16, for every way of running a layer",
        documents.documents,
        alone=True,
    ),
    Check("exact", "every strategy has the loss and the gradients of one plain process", exactness.exact),
    Check(
        "bits", "steps give equal bits whichever lane is delayed, and free no memory that is still read", exactness.bits
    ),
    Check(
        "host",
        "homes in the host's memory give the bits of homes on devices, at 80 % of the link's rate or more",
        exactness.in_host,
    ),
    Check("chunks", "rows in chunks have the numbers of whole rows", exactness.chunks),
    Check(
        "sets",
        "rows over several processes have the numbers of rows on one",
        exactness.cp_groups,
        needs=("neighbours",),
    ),
    Check("order", "every message is the one that its receiver expects", exactness.order, needs=("several",)),
    Check("memory", "a step uses the predicted memory, within 5 %", memory.predicted, alone=True),
    Check("longest", "the longest row that should fit does, within 5 %", memory.longest, alone=True),
    Check("reserved", "device memory stays within the prediction, by all four counts", reserved.reserved),
    Check("waits", "no step waits for the device", waits.waits, needs=("cuda",)),
    Check("beside", "transfers do not slow a layer down", waits.beside, needs=("several",)),
    Check("speed", "a step takes the predicted time, within 15 %", speed.step),
    Check(
        "offload", "inputs of layers wait in the host's memory at no cost in numbers", speed.offload, needs=("cuda",)
    ),
    Check("end", "a script that ends without close() exits cleanly", endings.without_close, alone=True),
)


def unproven(world: World) -> dict[str, str]:
    """Return the claims that these processes cannot prove, each with the command or machines that would prove it."""
    nccl = world.device.type == "cuda"
    several = "torchrun --nproc-per-node 2 -m tawpipe prove, on a machine with two GPUs or more"
    nodes = "as above with --nnodes 2, on two machines"
    claims: dict[str, str] = {}
    if not nccl or world.size == 1:
        claims["schedules run in NCCL's order, on streams of high priority with a capped number of channels"] = several
        claims["connections of all operations and pairs are made before the first step"] = several
    if not nccl or world.machines.num_nodes == 1:
        claims["transfers between machines hide behind computing"] = nodes
    return claims
