"""Traffic of a link between nodes in a step, in elements, as a strategy's formula predicts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkTraffic:
    """Elements that one node's link to the other nodes carries in one step.

    Args:
        weights_sent: weights that the node sends, in the compute dtype.
        weights_received: weights that the node receives.
        gradients_sent: gradients that the node sends, in the reduce dtype.
        gradients_received: gradients that the node receives.
    """

    weights_sent: int = 0
    weights_received: int = 0
    gradients_sent: int = 0
    gradients_received: int = 0

    def bytes_sent(self, weight_bytes: float, gradient_bytes: float) -> int:
        """Return the bytes that the node sends, from the bytes of one weight and of one gradient element."""
        return round(self.weights_sent * weight_bytes + self.gradients_sent * gradient_bytes)

    def bytes_received(self, weight_bytes: float, gradient_bytes: float) -> int:
        """Return the bytes that the node receives, from the bytes of one weight and of one gradient element."""
        return round(self.weights_received * weight_bytes + self.gradients_received * gradient_bytes)
