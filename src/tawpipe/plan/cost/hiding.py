"""The lengths from which what passes between nodes hides behind computing: by the clock, and by formula.

The clock plays the schedule that would run. Beside it stand two formulas for one document alone, of a layer's forward
pass, which has the least computing for its bytes: a document over the devices of one node, for whose computing the
weights of a layer arrive from the other nodes; and one over all devices (context parallelism), each node of which is
given the keys and values of all others while it computes attention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from tawpipe.plan.cost.predict import Prediction
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.sizes.footprint import far_widths
from tawpipe.simulate import Seconds

EXPOSED = 0.03
"""Share of a step below which waiting for transfers counts as hidden."""


def hides_from(played: Callable[[int], Prediction], least: int, most: int, precision: float) -> int | None:
    """The shortest row at which less than ``EXPOSED`` of a step is spent waiting for transfers; None if at none.

    Args:
        played: predicts a step with rows of a length.
        least, most: lengths between which it is looked for, the first too short.
        precision: share of a length to which it is found.
    """

    def hides(tokens: int) -> bool:
        prediction = played(tokens)
        return prediction.exposed_communication_s < EXPOSED * prediction.step_seconds

    # Not by halving all of it: where memory gets tight settings change, and a step may wait again.
    while not hides(tried := min(2 * least, most)):
        if tried == most:
            return None
        least = tried
    while tried - least > max(1, least * precision):
        middle = (least + tried) // 2
        least, tried = (least, middle) if hides(middle) else (middle, tried)
    return tried


def weights_hide_from(request: PlanRequest) -> float | None:
    """Tokens of a document over the devices of one node at which the weights of a layer arrive while the layer before
    computes forward; None on one node, or where seconds were not seen to grow with tokens.
    """
    if request.topology.num_nodes == 1:
        return None
    layers = [block for block, spec in enumerate(request.model.blocks) if spec.kind == "layer"]
    sizes = {b: sum(request.model.units[unit].numel for unit in request.model.blocks[b].units) for b in layers}
    largest = max(layers, key=lambda block: sizes[block])
    arriving = sizes[largest] * far_widths(DEFAULT, request.widths)[0] / min(request.link_rates)
    return _tokens(request.profile.blocks[largest].forward, arriving * request.topology.local_size)


def keys_hide_from(request: PlanRequest) -> float | None:
    """Tokens of a document over all devices at which keys and values of a layer, 2 e D_kv S (n - 1)/n bytes into each
    of n nodes, arrive while it computes attention: forward, and backward with twice the bytes. None on one node, or
    where sizes of keys or seconds of attention are not known.
    """
    nodes, layer = request.topology.num_nodes, request.profile.blocks[1]
    per_token = request.key_value_bytes * (nodes - 1) / nodes / min(request.link_rates)
    pairs = layer.forward.per_pair, layer.backward.per_pair / 2
    if nodes == 1 or not per_token or not min(pairs):
        return None
    return per_token * request.topology.world_size / min(pairs)


def _tokens(cost: Seconds, seconds: float) -> float | None:
    """The length of a document that takes so long; None if no length does."""
    left, linear, square = seconds - cost.fixed, cost.per_token, cost.per_pair
    if left <= 0:
        return 0.0
    if not square:
        return left / linear if linear else None
    return (sqrt(linear**2 + 4 * square * left) - linear) / (2 * square)
