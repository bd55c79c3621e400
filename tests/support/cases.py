"""What worker processes run for the tests: training beside a plain PyTorch loop, and comparisons."""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pipelines import make_pipeline
from processes import wait_for
from tawpipe.errors import RunError, UserError
from tawpipe.model.bits.quantized import NF4
from tawpipe.model.units import Unit
from tawpipe.model.weights import InitSource
from tawpipe.pipeline.batch import Deal, LocalBatch
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.plan.machine.probe import probe
from tawpipe.runtime.compute import moves
from tawpipe.runtime.compute.activations import Activations
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.transport.transport import TransportError
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.buffers import Buffer, Kind
from tawpipe.schedule.pipelines.work import Order, Work
from tawpipe.schedule.sizes.activations import peak_activations
from tawpipe.schedule.sizes.traffic import scratch_bytes

LAYERS, VOCABULARY, LENGTH = 5, 61, 20
STEPS = 3
EPS = 1e-6
"""Of AdamW, above the rounding noise of an fp32 gradient: below it the sign of an element that should be 0 decides its
update.
"""
WITH_HOST = str(
    Order(
        (
            tuple(Work(kind, 0, m) for kind, m in zip("FFFIIIWWW", (0, 1, 2) * 3, strict=True)),
            tuple(Work(kind, 1, m) for m in range(3) for kind in "FIW"),
        ),
        ((Work("O", 0, 1), Work("R", 0, 1)), ()),
        {Work("F", 0, 2): Work("O", 0, 1)},
    )
)
"""An order of two stages for three micro-batches; what the first stage keeps of one waits in the host's memory."""


def random_delays(seed: int, most_s: float) -> Callable[[], float]:
    """Delays drawn uniformly up to ``most_s`` seconds."""
    generator = random.Random(seed)
    return lambda: generator.uniform(0, most_s)


def _norm_in_own_dtype(self: Any, hidden: Tensor) -> Tensor:
    """transformers computes this in fp32 even for an fp64 model, which would hide anything below 1e-8."""
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


_norm_in_own_dtype.__module__ = LlamaRMSNorm.__module__  # or every model here would be one that needs a check
LlamaRMSNorm.forward = _norm_in_own_dtype  # type: ignore[method-assign, assignment]


class ExactNorm(GptOssRMSNorm):
    """Norm of ``mixture`` in its own dtype. Other tests judge the norm that transformers has."""

    forward = _norm_in_own_dtype  # type: ignore[assignment]


ExactNorm.__module__ = GptOssRMSNorm.__module__


def llama(dtype: torch.dtype, *, tied: bool = False, dropout: float = 0.0, layers: int = LAYERS) -> LlamaForCausalLM:
    """Five layers if nothing else is said, odd sizes, the same values in every process."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        max_position_embeddings=64,
    )
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)


def mixture(dtype: torch.dtype) -> GptOssForCausalLM:
    """Four layers whose experts are stacked, with biases, and stored the other way round than linear layers."""
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(7)
    model: Any = GptOssForCausalLM(config)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    for module in model.modules():
        module.__class__ = ExactNorm if type(module) is GptOssRMSNorm else type(module)
    return model.to(dtype)


def batches(rows: int | tuple[int, ...], steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Rows with masked prompts of uneven lengths, so that ranks hold different numbers of tokens that count.

    Args:
        rows: of every step, or of each.
    """
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in rows if isinstance(rows, tuple) else (rows,) * steps:
        ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        labels = ids.clone()
        for row in range(count):
            labels[row, : 3 * row % LENGTH] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@functools.lru_cache(maxsize=32)
def plain_loop(
    dtype: torch.dtype, tied: bool, rows: int | tuple[int, ...], clip: float | None, steps: int, layers: int = LAYERS
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradient norms, the first step's gradients (clipped), and the weights after all steps."""
    model = llama(dtype, tied=tied, layers=layers)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=EPS)
    losses, norms, gradients = [], [], {}
    for batch in batches(rows, steps):
        logits = model(batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)))
        if not losses:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def of_first(world: World, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks: made by each it would take the processors several times."""
    box: list[Any] = [None if world.rank else make()]
    if world.size > 1:
        dist.broadcast_object_list(box)
    return box[0]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def exact(world: World, *, settings: list[dict[str, Any]]) -> list[float]:
    """For every setting the largest relative difference to the plain loop: losses, norms, gradients and weights."""
    return [_exact(world, **setting) for setting in settings]


def _exact(
    world: World,
    *,
    dtype: str,
    tied: bool,
    rows: int,
    delays: float = 0.0,
    evaluate_first: bool = False,
    reorder: str = "",
    steps: int = 2,
    **knobs: Any,
) -> float:
    """As ``exact``; a pipeline's order is another one, as text, from the third step on."""
    kind = getattr(torch, dtype)
    delay = (lambda lane: random_delays(hash((lane, world.rank)), delays)) if delays else None
    pipeline = make_pipeline(
        llama(kind, tied=tied),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=kind,
        world=world,
        strict=True,
        loss_chunk_tokens=8,
        delay=delay,
        **knobs,
    )
    clip = knobs.get("clip_norm", 1.0)
    expected = of_first(world, lambda: plain_loop(kind, tied, rows, clip, steps))
    expected_losses, expected_norms, expected_gradients, expected_weights = expected
    worst = 0.0
    for step, batch in enumerate(batches(rows, steps)):
        if evaluate_first:
            pipeline.evaluate(batch)
        if step == 2 and reorder:
            pipeline.reorder(rows, Order.parse(reorder))
        result = pipeline.step(batch)
        if step == 0:
            pipeline.drain()
            for name in pipeline.parameter_names:
                gradient = pipeline.gradient(name)
                if gradient is not None:
                    worst = max(worst, relative(gradient, expected_gradients[name]))
        worst = max(worst, abs(result.loss / expected_losses[step] - 1))
        worst = max(worst, abs(result.grad_norm / expected_norms[step] - 1))
    pipeline.drain()
    for name in pipeline.parameter_names:
        value = pipeline.parameter(name)
        if value is not None:
            worst = max(worst, relative(value, expected_weights[name]))
    pipeline.close()
    return worst


def weights_after(
    world: World, *, dropout: float = 0.0, delays: float = 0.0, rows: int = 5, reorder: str = "", **knobs: Any
) -> Any:
    """Losses and weights (rank 0) after some steps; with dropout, with random delays in every lane, in an order."""
    delay: Callable | None = (lambda lane: random_delays(hash(lane) + world.rank, delays)) if delays else None
    pipeline = make_pipeline(
        llama(torch.float64, dropout=dropout),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=torch.float64,
        world=world,
        strict=True,
        delay=delay,
        **knobs,
    )
    if reorder:
        pipeline.reorder(rows, Order.parse(reorder))
    losses = [result.loss for result in [pipeline.step(batch) for batch in batches(rows, 2)]]
    pipeline.drain()
    weights = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    pipeline.close()
    return losses, weights


def rounded(world: World, *, knobs: dict[str, Any]) -> tuple[float, list[float]]:
    """A first step with messages in 8 bits beside one with full ones: the ratio of the gradients' norms, and for every
    parameter the relative difference of its gradient (rank 0).
    """
    norms, gradients = [], []
    for chosen in ({"strategy": knobs["strategy"]}, knobs):
        pipeline = make_pipeline(
            llama(torch.float64), dtype=torch.float64, world=world, strict=True, clip_norm=None, **chosen
        )
        norms.append(pipeline.step(batches(7)[0]).grad_norm)
        pipeline.drain()
        found = {name: pipeline.gradient(name) for name in pipeline.parameter_names}
        gradients.append({name: gradient for name, gradient in found.items() if gradient is not None})
        pipeline.close()
    return norms[1] / norms[0], [relative(gradients[1][name], gradient) for name, gradient in gradients[0].items()]


def offloaded(world: World, *, slow: str) -> tuple[int, int, int, int]:
    """The most boundary activations that a rank has on its device in a step with the inputs of all layers offloaded,
    while one lane is slow; the most that the schedule says; and the places for what waits and comes back, likewise.
    """
    pipeline = make_pipeline(
        llama(torch.float64),
        dtype=torch.float64,
        world=world,
        offloaded_layers=LAYERS,
        delay=lambda lane: lambda: 0.02 if lane == slow else 0.0,
    )
    compute: Any = pipeline.executor.compute
    most = 0

    class Watched(dict):
        def __setitem__(self, key: Buffer, value: Any) -> None:
            nonlocal most
            super().__setitem__(key, value)
            most = max(most, sum(buffer.kind is Kind.INPUT for buffer in list(self)))

    compute.held = Activations(Watched)
    made = moves.place

    def found(blocks: Any, target: Buffer, *of: Any, **how: Any) -> Tensor:
        assert any(target == known for known, *_ in compute.growing_buffers), "a place is made in the middle of a step"
        return made(blocks, target, *of, **how)

    begin = pipeline.executor.play

    def play(*of: Any, **how: Any) -> Any:
        moves.place = found
        return begin(*of, **how)

    pipeline.executor.play = play  # type: ignore[method-assign]
    pipeline.step(batches(4 * world.size)[0])
    pipeline.drain()
    moves.place = made
    schedule = pipeline.schedule(4 * world.size)
    said = peak_activations(schedule, world.rank, {Kind.INPUT: 1})
    places = len(compute.growing_buffers), peak_activations(schedule, world.rank, {Kind.OFFLOADED: 1, Kind.RELOADED: 1})
    pipeline.close()
    return most, said, *places


def scratch(world: World) -> tuple[int, int]:
    """Bytes of messages in 8 bits that a rank holds after a step, and that the schedule says it needs."""
    model = llama(torch.float32)
    pipeline = make_pipeline(model, world=world, strict=True, weights_compression="int8", gradients_compression="fp8")
    pipeline.step(batches(7)[0])
    pipeline.drain()
    held = sum(room.nbytes for room in pipeline.transport._scratch.values())
    said = scratch_bytes(pipeline.schedule(7), world.rank)
    pipeline.close()
    return held, said


def probed(world: World) -> Any:
    """What the probe of links finds."""
    found = probe(world)
    return found.machine, found.rates, found.findings, found.loopback


def rank_without_rows(world: World) -> float:
    """A batch smaller than the world."""
    return _exact(world, dtype="float64", tied=False, rows=1, strategy="tawpipe-spread")


def batches_that_differ(world: World) -> list[str]:
    """What this rank is told by a step and by an evaluation whose batches are not those of the other ranks."""
    import pytest

    pipeline = make_pipeline(llama(torch.float64), dtype=torch.float64, world=world, strict=True)
    before = pipeline.parameter(pipeline.parameter_names[0])
    batch = {name: tensor.roll(world.rank, 0) for name, tensor in batches(7)[0].items()}
    with pytest.raises(UserError) as stepped:
        print(pipeline.step(batch).loss)
    with pytest.raises(UserError):
        pipeline.drain()
    after = pipeline.parameter(pipeline.parameter_names[0])
    assert before is None or (after is not None and torch.equal(before, after))
    with pytest.raises(UserError) as evaluated:
        pipeline.evaluate(batch)
    for sizes in ((2, 3), (3, 2)):  # of which every rank has met both, and agreed on none
        with pytest.raises(
            UserError, match=rf"different sizes on different ranks: {sizes[0]}, {sizes[1]} micro-batches"
        ):
            pipeline.step({name: tensor[: sizes[world.rank]] for name, tensor in batch.items()})
    pipeline.close()
    return [str(stepped.value), str(evaluated.value)]


def packed_rows(world: World) -> list[int]:
    """The rows of a batch that this rank's shares name, and that its micro-batches really hold."""
    deal, batch = Deal(micro_batch=2, rank=world.rank, world_size=world.size), batches(7)[0]
    shares, local = deal.shares(7), deal.local(batch)
    for share, own in zip(shares, local.micro_batches, strict=True):
        assert torch.equal(own.input_ids, batch["input_ids"][share.rows.start : share.rows.stop])
    return [row for share in shares for row in share.rows]


PACKED = ((5, 9, 2), (16,), (3, 12, 1), (8, 8), (7, 9))
"""Documents in rows."""


def families(
    world: World, *, names: list[str], tied: bool, rows: tuple[tuple[int, ...], ...] = PACKED, **knobs: Any
) -> dict[str, float]:
    """Packed documents of every family through the runtime: the worst relative difference of a loss or gradient."""
    import pytest

    import model_families
    from model_families import family_config, keep_fp64, packed_batch, plain_loss_and_gradients, real_model

    with pytest.MonkeyPatch.context() as patch:  # what runs later in this process minds
        keep_fp64(patch)
        worst = {}
        parts = [packed_batch((row,), seed=i) for i, row in enumerate(rows)]
        for name in names:
            config = family_config(name, tied=tied)
            pipeline = make_pipeline(
                real_model(config),
                optimizer=adamw(0.0),
                dtype=torch.float64,
                world=world,
                strict=True,
                clip_norm=None,
                loss_chunk_tokens=6,
                **{"strategy": "tawpipe-striped", **knobs},
            )
            mine = [parts[share.index] for share in pipeline.shares(len(parts))]
            result = pipeline.step(LocalBatch(len(parts), max(map(sum, rows)), mine))
            pipeline.drain()
            found = {n: pipeline.gradient(n) for n in pipeline.parameter_names}
            difference = 0.0
            if world.rank == 0:
                plain = model_families.real_model(family_config(name, tied=tied))
                tokens = sum(part.tokens for part in parts)
                losses, gradients = [], {}
                for part in parts:
                    loss, some = plain_loss_and_gradients(plain, part)
                    losses.append(float(loss))
                    for key, gradient in some.items():
                        gradients[key] = gradients.get(key, 0) + gradient / tokens
                difference = abs(result.loss - sum(losses) / tokens)
                for key, gradient in gradients.items():
                    mine_too = found[key]
                    assert mine_too is not None
                    if gradient.norm() > 0:
                        difference = max(difference, relative(mine_too, gradient))
            worst[name] = difference
            pipeline.close()
    return worst


def from_bits(form: str, values: Tensor) -> Tensor:
    """What is left of a matrix in ``nf4`` or ``int8``, element by element as the papers say it."""
    exact = torch.empty(values.shape).copy_(values.detach())  # fp32, also where tests keep ``to`` from narrowing
    blocks = F.pad(exact.flatten(), (0, -values.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    if form == "nf4":
        table = torch.tensor(NF4)
        near = table[((blocks / largest)[..., None] - table).abs().argmin(-1)]
        found = near * largest
    else:
        found = (blocks / (largest / 127)).round() * (largest / 127)
    return found.flatten()[: values.numel()].view(values.shape).to(values)


def lora(
    world: World,
    *,
    quantize: str = "none",
    dtype: str = "float64",
    steps: int = 2,
    delays: float = 0.0,
    layers: list[int] | None = None,
    experts: bool = False,
    **knobs: Any,
) -> tuple[float, list[str], list[float]]:
    """A frozen model with adapters, on all layers or some: the difference to a plain loop, what changed, all losses.

    Args:
        experts: a mixture, with adapters on its experts, too.
    """
    from peft import LoraConfig, get_peft_model

    kind = getattr(torch, dtype)

    def make() -> Any:
        model = mixture(kind) if experts else llama(kind)
        torch.manual_seed(11)
        targets: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": layers}
        targets |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if experts else {}
        return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **targets)).to(kind)

    plain = make()
    if quantize != "none":
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                matrix = parameter.ndim == 3 or (parameter.ndim == 2 and "router" not in name and "bias" not in name)
                if ".layers." in name and not parameter.requires_grad and matrix:
                    parameter.copy_(from_bits(quantize, parameter))
    before = {n: p.detach().clone() for n, p in plain.get_base_model().named_parameters()}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
    pipeline = make_pipeline(
        make(),
        optimizer=adamw(1e-3, betas=(0.9, 0.999)),
        dtype=kind,
        quantize=quantize,
        world=world,
        strict=True,
        delay=(lambda lane: random_delays(hash(lane) + world.rank, delays)) if delays else None,
        **knobs,
    )
    worst, losses = 0.0, []
    for batch in batches(6, steps):
        logits = plain(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(pipeline.step(batch).loss)
        worst = max(worst, abs(losses[-1] / loss.item() - 1))
    worst = max(worst, abs(pipeline.evaluate(batches(6, 1)[0]).loss / _loss_of(plain, batches(6, 1)[0]) - 1))
    changed = []
    expected = dict(plain.get_base_model().named_parameters())
    pipeline.check_copies()
    for name in pipeline.parameter_names:
        value = pipeline.parameter(name)
        if value is not None:
            worst = max(worst, relative(value, expected[name].detach()))
            if not torch.equal(value, before[name]):
                changed.append(name)
    with tempfile.TemporaryDirectory() as folder:
        pipeline.export(f"{folder}/merged", dtype=kind, merge=True)
        if world.rank == 0:
            merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=kind)
            for name, value in plain.merge_and_unload().named_parameters():
                worst = max(worst, relative(merged.get_parameter(name), value))
    pipeline.close()
    return worst, changed, losses


@torch.no_grad()
def _loss_of(model: Any, batch: Mapping[str, Tensor]) -> float:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100).item()


def groups_of_lanes(world: World) -> bool:
    """Whether every lane talks over groups of its own, each of which has carried something before any step."""
    used: list[Any] = []
    real = torch.distributed.all_reduce

    def noted(values: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        used.append(group)
        return real(values, *args, group=group, **kwargs)

    torch.distributed.all_reduce = noted
    try:
        pipeline = make_pipeline(llama(torch.float32), world=world)
        found = list(pipeline.transport._groups.values())
    finally:
        torch.distributed.all_reduce = real
    pipeline.close()
    return len({id(group) for group in found}) == len(found) > 3 and all(group in used for group in found)


def begun_ahead(world: World, *, slow: str, **knobs: Any) -> int:
    """Actions of a slow lane that had begun at one time, at most, in two steps."""
    pipeline = make_pipeline(
        llama(torch.float32), world=world, delay=lambda lane: lambda: 0.01 if lane == slow else 0.0, **knobs
    )
    ahead, most = pipeline.transport.early_transfers, 0
    assert ahead is not None
    begin = ahead.begin

    def noted(action: Any, buffers: Any) -> None:
        nonlocal most
        begin(action, buffers)
        most = max(most, len(ahead._begun[action.lane]) if action.lane.value == slow else 0)

    ahead.begin = noted  # type: ignore[method-assign]
    for batch in batches(8, steps=2):
        pipeline.step(batch)
    pipeline.close()
    return most


def weights_read_together(world: World, *, folder: str) -> bool:
    """Whether the ranks read their units at the same time: none has read its first one before all have begun."""
    folder_of_flags = Path(folder)

    class Slow(InitSource):
        def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
            (folder_of_flags / f"rank-{world.rank}").touch()
            all_have_begun = lambda: len(list(folder_of_flags.iterdir())) == world.size  # noqa: E731
            assert wait_for(all_have_begun), "the other ranks wait for this one"
            return super().unit(unit, dtype=dtype)

    make_pipeline(llama(torch.float32), world=world, weights=lambda chain: Slow(chain, 0)).close()
    return True


def not_finite(world: World, *, folder: str) -> tuple[str, bool, bool]:
    """A loss that is not finite: what is raised, whether every weight is as before, and whether training goes on from a
    state that is loaded then.
    """
    poisoned = [False]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total * float("inf") if poisoned[0] else total

    pipeline = make_pipeline(llama(torch.float32), optimizer=adamw(1e-2), world=world, loss=loss)
    batch = batches(5, 1)[0]
    pipeline.step(batch)
    pipeline.drain()
    before = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    pipeline.save(folder)
    poisoned[0] = world.rank == 0  # one rank's bad number is everyone's
    assert not pipeline.step(batch).finite
    poisoned[0] = False
    assert not pipeline.step(batch).finite  # changes nothing either, and says so
    try:
        pipeline.drain()
        message = "nothing was raised"
    except RunError as error:
        message = str(error)
    same = _same_weights(pipeline, before)
    pipeline.load(folder)
    goes_on = pipeline.step(batch).finite
    pipeline.drain()
    changed = not _same_weights(pipeline, before)  # all ranks ask, rank 0 sees
    goes_on = goes_on and (changed or world.rank > 0)
    pipeline.close()
    return message, same, goes_on


def _same_weights(pipeline: Pipeline, before: Mapping[str, Tensor | None]) -> bool:
    """Whether the weights are those of ``before``, which are None on ranks other than 0."""
    now = {name: pipeline.parameter(name) for name in before}
    pairs = zip(before.values(), now.values(), strict=True)
    return all(old is None or (new is not None and torch.equal(old, new)) for old, new in pairs)


def mismatched(world: World) -> str:
    """Two ranks whose schedules disagree about what comes next, in strict mode: what rank 0 is told."""
    pipeline = make_pipeline(llama(torch.float32), world=world, strict=True, timeout=timedelta(seconds=20))
    schedule = pipeline.schedule(4)
    if world.rank == 1:
        program = list(schedule.programs[1])
        a, b = [i for i, action in enumerate(program) if action.lane is Lane.INTER_W][:2]
        program[a], program[b] = program[b], program[a]
        programs = (schedule.programs[0], tuple(program), *schedule.programs[2:])
        pipeline._schedules._kept[4, True] = replace(schedule, programs=programs)
    try:
        pipeline.step(batches(4, 1)[0])
        pipeline.drain()
    except TransportError as error:
        return str(error)
    except Exception as error:
        return f"other: {error}"
    return "nothing"


def low_precision(world: World) -> list[float]:
    """Losses of bf16 compute with fp32 masters, on one batch again and again."""
    model = llama(torch.float32, layers=2)
    pipeline = make_pipeline(model, optimizer=adamw(3e-3), dtype=torch.bfloat16, world=world, strict=True)
    batch = batches(6, 1)[0]
    losses = [result.loss for result in [pipeline.step(batch) for _ in range(12)]]
    pipeline.close()
    return losses


def memory_of_steps(world: World, *, steps: int) -> list[int]:
    """Bytes that tensors hold after each step, nothing under way."""
    import gc

    pipeline = make_pipeline(llama(torch.float32, layers=3), world=world)
    batch, sizes = batches(6, 1)[0], []
    for _ in range(steps):
        pipeline.step(batch)
        pipeline.drain()
        gc.collect()
        stores = (t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))
        sizes.append(sum({store.data_ptr(): store.nbytes() for store in stores}.values()))
    pipeline.close()
    return sizes


def failing_compute(world: World, *, folder: str) -> str:
    """A loss that raises on one rank in the middle of a step: the error there, which comes out while the others, whose
    lanes still hold the connections, wait for it.
    """
    out = Path(folder) / "out"

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if world.rank == 1:
            raise RuntimeError("the user's loss is broken")
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

    pipeline = make_pipeline(llama(torch.float32), world=world, loss=loss, timeout=timedelta(seconds=60))
    try:
        pipeline.step(batches(8, 1)[0])
        if world.rank == 1:
            pipeline.drain()
            return "nothing"
        return "waited until it was out" if wait_for(out.exists, 30) else "it did not come out"
    except RuntimeError as error:
        if world.rank == 1:
            out.touch()
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
