"""Run as a file: becomes the command of one rank, inside the namespace of its node.

The launcher starts this once for every rank, with its variables. The process stays the same through both replacements
(by ``ip netns exec``, then by the command), so what the launcher has arranged for it holds: its number, its process
group and the signal at the launcher's death.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankOrders:
    """The orders of all ranks, as one word of their command line.

    Args:
        ip: the program.
        nodes: namespaces by node number.
        command: of every rank.
        variables: added to the launcher's; None takes one away.
        timeout_s: SIGALRM ends a rank that runs longer; 0 does not.
    """

    ip: str
    nodes: list[str]
    command: list[str]
    variables: dict[str, str | None]
    timeout_s: float

    def to_word(self) -> str:
        return json.dumps(asdict(self))

    def become(self) -> None:
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Python ignores broken pipes, and what is ignored stays so in the program that follows.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # A timer outlives the replacement of the program.
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        node = self.nodes[int(os.environ["GROUP_RANK"])]
        os.execv(self.ip, ["ip", "netns", "exec", node, *self.command])


if __name__ == "__main__":
    RankOrders(**json.loads(sys.argv[1])).become()
