"""The timed workload: real transfers of real bytes, computation as sleeps of given seconds. Imports errors.

Scheduling and network are what is measured then, and many ranks run on few cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tawpipe.errors import UserError


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

    def split(self, parts: int) -> TimedWorkload:
        """The same work with every layer cut into ``parts`` equal layers.

        Raises:
            UserError: the weights of a layer cannot be cut so.
        """
        if parts < 1 or self.layer_elements % parts:
            raise UserError("parts_per_layer", parts, f"a divisor of the {self.layer_elements} weights of a layer")
        return replace(
            self,
            layers=self.layers * parts,
            layer_bytes=self.layer_bytes // parts,
            forward_s=self.forward_s / parts,
            backward_input_s=self.backward_input_s / parts,
            backward_weight_s=self.backward_weight_s / parts,
        )

    @property
    def layer_elements(self) -> int:
        return self.layer_bytes // 4

    @property
    def compute_s(self) -> float:
        """Of all layers and micro-batches together; divided by the devices it bounds a step from below."""
        return self.layers * self.micro_batches * (self.forward_s + self.backward_input_s + self.backward_weight_s)
