"""The timed workload: real transfers of real bytes, computation as sleeps of given seconds. Imports nothing of the
project.

Scheduling and network are what is measured then, and many ranks run on few cores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimedWorkload:
    """A model as sizes and seconds.

    Args:
        layers: decoder layers; embedding and head cost nothing here.
        layer_bytes: weights of a layer, fp32.
        forward_s: of a layer and micro-batch.
        backward_input_s: the gradient of the input, with the recomputation of the forward pass before it.
        backward_weight_s: the gradient of the weights; zero-bubble schedules run it apart.
        micro_batches: of one step, over all devices.
        activation_bytes: of the boundary between two layers, for one micro-batch.
        optimizer: run AdamW on the home stripes, instead of leaving the update out.
    """

    layers: int
    layer_bytes: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    micro_batches: int
    activation_bytes: int
    optimizer: bool = True

    @property
    def layer_elements(self) -> int:
        return self.layer_bytes // 4

    @property
    def compute_s(self) -> float:
        """Of all layers and micro-batches together; divided by the devices it bounds a step from below."""
        return self.layers * self.micro_batches * (self.forward_s + self.backward_input_s + self.backward_weight_s)
