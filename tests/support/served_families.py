"""Every causal LM that transformers knows, tiny and random: what an engine writes beside what the model's ``generate``
does, in fp64. Three requests join in different passes, and their prompts come in chunks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from every_family import NOT_BUILT, logits_of, random_model
from family_configs import ORDINARY_TOKENS
from model_families import family_config
from pool import WorkerPool
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.weights import ModuleSource
from tawpipe.pipeline.steps import Continuation
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.serving import engine as engines
from tawpipe.serving.decode_steps import ServeCompute
from tawpipe.serving.engine import Engine, StagesEngine, load_engine
from tawpipe.serving.generate import GrowingTexts, Wanted
from tawpipe.serving.held import hold_weights, refuse_serving
from tawpipe.serving.passes import Pass, Sampling, SlotLayout
from tawpipe.serving.requests import Question, Slots
from tawpipe.topology import Topology

LENGTHS = (5, 13, 9)
"""Tokens of the prompts."""
JOIN = (0, 2, 5)
"""Passes of all groups before each of them is there."""
TOKENS = 10
CHUNK = 4
ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


@dataclass(frozen=True)
class Served:
    """How a family compares: ``equal``, ``refused``, ``wrong``, ``broken``, or ``not built`` by transformers.

    Args:
        staged: the same of three processes with a stage each; empty where it was not asked for.
    """

    kind: str
    reason: str = ""
    staged: str = ""


class Joining(Slots):
    """Texts that are asked for only after some passes."""

    def __init__(self, wanted: Wanted, room: SlotLayout, join: Sequence[int] = JOIN) -> None:
        super().__init__(room, waiting=len(wanted.prompts), idle_s=0)
        self._texts = GrowingTexts(wanted)
        self._later = list(zip(join, range(len(wanted.prompts)), strict=True))
        self._fed = 0

    @property
    def continuations(self) -> list[Continuation]:
        return self._texts.continuations

    def feed(self, group: int) -> Pass:
        while self._later and self._later[0][0] <= self._fed:
            self._texts.ask(self, self._later.pop(0)[1])
        if not self._later:
            self.drain()
        self._fed += 1
        return super().feed(group)


def plain_model(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model of a family with random values, as transformers computes it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).eval()


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    drawn = (ORDINARY_TOKENS.start, ORDINARY_TOKENS.stop)
    return [torch.randint(*drawn, (length,), generator=generator).tolist() for length in lengths]


def wanted(tokens: int = TOKENS, **sampling: Any) -> Wanted:
    return Wanted(prompts(), tokens, Sampling(**{"temperature": 0.0, **sampling}), frozenset())


def generated(model: Any, asked: Wanted, *, by_passes: bool = False) -> list[list[int]]:
    """The new tokens of the model's own ``generate``.

    Args:
        by_passes: by a forward pass for every token, without a cache.
    """
    texts = []
    for prompt in asked.prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            if by_passes:
                for _ in range(asked.tokens):
                    ids = torch.cat([ids, logits_of(model, ids)[:, -1:].argmax(-1)], dim=1)
            else:
                ids = by_generate(model, ids, asked.tokens)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


def by_generate(model: Any, ids: Tensor, tokens: int) -> Tensor:
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "max_new_tokens": tokens}
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    finally:
        model.generation_config.eos_token_id = before


def staying(
    chain: Chain, dtype: torch.dtype = torch.float64, *, blocks: Sequence[int] = (), form: str = "none"
) -> Chain:
    """A chain of a model with values, whose blocks (all by default) hold theirs from now on."""
    source = ModuleSource(chain)
    chain.prepare("cpu", dtype)
    hold_weights(
        chain, blocks or range(len(chain.blocks)), lambda unit: source.unit(unit, dtype=torch.float64), form=form
    )
    return chain


def served(family: str, pool: WorkerPool | None = None) -> Served:
    """What one process makes of a family, and what three processes do if there is a pool of them."""
    try:
        model = random_model(family).eval()
    except Exception as error:
        known = [words for pattern, words in NOT_BUILT.items() if re.search(pattern, str(error))]
        return Served("not built", known[0] if known else str(error).splitlines()[0])
    try:
        asked, chain = wanted(), Chain(random_model(family).requires_grad_(False))
        refuse_serving(chain, asked.longest)
    except UserError as error:
        return Served("refused", error.expected)
    try:
        room = SlotLayout(1, len(LENGTHS), asked.longest, CHUNK)
        expected = generated(model, asked, by_passes=chain.positions.first > 0)
        texts = Joining(asked, room)
        Engine(staying(chain), room).run(texts)
    except Exception as error:
        return Served("broken", f"{type(error).__name__}: {error}")
    ours, reason = [list(each.ids) for each in texts.continuations], ""
    if ours != expected:
        if ours != generated(model, asked, by_passes=True):
            first = next(n for n, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1])
            return Served("wrong", f"text {first}: {ours[first]} instead of {expected[first]}")
        reason = "to greedy forward passes, from which the model's own `generate` differs"
    return Served("equal", reason, "" if pool is None else staged(family, chain, ours, pool))


def staged(family: str, chain: Chain, ours: list[list[int]], pool: WorkerPool) -> str:
    """How the texts of three processes compare with those of one."""
    if chain.why_not_staged:
        return f"refused: {chain.why_not_staged}"
    try:
        return "equal" if pool.run("served_families:on_stages", 3, 1, family=family)[0] == ours else "wrong"
    except AssertionError as error:
        return f"broken: {str(error).strip().splitlines()[-1]}"


def on_stages(world: World, family: str, *, groups: int = 2, compression: str = "", **sampling: Any) -> Any:
    """The texts of a pipeline of all ranks; on rank 0."""
    asked, chain = wanted(**sampling), Chain(random_model(family).requires_grad_(False))
    schedule = build_decode_steps(chain.spec, world.topology, groups)
    staying(chain, blocks=schedule.step.strategy.computes(schedule.step)[world.rank])
    room = SlotLayout(groups, 2, asked.longest, CHUNK)
    engine = StagesEngine(chain, room, world, schedule, compression=compression)
    for _ in range(2):  # an engine may run again
        texts = Joining(asked, room)
        engine.run(texts if world.rank == 0 else None)
    engine.close()
    return [list(each.ids) for each in texts.continuations]


def of_folder(world: World, folder: str) -> Any:
    """The texts of an engine of a folder, a stage on every rank; on rank 0."""
    room = SlotLayout(2, 2, wanted().longest, CHUNK)
    engine = load_engine(folder, room, world, dtype="float64")
    texts = Joining(wanted(), room)
    engine.run(texts if world.rank == 0 else None)
    engine.close()
    return [list(each.ids) for each in texts.continuations]


def scored_by_folder(world: World, folder: str) -> Any:
    """Tokens that requests are told of when their prompts are scored, for answers of 0, 1 and 2 tokens; on rank 0."""
    room, told = SlotLayout(2, 2, wanted().longest, CHUNK), [list[Any]() for _ in LENGTHS]
    engine, slots = load_engine(folder, room, world, dtype="float64"), Slots(room, waiting=len(LENGTHS))
    for tokens, (prompt, each) in enumerate(zip(prompts(), told, strict=True)):
        asked = Question(tuple(prompt), tokens, Sampling(temperature=0.0, logprobs=2), scored=True)
        slots.ask(asked, lambda drawn, end, _, each=each: each.append((drawn and tuple(drawn[1:]), end)))
    slots.drain()
    engine.run(slots if world.rank == 0 else None)
    engine.close()
    return told


def scored_as_on_nccl(world: World, folder: str, beginning: int = 0) -> Any:
    """``scored_by_folder`` where both sides of a message must know its size, as with NCCL; and the sizes by their way.

    Args:
        beginning: bytes of a message that are sent first; 0 for as many as usual.
    """
    sizes = defaultdict[str, list[int]](list)

    class AsNccl(Transport):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.early_transfers = None

        def exchange(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> Mapping[Buffer, Tensor]:
            for one in action.transfers if self.early_transfers is None else ():
                way = (self.rank, one.peer) if one.send else (one.peer, self.rank)
                sizes[f"{way} {one.send}"].append(buffers[one.buffer].nbytes)
            return super().exchange(action, buffers)

    class Short(ServeCompute):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._beginning = beginning or self._beginning

    with patch.object(engines, "Transport", AsNccl), patch.object(engines, "ServeCompute", Short):
        return scored_by_folder(world, folder), dict(sizes)
