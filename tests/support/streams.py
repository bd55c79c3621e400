"""Steps of a rank on a device that is none, and the ledger of what its streams did (``fake_cuda``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM

from fake_cuda import DEVICE, fake_cuda
from ledger import Ledger
from pipelines import make_pipeline
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.weights import ModuleSource
from tawpipe.runtime.homes.optimizer import OptimizerFactory
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.serving import decode_steps
from tawpipe.serving.engine import StagesEngine
from tawpipe.serving.held import hold_weights
from tawpipe.serving.passes import Drawn, Pass, Row, Sampling, SlotLayout
from tawpipe.topology import Topology

VOCABULARY, LENGTH, ROOM = 31, 12, SlotLayout(2, 2, 16, 4)


def tiny(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def rows_of(number: int, length: int) -> dict[str, Tensor]:
    """A global batch."""
    ids = torch.randint(0, VOCABULARY, (number, length), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.clone()}


def _document(lengths: tuple[int, ...], number: int) -> MicroBatch:
    ids = torch.full((1, lengths[number]), number % VOCABULARY)
    return MicroBatch.from_rows(ids, ids.clone())


def played(
    nodes: int = 2,
    local: int = 2,
    rank: int = 0,
    *,
    rows: int = 4,
    lengths: tuple[int, ...] = (LENGTH, LENGTH),
    documents: tuple[int, ...] = (),
    layers: int = 4,
    evaluate: bool = False,
    momentum: float = 0.0,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerFactory | None = None,
    **knobs: Any,
) -> Ledger:
    """The ledger of one rank's steps, one after the other without a pause.

    ``waits`` and ``unpinned`` are those from the second step on: the first one checks the blocks.

    Args:
        lengths: of the rows, for every step.
        documents: lengths of documents that are dealt instead.
        evaluate: after the steps, once.
    """
    with fake_cuda(rank, nodes * local) as ledger:
        world = World(Topology.grid(nodes, local), rank, DEVICE, None)
        pipeline = make_pipeline(
            tiny(layers),
            world=world,
            dtype=dtype,
            check="never",
            optimizer=optimizer or partial(SGD, lr=0.05, momentum=momentum, fused=True),
            **knobs,
        )
        pipeline._steps.judge = lambda result: result.wait()  # type: ignore[method-assign]  # of numbers that peers would have had a part in
        for step, length in enumerate(lengths):
            if documents:
                batch: Any = pipeline.part_of_documents(documents, partial(_document, documents))
            else:
                batch = rows_of(rows, length)
            if step == 1:
                ledger.waits.clear()
                ledger.unpinned.clear()
            pipeline.step(batch)
        said = list(ledger.waits), list(ledger.unpinned)
        if evaluate:
            with patch.object(StepResult, "require_alike", StepResult.wait):  # peers would have had a part in it
                pipeline.evaluate(rows_of(rows, LENGTH))
        pipeline.close()
        del pipeline
        ledger.sweep()
    ledger.waits, ledger.unpinned = said
    return ledger


class _Passes:
    """A prompt in the first slot of every group, then one token in each round of decoding; then each group's last pass.

    Args:
        tokens: of the prompt.
    """

    def __init__(self, slot_layout: SlotLayout, rounds: int, tokens: int) -> None:
        self.slot_layout, self.left, self._at = slot_layout, rounds * slot_layout.groups, [0] * slot_layout.groups
        self._tokens = tokens

    def feed(self, group: int) -> Pass:
        self.left -= 1
        if self.left < 0:
            return Pass(group, (), True)
        first, count = self._at[group], 1 if self._at[group] else self._tokens
        self._at[group] += count
        return Pass(group, (Row(group * self.slot_layout.slots, first, (1,) * count, Sampling(temperature=0)),))

    def take(self, group: int, drawn: Sequence[Drawn]) -> None:
        pass


def decoded(
    rank: int = 0,
    *,
    ranks: int = 2,
    rounds: int = 6,
    compression: str = "",
    room: SlotLayout = ROOM,
    prompt: int = 4,
    sent: list[int] | None = None,
) -> Ledger:
    """The ledger of one rank's rounds of decoding, a stage on each of ``ranks``.

    Args:
        prompt: tokens of the first pass of a group.
        sent: is given the bytes of every message that leaves.
    """
    with fake_cuda(rank, ranks) as ledger:
        world = World(Topology.grid(ranks, 1), rank, DEVICE, None)
        chain = Chain(tiny(4))
        source, schedule = ModuleSource(chain), build_decode_steps(chain.spec, world.topology, room.groups)
        chain.prepare(DEVICE, torch.float32)
        hold_weights(chain, schedule.step.strategy.computes(schedule.step)[rank], source.unit)
        engine = StagesEngine(chain, room, world, schedule, compression=compression)
        passes, groups, exchange = _Passes(room, rounds, prompt), cycle(range(room.groups)), Transport.exchange

        def header(message: Tensor) -> bytes:  # of peers, which send zeros
            message.cpu()
            return decode_steps.header_of(passes.feed(next(groups)))

        def counted(self: Transport, action: Action, buffers: Any) -> Any:
            leaving = [buffers[one.buffer].nbytes for one in action.transfers if one.send]
            (sent if sent is not None else []).extend(leaving)
            return exchange(self, action, buffers)

        with (
            patch.object(decode_steps, "_as_bytes", header if rank else decode_steps._as_bytes),
            patch.object(Transport, "exchange", counted),
        ):
            engine.run(passes if rank == 0 else None)
        engine.close()
        ledger.sweep()
    return ledger
