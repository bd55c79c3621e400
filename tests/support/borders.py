"""Made-up models for the border to the user's code, and the plain numbers that a pipeline gives or refuses to give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OPTConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from model_families import VOCABULARY, family_config, real_model
from pipelines import make_pipeline
from tawpipe.errors import UserError
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.world import World

ROWS, LENGTH = 3, 16
WAYS = ["full", "selective", "none"]
RECOMPUTE = ["full", *(pytest.param(one, marks=pytest.mark.slow) for one in ("selective", "none"))]
"""What layers keep; `make test` leaves out the slowest."""
Make = Callable[[], Any]
"""Makes a model with values, the same each time."""
Span = tuple[int, int, int]
"""A document: its row, its first token there, and the token behind its last."""


# batches


def rows_of(seed: int = 3, *, low: int = 3, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of one document each; of some, the first labels do not count, so that a chunk has none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(1, rows):
        labels[row, : 5 * row % length] = -100
    return {"input_ids": ids, "labels": labels}


def packed(firsts: Sequence[int], lengths: Sequence[Sequence[int]], seed: int = 3) -> tuple[dict[str, Tensor], Any]:
    """Rows of several documents whose positions count from ``firsts`` on, and where they are."""
    batch = rows_of(seed, rows=len(lengths), length=sum(lengths[0]))
    first = iter(list(firsts) * sum(map(len, lengths)))
    positions = [torch.cat([torch.arange(n) + next(first) for n in row]) for row in lengths]
    return batch | {"position_ids": torch.stack(positions)}, spans_of(lengths)


def spans_of(lengths: Sequence[Sequence[int]]) -> list[Span]:
    return [(row, sum(own[:i]), sum(own[: i + 1])) for row, own in enumerate(lengths) for i in range(len(own))]


# numbers


@dataclass(frozen=True)
class Numbers:
    """Of one step of SGD at rate 1: the loss per token, and what every parameter lost (its gradient, as a rule)."""

    loss: float
    change: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def slow(lane: str) -> Callable[[], float]:
    """A pause before every action, in which the caller's thread goes on."""
    return lambda: 0.001


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def plain_numbers(
    make: Make, batch: Mapping[str, Tensor], documents: Sequence[Span] | None = None, loss: Any = token_sum
) -> Numbers:
    """The model's own forward pass on each document alone, one after another, and one step."""
    model = base_of(make()).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows, length = batch["input_ids"].shape
    total, tokens = 0.0, 0
    for row, first, last in documents or [(row, 0, length) for row in range(rows)]:
        targets = F.pad(batch["labels"][row : row + 1, first + 1 : last], (0, 1), value=-100)
        if (targets == -100).all():
            continue
        tokens += int((targets != -100).sum())
        positions = (
            {"position_ids": batch["position_ids"][row : row + 1, first:last]} if "position_ids" in batch else {}
        )
        ids = batch["input_ids"][row : row + 1, first:last].clone().long()
        # A mask that hides nothing keeps the model from looking for documents in the positions.
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **positions).logits
        value = loss(logits, targets.long())
        value.backward()
        total += float(value.detach())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad.to_dense() / tokens
    return Numbers(total / tokens, {name: before[name] - p.detach() for name, p in model.named_parameters()})


def piped(make: Make | Any, **knobs: Any) -> Pipeline:
    """A pipeline in one process whose updates show the gradients."""
    knobs = {"dtype": torch.float64, "clip_norm": None, "optimizer": sgd, "loss_chunk_tokens": 6} | knobs
    model: Any = make() if callable(make) and not isinstance(make, nn.Module) else make
    return make_pipeline(model, **knobs)


def weights(pipeline: Pipeline) -> dict[str, Tensor]:
    """All parameters, with nothing under way; on rank 0."""
    pipeline.drain()
    found = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    return {name: value.clone() for name, value in found.items() if value is not None}


def piped_numbers(
    make: Make,
    batch: Mapping[str, Tensor] | LocalBatch,
    *,
    after: Callable[[], object] = lambda: None,
    **knobs: Any,
) -> Numbers:
    """One step of a pipeline.

    Args:
        after: called between ``step`` and the first look at its result.
    """
    pipeline = piped(make, **knobs)
    try:
        before = weights(pipeline)
        result = pipeline.step(batch)
        after()
        loss = result.loss
        return Numbers(loss, {name: before[name] - value for name, value in weights(pipeline).items()})
    finally:
        with suppress(Exception):  # the first error is the one that tells
            pipeline.close()


def assert_same(mine: Numbers, expected: Numbers, limit: float = 1e-9, *, loss_limit: float | None = None) -> None:
    """Alike within ``limit``, relative to the norm of each tensor."""
    error = abs(mine.loss - expected.loss)
    assert error <= (loss_limit or limit) * abs(expected.loss), f"the loss is {mine.loss}, not {expected.loss}"
    assert mine.change.keys() == expected.change.keys()
    wrong = {}
    for name, change in expected.change.items():
        error = float((mine.change[name] - change).norm())
        if not error <= limit * float(change.norm()) + 1e-13:
            wrong[name] = error / max(float(change.norm()), 1e-13)
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{name} {error:.0e}" for name, error in worst)
    assert not wrong, f"{len(wrong)} of {len(expected.change)} changes are wrong (relative error of the worst: {said})"


def right_or_refused(
    make: Make,
    batch: Mapping[str, Tensor],
    *,
    refused: str | None = None,
    documents: Sequence[Span] | None = None,
    loss: Any = None,
    plain_loss: Any = None,
    limit: float = 1e-9,
    loss_limit: float | None = None,
    **knobs: Any,
) -> str:
    """Assert that a pipeline gives the plain numbers, or says why it does not.

    Args:
        refused: pattern, in any case, of the message of a ``UserError``; None where there is no reason for one.
        plain_loss: what the plain computation takes instead of ``loss``.
    """
    given = {name: tensor.clone() for name, tensor in batch.items()}  # whatever the pipeline does to its own
    try:
        mine = piped_numbers(make, batch, **knobs, **({"loss": loss} if loss else {}))
    except UserError as error:
        if refused is None:
            raise
        assert re.search(refused, str(error), re.IGNORECASE), f"refused, but without {refused!r}: {error}"
        return "refused"
    expected = plain_numbers(make, given, documents, plain_loss or loss or token_sum)
    assert_same(mine, expected, limit, loss_limit=loss_limit)
    return "right"


def nudged(make: Make, direction: Mapping[str, Tensor], by: float) -> Make:
    """The same model, somewhere else in the space of its parameters."""

    def made() -> Any:
        model = make()
        with torch.no_grad():
            for name, parameter in base_of(model).named_parameters():
                parameter += by * direction[name]
        return model

    return made


def slope_error(make: Make, batch: Mapping[str, Tensor], **knobs: Any) -> float:
    """How far the gradient of a first step is from the slope of its loss: nothing, if it belongs to that forward pass,
    whatever random numbers were drawn in it, because another pipeline of the same seed draws the same.
    """
    gradient = piped_numbers(make, batch, **knobs).change
    norm = float(torch.stack([g.norm() for g in gradient.values()]).norm())
    direction = {name: g / norm for name, g in gradient.items()}
    losses = [piped_numbers(nudged(make, direction, by), batch, **knobs).loss for by in (1e-5, -1e-5)]
    return abs((losses[0] - losses[1]) / 2e-5 / norm - 1)


# models


def llama(
    layer: Callable[[Any, Tensor, dict[str, Any]], Any] | None = None,
    body: type[LlamaModel] | None = None,
    prepare: Callable[[Any], object] = lambda model: None,
    **config: Any,
) -> Make:
    """A tiny Llama with other code in it.

    Args:
        layer: the forward pass of its layers, given the layer, the hidden states and what else it was called with.
        body: the class of what is inside the causal LM.
        prepare: is given the model.
    """

    def make() -> Any:
        model = real_model(family_config("llama", **config))
        if body is not None:
            model.model.__class__ = body
        if (run := layer) is not None:

            class Altered(LlamaDecoderLayer):
                def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
                    return run(self, hidden_states, kwargs)

            for each in model.model.layers:
                each.__class__ = Altered
        prepare(model)
        return model.double()

    return make


own = LlamaDecoderLayer.forward
"""What a layer does by itself."""


class Body(LlamaModel):
    """Llama's forward pass with places for more."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        embedded = self.before(embedded, input_ids)
        if position_ids is None:
            position_ids = torch.arange(embedded.shape[1], device=embedded.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        hidden = embedded
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, **self.besides(hidden, index))
            hidden = self.between(hidden, index)
        hidden = self.after(self.norm(hidden), embedded, position_ids)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)

    def before(self, embedded: Tensor, ids: Tensor | None) -> Tensor:
        return embedded

    def besides(self, hidden: Tensor, index: int) -> dict[str, Any]:
        return {}

    def between(self, hidden: Tensor, index: int) -> Tensor:
        return hidden

    def after(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        return hidden


def body(**parts: Any) -> type[LlamaModel]:
    """``Body`` with some of its places taken."""
    return type("Altered", (Body,), parts)


def add_to_layers(name: str, value: Callable[[], Any], *, buffer: bool = False) -> Callable[[Any], None]:
    """Something more in every layer."""

    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            layer.register_buffer(name, value()) if buffer else setattr(layer, name, value())

    return prepare


# cases of several processes


class WideNorm(nn.Module):
    """An embedding whose norm multiplies by a weight in fp32, whatever the dtype of the checkpoint."""

    def __init__(self, inner: nn.Embedding, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, inner.embedding_dim).to(inner.weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        wide = (lambda t: t.float()) if self.how == "float" else lambda t: t.to(torch.float32)
        hidden = self.inner(ids)
        normed = F.layer_norm(wide(hidden), hidden.shape[-1:], wide(self.gain))
        return normed.to(hidden.dtype)


def wide_norm(world: World, *, how: str) -> dict[str, float]:
    """A bf16 checkpoint with such a norm in an fp32 pipeline: relative errors of all gradients (rank 0)."""

    def make() -> Any:
        # Embedding, layers and head are of one size, so that they share buffers.
        model = real_model(family_config("llama", vocab_size=217), torch.bfloat16)
        model.model.embed_tokens = WideNorm(model.model.embed_tokens, how)
        return model

    batch = rows_of(rows=2 * world.size)
    pipeline = make_pipeline(make(), dtype=torch.float32, clip_norm=None, world=world, strict=True)
    pipeline.step(batch)
    pipeline.drain()
    found = {name: pipeline.gradient(name) for name in pipeline.parameter_names}
    pipeline.close()
    if world.rank:
        return {}
    expected = plain_numbers(lambda: make().float(), batch).change
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items() if g.any()}  # type: ignore


def head_gradient(world: World, *, dtype: str, chunk: int, reduce_dtype: str) -> Tensor | None:
    """The gradient of the head of one model, whose weights bf16 holds exactly; on rank 0."""
    model = llama()().to(torch.bfloat16).to(torch.float32)
    pipeline = piped(
        model, world=world, dtype=getattr(torch, dtype), loss_chunk_tokens=chunk, reduce_dtype=reduce_dtype
    )
    pipeline.step(rows_of(rows=2, length=512))
    gradient = pipeline.gradient("lm_head.weight")
    pipeline.close()
    return gradient


def different_batches(world: World) -> str:
    """What comes of a step for which every rank has rows of its own."""
    pipeline = make_pipeline(llama()(), dtype=torch.float64, world=world, strict=True)
    try:
        pipeline.step(rows_of(world.rank, rows=2))
        pipeline.drain()
    except UserError as error:
        return str(error)
    return "not refused"


def opt(**config: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 3, "dropout": 0.0}
    given = {"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1}
    return real_model(OPTConfig(**{**sizes, **given, **config}))


def slope_over_ranks(world: World, *, family: str, drops: dict[str, Any], **knobs: Any) -> float:
    """``slope_error`` of a family with dropout, on several ranks."""
    import torch.distributed as dist

    from model_families import keep_fp64

    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)
        make = lambda: real_model(family_config(family, **drops))  # noqa: E731
        gradient: list[Any] = [piped_numbers(make, rows_of(), world=world, **knobs).change]
        dist.broadcast_object_list(gradient)
        norm = float(torch.stack([g.norm() for g in gradient[0].values()]).norm())
        direction = {name: g / norm for name, g in gradient[0].items()}
        ahead, behind = (
            piped_numbers(nudged(make, direction, by), rows_of(), world=world, **knobs).loss for by in (1e-5, -1e-5)
        )
        return abs((ahead - behind) / 2e-5 / norm - 1)
