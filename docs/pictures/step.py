"""One step in time: what one device's lanes do, by the clock that plans use, in a model of five layers."""

from __future__ import annotations

from collections.abc import Sequence

from drawing import Drawing

from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec, share_micro_batches
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.simulate import BlockCost, CostModel, LinkModel, play
from tawpipe.simulate.timeline import Span
from tawpipe.topology import Topology

LAYERS, ENDS = 5, 300
"""Elements of embedding and head; a layer has 1000."""
LEFT, WIDTH, ROW = 196, 690, 34
ROWS = {
    Lane.INTER_W: ("weights between nodes", "near"),
    Lane.GATHER: ("weights inside the node", "weight"),
    Lane.COMPUTE: ("computing", "activation"),
    Lane.REDUCE: ("gradients inside the node", "weight2"),
    Lane.INTER_G: ("gradients between nodes", "gradient"),
}
STORY = (
    "Weights come before they are needed: layer 2 is on its way while layer 1 computes (look-ahead).",
    "At the turn layers 5, 4 and 3 are still there, and layer 2 is still in the node. Layer 1 alone has come again.",
    "A layer's gradients go home while the next one computes.",
    "The end: the last gradients, the norm of all, then the updates.",
)


def step() -> str:
    """The picture as SVG."""
    schedule = _schedule()
    layer = BlockCost.timed(1.0, 3.0)
    blocks = (BlockCost.timed(0.15, 0.15), *[layer] * LAYERS, BlockCost.timed(0.4, 1.2))
    costs = CostModel(blocks, LinkModel(1250.0), LinkModel(4000.0, shared=False), update_s=0.0006)
    timeline = play(schedule, costs, steps=1)
    spans = [span for span in timeline.spans(0, step=0) if span.action.op is not Op.ADD]
    scale = WIDTH / max(span.end for span in spans)
    picture = Drawing(LEFT + WIDTH + 20, 64 + ROW * len(ROWS) + 26 * len(STORY) + 26, "A step of one device, in time")
    tops = {lane: 44 + ROW * row for row, lane in enumerate(ROWS)}
    for lane, (name, _) in ROWS.items():
        picture.text(LEFT - 12, tops[lane] + 17, name, "soft", size=12, anchor="end")
        picture.rect(LEFT, tops[lane], WIDTH, ROW - 8, "panel")
    for span in spans:
        action = span.action
        x, wide = LEFT + span.begin * scale, max(1.5, (span.end - span.begin) * scale - 1.5)
        color = "ink" if action.op in (Op.NORM, Op.UPDATE) else ROWS[action.lane][1]
        forward = action.op is Op.FORWARD
        picture.rect(x, tops[action.lane], wide, ROW - 8, color, radius=2, opacity=0.6 if forward else 1)
        block = action.block if action.block >= 0 else schedule.model.units[action.unit].blocks[0]
        label = {0: "E", LAYERS + 1: "H"}.get(block, str(block))
        if wide > 9 and action.op is not Op.NORM:
            picture.text(x + wide / 2, tops[action.lane] + 17, label, "paper", size=11, anchor="middle")
    marks = _marks(spans, scale)
    for number, (x, text) in enumerate(zip(marks, STORY, strict=True), start=1):
        picture.number(x, 26, number, "ink")
        picture.line([(x, 36), (x, 40 + ROW * len(ROWS))], "line", width=1)
        y = 70 + ROW * len(ROWS) + 26 * (number - 1)
        picture.number(30, y, number, "ink")
        picture.text(50, y + 5, text, size=14)
    words = "E embedding, 1 to 5 layers, H head; two micro-batches per visit; paler: forward"
    picture.text(LEFT, 56 + ROW * len(ROWS) + 26 * len(STORY) + 26, words, "soft", size=12)
    return picture.svg()


def _marks(spans: Sequence[Span], scale: float) -> list[float]:
    """Where the numbers of the story stand."""

    def begin(lane: Lane, op: Op, block: int) -> float:
        return next(s.begin for s in spans if (s.action.lane, s.action.op, s.action.block) == (lane, op, block))

    gradient = next(s for s in spans if s.action.lane is Lane.INTER_G and s.action.unit == LAYERS)
    norm = next(s for s in spans if s.action.op is Op.NORM)
    first, turn = begin(Lane.COMPUTE, Op.FORWARD, 1), begin(Lane.COMPUTE, Op.BACKWARD, LAYERS)
    return [LEFT + scale * at for at in (first, turn, (gradient.begin + gradient.end) / 2, norm.end)]


def _schedule() -> Schedule:
    """``tawpipe-spread`` on two nodes of two devices."""
    last = LAYERS + 1
    units = tuple(UnitSpec(ENDS if block in (0, last) else 1000, True, (block,)) for block in range(last + 1))
    kinds = ("embedding", *["layer"] * LAYERS, "head")
    blocks = tuple(BlockSpec((n,), kind, backward_reads_weights=n > 0) for n, kind in enumerate(kinds))
    nodes = Topology(((0, 1), (2, 3)))
    settings = ScheduleSettings(micro_batches_per_visit=2)
    return build(step_of(ModelSpec(blocks, units), nodes, settings, share_micro_batches(8, 4)))
