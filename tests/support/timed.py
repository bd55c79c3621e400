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
DOCUMENTS: dict[str, Any] = {
    "layers": 2,
    "layer_bytes": 4 * 1002,
    "token_s": 1e-7,
    "mu": 6.35,
    "sigma": 2.33,
    "max_document": 6000,
    "bin_tokens": 6000,
    "tokens": 40_000,
    "even_at": 500,
    "seed": 2,
}
"""The same of documents of uneven lengths."""
