"""What steps take: bytes over the links, memory, and the layers whose results fit into what the user gives to them."""

from __future__ import annotations

from dataclasses import replace

from tawpipe.model.batch import MicroBatch
from tawpipe.model.flops import key_elements, windows
from tawpipe.pipeline.wiring import Wiring
from tawpipe.schedule.balance import layers_that_keep
from tawpipe.schedule.buffers import BOUNDARIES, Kind
from tawpipe.schedule.footprint import Costs, Widths, costs
from tawpipe.schedule.step import Schedule


class StepCosts:
    """The costs of a pipeline's steps, from sizes alone."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def of(self, schedule: Schedule, tokens: int) -> Costs:
        """Bytes over the links and memory of one step, whose micro-batches have so many tokens at most."""
        wiring, storage, dtype = self._wiring, self._wiring.storage, self._wiring.dtype
        widths = Widths(
            weight=dtype.itemsize,
            gradient=wiring.executor.reduce_dtype.itemsize,
            master=storage.master_dtype.itemsize,
            optimizer_states=wiring.optimizers.states_per_element,
            unpacked=wiring.chain.unpacked_elements,
        )
        local = -(-tokens // wiring.sequence_ranks)
        sizes: dict[Kind, int] = dict.fromkeys(BOUNDARIES, local * wiring.chain.width * dtype.itemsize)
        if wiring.sequence_ranks > 1:
            keys = key_elements(wiring.chain.config.get_text_config()) * tokens
            sizes[Kind.KEYS] = keys * dtype.itemsize
            sizes[Kind.KEY_GRADIENTS] = keys * storage.master_dtype.itemsize
        sizes |= {Kind(kind): local * each for kind, each in wiring.kept_per_token.items() if kind != "attention"}
        sizes[Kind.OFFLOADED_ATTENTION] = sizes.get(Kind.ATTENTION, 0)
        said = costs(schedule, widths, activation_bytes=sizes, nodes=wiring.world.nodes)
        return replace(
            said,
            host_bytes=said.host_bytes + storage.exact_bytes,
            activation_bytes=said.activation_bytes + (wiring.settings.keep_mib or 0) * 2**20,
        )

    def layers_kept(self, schedule: Schedule, m: int, batch: MicroBatch) -> frozenset[int]:
        """The layers of which ``keep_mib`` holds what a micro-batch would compute again."""
        settings, chain, kept_per_token = schedule.step.settings, self._wiring.chain, self._wiring.kept_per_token
        if not settings.keep_mib or schedule.step.ranks_of(m) > 1 or "graph" not in kept_per_token:
            return frozenset()
        each = max(1, kept_per_token["graph"] - chain.width * self._wiring.dtype.itemsize)
        tokens = batch.input_ids.numel() * settings.micro_batches_per_visit
        first, most = max(settings.offloaded_layers + 1, chain.spec.first_backward), settings.keep_mib * 2**20
        return layers_that_keep(batch.lengths, windows(chain.config.get_text_config()), most // (each * tokens), first)
