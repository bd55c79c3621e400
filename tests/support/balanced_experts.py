"""A plain loop whose loss balances experts by the formula, and pipelines beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from borders import sgd
from cases import random_delays, relative
from family_configs import tiny_config
from model_families import keep_fp64, packed_batch
from piped_documents import batch_of, documents_of, pipeline_of
from pipelines import make_pipeline
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.runtime.world import World
from tawpipe.schedule.pieces import tokens_of_ranks

COEFFICIENT = 0.3
ROWS = ((11, 6, 7), (13, 11), (24,), (3, 21))
"""Lengths of the documents in the rows of a step, each row a micro-batch."""


def mixture(family: str = "mixtral", layers: int = 2, seed: int = 0, **config: Any) -> Any:
    """A model in fp64 in training mode; its last layers have routers."""
    from transformers import AutoModelForCausalLM

    settings = tiny_config(family)
    for key, value in {"num_hidden_layers": layers, **config}.items():
        setattr(settings, key, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double().train()


def formula(logits: Tensor, chosen: int) -> Tensor:
    """The loss of one piece in one layer."""
    probabilities = logits.softmax(-1)
    share = F.one_hot(probabilities.topk(chosen).indices, logits.shape[-1]).sum(1).double().mean(0)
    return logits.shape[-1] * (share * probabilities.mean(0)).sum()


def plain_step(
    model: Any, parts: Sequence[MicroBatch], pieces: Sequence[Sequence[Sequence[int]]], coefficient: float
) -> tuple[float, float, float, dict[str, Tensor]]:
    """Token loss, balancing loss, use of the busiest expert and gradients; every document runs by itself.

    Args:
        pieces: for every micro-batch the tokens of each of its pieces.
    """
    chosen, tokens = model.config.get_text_config().num_experts_per_tok, sum(part.tokens for part in parts)
    loss, balance, counts = torch.zeros(()).double(), torch.zeros(()).double(), []
    for part, of_part in zip(parts, pieces, strict=True):
        outputs = [
            model(input_ids=document[None], use_cache=False, output_router_logits=True)
            for document in part.input_ids.flatten().split(part.lengths)
        ]
        logits = torch.cat([output.logits[0] for output in outputs])
        loss = loss + F.cross_entropy(logits, part.labels.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
        routers = [torch.cat(each) for each in zip(*(output.router_logits for output in outputs), strict=True)]
        for piece in of_part:
            learned = (part.labels.flatten()[list(piece)] != IGNORE).sum()
            mean = torch.stack([formula(router[list(piece)], chosen) for router in routers]).mean()
            balance = balance + learned * mean / tokens
        counted = [index for piece in of_part for index in piece]
        counts.append([router[counted].topk(chosen).indices.flatten().bincount(minlength=8) for router in routers])
    (loss + coefficient * balance).backward()
    used = torch.stack([torch.stack(each).sum(0) for each in zip(*counts, strict=True)]).double()
    busiest = (used.amax(1) / used.mean(1)).amax()
    return loss.item(), balance.item(), busiest.item(), {n: p.grad for n, p in model.named_parameters()}


def whole(parts: Sequence[MicroBatch]) -> list[list[range]]:
    return [[range(part.input_ids.numel())] for part in parts]


def chunks(parts: Sequence[MicroBatch], size: int) -> list[list[range]]:
    lengths = [part.input_ids.numel() for part in parts]
    return [[range(begin, min(begin + size, n)) for begin in range(0, n, size)] for n in lengths]


def of_ranks(parts: Sequence[MicroBatch], ranks: int) -> list[list[list[int]]]:
    """Pieces of a context-parallel group."""
    ranges = [tokens_of_ranks(part.lengths, ranks) for part in parts]
    return [[[i for own in of_rank for i in range(*own)] for of_rank in of_part] for of_part in ranges]


def documents_differ(world: World, *, cut: bool, **knobs: Any) -> float:
    """As ``compared``, for documents of uneven lengths, some of them cut into slices; on rank 0.

    Documents of one token are left out of the pieces: nothing distinguishes them from padding."""
    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)
        pipeline, plain = pipeline_of(world, mixture(), balance=COEFFICIENT, **knobs), mixture()
        documents = documents_of(0)
        packs = pipeline.deal([sum(document.lengths) for document in documents])
        result = pipeline.step(batch_of(pipeline, 0))
        pipeline.drain()
        gradients = {name: pipeline.gradient(name) for name in pipeline.parameter_names}
        worst, parts = 0.0, dict[tuple[int, ...], MicroBatch]()
        pieces: dict[tuple[int, ...], list[list[int]]] = {}
        dealt = {pack for packs_of_round in (*packs.shared, *packs.single) for pack in packs_of_round if pack.documents}
        for pack in dealt:
            part = parts[pack.documents] = MicroBatch.in_a_row([documents[number] for number in pack.documents])
            tokens = range(*(pack.part or (0, part.input_ids.numel())))
            position, last = part.position_ids.flatten().tolist(), part.input_ids.numel() - 1
            real = [t for t in tokens if position[t] or (t < last and position[t + 1])]
            pieces.setdefault(pack.documents, []).append(real)
        assert any(pack.part for pack in dealt) == cut
        if world.rank == 0:
            *numbers, expected = plain_step(plain, [*parts.values()], [*pieces.values()], COEFFICIENT)
            found = result.loss, result.balance_loss, result.busiest_expert
            worst = max(abs(a / b - 1) for a, b in zip(found, numbers, strict=True))
            for name, gradient in expected.items():
                computed = gradients[name]
                assert computed is not None
                worst = max(worst, relative(computed, gradient))
        pipeline.close()
    return worst


def compared(
    world: World | None,
    *,
    family: str = "mixtral",
    cut: Any = whole,
    rows: Sequence[Sequence[int]] = ROWS,
    steps: int = 1,
    adapter: bool = False,
    layers: int = 2,
    delays: float = 0.0,
    **knobs: Any,
) -> float:
    """The largest relative difference between steps of a pipeline and of the plain loop, on rank 0.

    Args:
        cut: makes pieces of micro-batches.
        adapter: train an adapter on attention only.
    """
    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)

        def make() -> Any:
            model = mixture(family, layers)
            if not adapter:
                return model
            peft = pytest.importorskip("peft")
            torch.manual_seed(5)
            settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            return peft.get_peft_model(model, settings).double()

        pipeline = make_pipeline(
            make(),
            dtype=torch.float64,
            clip_norm=None,
            optimizer=sgd,
            check="never",
            strict=True,
            loss_chunk_tokens=6,
            balance=COEFFICIENT,
            delay=(lambda lane: random_delays(hash(lane), delays)) if delays else None,
            **({} if world is None else {"world": world}),
            **knobs,
        )
        plain, worst = make(), 0.0
        plain = plain.get_base_model() if adapter else plain
        parts = [packed_batch((tuple(row),), seed=number) for number, row in enumerate(rows)]
        own = [parts[share.index] for share in pipeline.shares(len(parts))]
        for _ in range(steps):
            result = pipeline.step(LocalBatch(len(parts), max(map(sum, rows)), own))
            pipeline.drain()
            trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
            gradients = {name: pipeline.gradient(name) for name in trained}
            found = result.loss, result.balance_loss, result.busiest_expert
            if pipeline.world.rank == 0:
                plain.zero_grad()
                *numbers, expected = plain_step(plain, parts, cut(parts), COEFFICIENT)
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(found, numbers, strict=True)))
                for name, gradient in expected.items():
                    if gradient is not None:
                        computed = gradients[name]
                        assert computed is not None, name
                        worst = max(worst, relative(computed, gradient))
                        plain.get_parameter(name).data -= gradient
        evaluated = pipeline.evaluate(LocalBatch(len(parts), max(map(sum, rows)), own))
        assert evaluated.balance_loss != evaluated.balance_loss  # nan
        pipeline.close()
    return worst
