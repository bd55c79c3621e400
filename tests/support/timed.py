"""The timed workload of the tests of the lab's rivals, small and of awkward sizes."""

from __future__ import annotations

from typing import Any

STEPS = 3
LAYERS = 4
WORKLOAD: dict[str, Any] = {
    "layers": LAYERS,
    "layer_bytes": 4 * 1002,  # elements that do not divide by four ranks
    "forward_s": 0.001,
    "backward_input_s": 0.002,
    "backward_weight_s": 0.003,
    "micro_batches": 8,
    "activation_bytes": 4 * 64,
}
