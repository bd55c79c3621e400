"""What do a model's two ends cost, by the schedule and the clock? Buffers of an 8 B, and steps of a small one.

    python benchmarks/ends.py

First the buffers of Llama 3 8B (128,256 tokens) on 3 x 8. Then steps on 3 x 2 whose computing is a multiple of what the
links need for the layers: with ends, with the same ends cut into parts that travel one by one, and with ends that cost
no transfer; as shares of the last. Nothing is measured: the clock plays schedules.
"""

from __future__ import annotations

from tawpipe.schedule.footprint import Widths, costs
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec, share_micro_batches
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology
from tawpipe_lab.critical import dependency_bound

LAYER, ENDS, LAYERS = 218_112_000, (525_336_576, 525_340_672), 32
STRATEGIES = ("tawpipe-spread", "tawpipe-step", "hsdp", "flat")
PER_VISIT = 2
WIDTHS = Widths(weight=2, gradient=4, master=4, optimizer_states=2)


def model(layer: int, ends: tuple[int, int], *, parts: int = 1) -> ModelSpec:
    """An 8 B in small; ``parts`` units for either end."""
    units: list[UnitSpec] = []

    def unit(size: int, block: int) -> int:
        units.append(UnitSpec(size, True, (block,)))
        return len(units) - 1

    def end(size: int, block: int) -> tuple[int, ...]:
        return tuple(unit(size // parts, block) for _ in range(parts)) if size else ()

    embedding = end(ends[0], 0)
    layers = [BlockSpec((unit(layer, block),), "layer") for block in range(1, LAYERS + 1)]
    head = end(ends[1], LAYERS + 1)
    first = BlockSpec(embedding, "embedding", backward_reads_weights=False, needs_backward=bool(embedding))
    return ModelSpec((first, *layers, BlockSpec(head, "head")), tuple(units))


def seconds(ratio: float, rounds: int, *, ends: bool, parts: int = 1) -> tuple[float, float]:
    """Of a step, and of the bound by dependencies; computing is ``ratio`` of what the layers need of the links."""
    nodes, local, layer, rate = 3, 2, LAYER // 200, 1.25e9
    link = (1 - 1 / nodes) * layer * (2 * WIDTHS.weight + WIDTHS.gradient) / rate
    forward = ratio * link / 4 / PER_VISIT
    sizes = (ENDS[0] // 200 // 24 * 24, ENDS[0] // 200 // 24 * 24) if ends else (0, 0)
    of_layer = BlockCost(Seconds(forward), Seconds(3 * forward))
    of_head = BlockCost(backward=Seconds(1.8 * 4 * forward))  # 6 operations for a weight and token, a layer 8
    clock = CostModel(
        (BlockCost(), *[of_layer] * LAYERS, of_head),
        LinkModel(rate, 1e-4),
        LinkModel(16 * rate, 1e-5),
        weight_bytes=WIDTHS.weight,
        gradient_bytes=WIDTHS.gradient,
        reduce_scatter="ring",
    )
    topology = Topology.grid(nodes, local)
    shares = share_micro_batches(topology.world_size * PER_VISIT * rounds, topology.world_size)
    settings = ScheduleSettings(micro_batches_per_visit=PER_VISIT)
    schedule = build(step_of(model(layer, sizes, parts=parts), topology, settings, shares))
    return play(schedule, clock).step_seconds, dependency_bound(schedule, clock)


def main() -> None:
    topology = Topology.grid(3, 8)
    print("buffers of an 8 B on 3 x 8, GiB, two micro-batches per visit")
    for rounds in (1, 4):
        shares = share_micro_batches(24 * PER_VISIT * rounds, 24)
        for name in STRATEGIES:
            step = step_of(model(LAYER, ENDS), topology, ScheduleSettings(strategy=name), shares)
            said = costs(build(step, ranks=(0,)), WIDTHS, activation_bytes={})
            print(f"  {rounds} round(s)  {name:15} {said.buffer_bytes / 2**30:6.2f}")
    print("a step on 3 x 2 over one whose ends cost no transfer; what dependencies allow; ends in three parts")
    for rounds in (1, 2):
        for ratio in (0.5, 1.0, 1.5, 2.0, 3.0):
            free, _ = seconds(ratio, rounds, ends=False)
            whole, bound = seconds(ratio, rounds, ends=True)
            cut, _ = seconds(ratio, rounds, ends=True, parts=3)
            words = f"computing {ratio:3} of the links: {whole / free:.3f}  {bound / free:.3f}  {cut / free:.3f}"
            print(f"  {rounds} round(s)  {words}", flush=True)


if __name__ == "__main__":
    main()
