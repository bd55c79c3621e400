"""What steps take: bytes over the links, memory, and the layers whose results fit into what the user gives to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tawpipe.dealing.balance import layers_that_keep
from tawpipe.model.batch import MicroBatch
from tawpipe.model.flops import windows
from tawpipe.pipeline.sizes import step_costs
from tawpipe.pipeline.wiring import Wiring
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.schedule.spec import EXACT_WIDTH
from tawpipe.schedule.step import Schedule


class StepCosts:
    """The costs of a pipeline's steps, from sizes alone."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def of(self, schedule: Schedule, tokens: int) -> Costs:
        """Bytes over the links and memory of one step, whose micro-batches have so many tokens at most; of weights that
        travel as they change, by how they have last changed.
        """
        wiring = self._wiring
        said = step_costs(
            wiring.chain,
            schedule,
            wiring.dtype,
            wiring.optimizers.states_per_element,
            tokens=tokens,
            kept_per_token=wiring.kept_per_token,
            nodes=wiring.world.nodes,
            whole=wiring.optimizers.whole,
            change=wiring.executor.refresh.change_bytes or EXACT_WIDTH,
        )
        return replace(said, host_bytes=said.host_bytes + wiring.storage.exact_bytes)

    def layers_kept(self, schedule: Schedule, batches: Mapping[int, MicroBatch]) -> dict[int, frozenset[int]]:
        """For this rank's micro-batches the layers of which ``keep_mib`` holds what they would compute again: it is for
        all that are between their forward and their backward pass at one time.
        """
        step, chain, kept_per_token = schedule.step, self._wiring.chain, self._wiring.kept_per_token
        settings, rank = step.settings, self._wiring.world.rank
        waits = step.strategy.orders_host and any(action.op is Op.OFFLOAD for action in schedule.programs[rank])
        if not settings.keep_mib or "graph" not in kept_per_token or waits:  # what waits elsewhere are inputs
            return {}
        first = max(settings.offloaded_layers + 1, chain.spec.first_backward)
        layers = [b for b in step.strategy.computes(step)[rank] if first <= b <= chain.spec.num_layers]
        several = settings.micro_batches_per_visit
        if step.strategy.axis:
            several = _at_once(schedule.programs[rank], frozenset(layers))
        each = max(1, kept_per_token["graph"] - chain.width * self._wiring.dtype.itemsize) * several
        most, of_layers = settings.keep_mib * 2**20, windows(chain.config.get_text_config())
        return {
            m: layers_that_keep(batch.lengths, of_layers, int(most // (each * batch.input_ids.numel())), layers)
            for m, batch in batches.items()
            if step.ranks_of(m) == 1 and m not in step.neighbours
        }


def _at_once(program: Iterable[Action], layers: Collection[int]) -> int:
    """Micro-batches that are between their forward and their backward pass in some of these layers, at most."""
    held, flying, most = Counter[int](), 0, 1
    for action in program:
        if action.block in layers and action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            before = held[action.micro_batch]
            held[action.micro_batch] = after = before + (1 if action.op is Op.FORWARD else -1)
            flying += (after > 0) - (before > 0)
            most = max(most, flying)
    return most
