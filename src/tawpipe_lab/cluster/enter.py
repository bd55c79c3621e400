"""Program, run as a file, that becomes the command of one rank inside the namespace of its node.

The launcher starts it once per rank, with its variables. The process is replaced twice, by ``ip netns exec`` and then
by the command, and stays the same process. So its process id, its process group and its signal at the launcher's death
remain as the launcher arranged them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankOrders:
    """Orders for all ranks, passed as one argument of their command line.

    Args:
        ip: path of the program ``ip``.
        nodes: namespaces by node number.
        command: program and arguments of every rank.
        variables: environment variables to set; None removes a variable.
        timeout_s: seconds after which SIGALRM ends a rank; 0 for no limit.
    """

    ip: str
    nodes: list[str]
    command: list[str]
    variables: dict[str, str | None]
    timeout_s: float

    def to_word(self) -> str:
        """Return the orders as one JSON argument."""
        return json.dumps(asdict(self))

    def become(self) -> None:
        """Set variables and the timer, and replace this process by the command inside the node of this rank."""
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Python ignores SIGPIPE, and the next program would inherit that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # The timer keeps running after execv.
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        node = self.nodes[int(os.environ["GROUP_RANK"])]
        os.execv(self.ip, ["ip", "netns", "exec", node, *self.command])


if __name__ == "__main__":
    RankOrders(**json.loads(sys.argv[1])).become()
