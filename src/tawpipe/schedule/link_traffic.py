"""What a link between nodes carries in a step, in elements: what a strategy's formula says of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkTraffic:
    """Elements that one node's link to the other nodes carries in one step.

    Args:
        weights_sent, weights_received: in the compute dtype.
        gradients_sent, gradients_received: in the reduce dtype.
    """

    weights_sent: int = 0
    weights_received: int = 0
    gradients_sent: int = 0
    gradients_received: int = 0

    def bytes_sent(self, weight_bytes: float, gradient_bytes: float) -> int:
        return round(self.weights_sent * weight_bytes + self.gradients_sent * gradient_bytes)

    def bytes_received(self, weight_bytes: float, gradient_bytes: float) -> int:
        return round(self.weights_received * weight_bytes + self.gradients_received * gradient_bytes)
