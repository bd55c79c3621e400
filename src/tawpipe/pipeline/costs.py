"""What steps take: bytes over the links, memory, and the layers whose results fit into what the user gives to them."""

from __future__ import annotations

from dataclasses import replace

from tawpipe.model.batch import MicroBatch
from tawpipe.model.flops import windows
from tawpipe.pipeline.sizes import step_costs
from tawpipe.pipeline.wiring import Wiring
from tawpipe.schedule.balance import layers_that_keep
from tawpipe.schedule.footprint import Costs
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

    def layers_kept(self, schedule: Schedule, m: int, batch: MicroBatch) -> frozenset[int]:
        """The layers of which ``keep_mib`` holds what a micro-batch would compute again."""
        settings, chain, kept_per_token = schedule.step.settings, self._wiring.chain, self._wiring.kept_per_token
        if not settings.keep_mib or schedule.step.ranks_of(m) > 1 or "graph" not in kept_per_token:
            return frozenset()
        each = max(1, kept_per_token["graph"] - chain.width * self._wiring.dtype.itemsize)
        tokens = batch.input_ids.numel() * settings.micro_batches_per_visit
        first, most = max(settings.offloaded_layers + 1, chain.spec.first_backward), settings.keep_mib * 2**20
        return layers_that_keep(batch.lengths, windows(chain.config.get_text_config()), most // (each * tokens), first)
