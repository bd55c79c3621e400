"""Check of the user's model before the first step: its first layers run as a pipeline and as the plain model.

``model.discovery`` derives only the structure of a model from its forward pass. This check compares numbers: do the
blocks, run one by one on packed rows, compute what the model computes on every document alone? A copy of the model with
its first layers takes one short step both ways in one process. The hidden states after every block, the loss and all
gradients are compared.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.chain import Chain, inner_model
from tawpipe.model.cut import plan_cut, small_copy
from tawpipe.model.fused.operations import EAGER, STAND_IN
from tawpipe.model.loss import Loss, sum_of_loss
from tawpipe.model.refuse import NOT_CAUSAL, unsupported
from tawpipe.model.stubs import HIDDEN, taken_by
from tawpipe.model.tested import TESTED_FAMILIES, TESTED_TRANSFORMERS
from tawpipe.model.weights import WeightSource
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.setup import CheckSettings, TrainingSettings
from tawpipe.runtime.compute.randomness import OwnGenerator
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.world import World
from tawpipe.schedule.pipelines.dealing import LONG
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology

logger = logging.getLogger(__name__)

DOCUMENTS = (9, 14)
"""Tokens of each document of the step."""
CHUNK = 5
"""Tokens of a chunk if rows run in chunks. Chunk borders fall inside of both documents."""
WIDE_PARAMETERS = 100_000_000
"""Largest number of parameters of a copy that computes in fp64; larger copies compute in fp32."""
MOST_PARAMETERS = 4_000_000_000

Run = Callable[[nn.Module, MicroBatch, torch.dtype], "tuple[float, dict[str, Tensor], list[Tensor]]"]
"""One step of a copy as a pipeline in this process. Returns the mean loss, the gradients of all trainable parameters,
and the hidden states (b, S, ...) before the first layer and after every layer."""


def is_tested(model: nn.Module, loss: Loss | None) -> bool:
    """Return True if the project's tests cover ``model``: its family, built by the tested version of transformers.

    Returns False if the model has adapters, changed methods or hooks, or if ``loss`` is given.
    """
    import transformers

    if (
        loss is not None
        or hasattr(model, "peft_config")
        or not type(model).__module__.startswith("transformers.models.")
    ):
        return False
    if not transformers.__version__.startswith(TESTED_TRANSFORMERS + "."):
        return False
    for module in model.modules():
        kinds = type(module).__module__, getattr(type(module).forward, "__module__", "")
        if not all(kind.startswith(("transformers.", "torch.")) for kind in kinds):
            return False
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if "forward" in module.__dict__ or hooks or module._backward_pre_hooks:
            return False
    return getattr(model.config, "model_type", None) in TESTED_FAMILIES


def check_model(chain: Chain, source: WeightSource, *, loss: Loss | None, run: Run) -> str:
    """Compare one step of a small copy of ``chain``'s model as a pipeline with the plain model's forward and backward.

    Call before ``Chain.prepare``.

    Args:
        chain: the model.
        source: initial values of its parameters.
        loss: loss of the user, or None for the model's own.
        run: runs one step of the copy as a pipeline.

    Returns:
        A sentence with what was compared and the largest difference, or with the reason why no check was possible.

    Raises:
        UserError: numbers differ (the message names the block and the quantity), no trained parameter has a gradient,
            or a token sees later tokens.
    """
    begin = time.perf_counter()
    name = chain.name
    cut = plan_cut(chain)
    if cut.parameters > MOST_PARAMETERS:
        return f"{name} was not checked: {cut.layers} of its layers have {cut.parameters / 1e9:.1f} billion parameters"
    dtype = torch.float64 if cut.parameters <= WIDE_PARAMETERS else torch.float32
    limit = 2e-5 if dtype == torch.float64 else 2e-3
    batch = _batch(cut.tokens, besides=_trained_tokens(chain.model))
    try:
        copy = small_copy(chain, source, cut, dtype)
        alone = deepcopy(copy)
        with _quiet(), OwnGenerator(torch.Generator().manual_seed(0)) as random:
            plain = _by_itself(alone, chain, batch, loss)
    except Exception as error:  # for example a kernel that needs a GPU
        return f"{name} was not checked: run by itself it fails with {type(error).__name__} ({error})"
    if random.drew:
        return f"{name} was not checked: it draws random numbers that no setting switches off"
    blind = _refuse_future(name, alone, batch, limit)
    with _quiet():
        loss_value, gradients, hidden = run(copy, batch, dtype)
        ours = loss_value, gradients, [torch.cat(_documents(states, batch))[None] for states in hidden]
    largest = _compare(name, plain, ours, limit)
    return (
        f"{name}: {cut.layers} of {len(chain.layers)} layers checked against the model's own forward pass, largest "
        f"difference {largest:.0e} in {str(dtype).removeprefix('torch.')} ({time.perf_counter() - begin:.1f} s){blind}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a context that hides warnings of ``tawpipe``; a copy in another dtype would repeat them."""
    top = logging.getLogger("tawpipe")
    level = top.level
    top.setLevel(logging.ERROR)
    try:
        yield
    finally:
        top.setLevel(level)


def _trained_tokens(model: nn.Module) -> list[int]:
    """Return the token ids whose embeddings ``peft`` trains separately, sorted.

    Only these embeddings have a gradient, and only where their tokens occur.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "trainable_tokens_delta")]
    return sorted({int(token) for layer in layers for tokens in layer.token_indices.values() for token in tokens})


def _batch(vocabulary: int, *, besides: Sequence[int] = ()) -> MicroBatch:
    """Build one row of documents of random tokens, with lengths ``DOCUMENTS``; 20 % of tokens have no label.

    Every call with equal arguments gives equal tokens.

    Args:
        vocabulary: token ids are below this number.
        besides: token ids to place at the beginning of the row, as far as they are in the vocabulary.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (1, sum(DOCUMENTS)), generator=generator)
    some = [token for token in besides if token < vocabulary][: DOCUMENTS[0] - 1]
    ids[0, : len(some)] = torch.tensor(some, dtype=ids.dtype)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, IGNORE)
    return MicroBatch.of_documents(ids, labels, DOCUMENTS)


def _documents(tensor: Tensor, batch: MicroBatch) -> list[Tensor]:
    """Split a tensor ``(b, S, ...)`` into one tensor ``(tokens, ...)`` per document of ``batch``."""
    return list(tensor.flatten(0, 1).split(batch.lengths))


def run_watched(chain: Chain, length: int, step: Callable[[], None]) -> list[Tensor]:
    """Run ``step`` and return the hidden states before the first layer and after every layer.

    Replaces ``chain.layer`` by a function that records them.

    Args:
        chain: the model, whose layers the step runs.
        length: tokens of a row; chunks of a row are joined, and recomputed values are dropped.
        step: runs one step.
    """
    places: dict[int, list[Tensor]] = {}
    layer = chain.layer

    def keep(place: int, value: Tensor) -> None:
        """Append a copy of ``value`` to the hidden states at ``place`` unless a whole row is recorded."""
        parts = places.setdefault(place, [])
        if sum(part.shape[1] for part in parts) < length:  # chunks arrive in order; later calls are recomputations
            parts.append(value.detach().clone())

    def watched(block: int, hidden: Tensor, calls: Any, piece: Any = None) -> Tensor:
        """Run the layer ``block`` and record its output, and for the first layer also its input."""
        output = layer(block, hidden, calls, piece)
        if block == 1:
            keep(0, hidden)
        keep(block, output)
        return output

    chain.layer = watched  # type: ignore[method-assign]
    step()
    return [torch.cat(places[place], dim=1) for place in sorted(places)]


def _by_itself(
    outer_model: nn.Module, chain: Chain, batch: MicroBatch, loss: Loss | None
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Run the plain model forward and backward on every document alone, as without this library.

    Returns the mean loss, the gradients of trainable parameters by name, and the hidden states before the first layer
    and after every layer.
    """
    model = inner_model(outer_model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped matrix products do not support fp64
    # sdpa ignores soft caps of logits; transformers 5.17 uses sdpa nevertheless.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if chain.own_attention == "sdpa" and not capped else "eager")
    layers: list[nn.Module] = list(model.get_submodule(chain.path))
    before: list[Tensor] = []
    after: list[Tensor] = []
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: before.append((args[0] if args else kwargs[HIDDEN]).detach().clone()), with_kwargs=True
    )
    for layer in dict.fromkeys(layers):
        layer.register_forward_hook(
            lambda _, __, output: after.append(
                (output[0] if isinstance(output, tuple | list) else output).detach().clone()
            )
        )
    outer_model.train()
    total, tokens = 0.0, batch.tokens
    ids, labels = _documents(batch.input_ids, batch), _documents(batch.labels, batch)
    for document, targets in zip(ids, labels, strict=True):
        # Undo the shift of labels: the model shifts them itself.
        unshifted = torch.cat([torch.tensor([IGNORE]), targets[:-1]])[None]
        count = int((targets != IGNORE).sum())
        arguments = {"input_ids": document[None].clone(), "labels": unshifted, "use_cache": False}
        output = outer_model(**taken_by(model, arguments, alone=True))
        value = output.loss * count if loss is None else sum_of_loss(loss, output.logits, targets[None])
        (value / tokens).backward()
        total += float(value.detach()) / tokens
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    count = len(layers)
    befores = before[:: len(before) // len(ids)]  # a layer used several times fires its pre-hook at each use
    calls = [after[place::count] for place in range(count)]
    return total, gradients, [torch.cat(parts, dim=1) for parts in (befores, *calls)]


def _compare(name: str, plain: Any, ours: Any, limit: float) -> float:
    """Return the largest relative difference of hidden states, loss and gradients; raise UserError above ``limit``.

    Args:
        name: name of the model, for messages.
        plain: loss, gradients and hidden states of the plain model.
        ours: loss, gradients and hidden states of the pipeline.
        limit: largest difference that is accepted.

    Raises:
        UserError: a difference exceeds ``limit``, the first one in the order of computation; or no trained parameter
            has a gradient.
    """
    largest = 0.0
    scale = max((float(g.norm()) for g in plain[1].values()), default=0.0)
    if plain[1] and not scale:
        raise UserError(
            "check",
            f"{name}, where no trained parameter has a gradient, for example {next(iter(plain[1]))}",
            "a model whose loss depends on its trained parameters (check: never skips this check)",
        )

    def quantities() -> Iterator[tuple[str, str, float]]:
        """Yield place, quantity and relative difference, in the order of computation."""
        for index, (expected, value) in enumerate(zip(plain[2], ours[2], strict=True)):
            where = "the embedding side" if index == 0 else f"layer {index - 1}"
            yield where, "hidden states", float((value - expected).norm() / expected.norm())
        yield "the head and its loss", f"loss {ours[0]:.6g} instead of {plain[0]:.6g}", abs(ours[0] / plain[0] - 1)
        for key in reversed(plain[1]):
            expected, value = plain[1][key], ours[1][key]
            error = float((value - expected).norm()) / max(float(expected.norm()), 1e-3 * scale)
            yield key, "gradient", error

    for where, what, error in quantities():
        if not error <= limit:
            raise UserError(
                "check",
                f"{where} of {name}: {what}, off by {error:.1e}",
                (
                    f"the numbers of the model's own forward pass, within {limit:.0e}. Run block by block on "
                    "packed documents this model computes something else, so it cannot be trained here (check: "
                    "never skips this check)"
                ),
            )
        largest = max(largest, error)
    return largest


def _refuse_future(name: str, outer_model: nn.Module, batch: MicroBatch, limit: float) -> str:
    """Raise UserError if later tokens change earlier logits; return a remark if this cannot be tested, else ``""``."""
    try:
        with _quiet(), OwnGenerator(torch.Generator().manual_seed(0)):
            change = change_by_future(outer_model, batch)
    except Exception as error:  # some models return no logits without labels
        return f"; whether later tokens change logits was not checked: {type(error).__name__} ({error})"
    if change > limit:
        raise UserError(
            "check",
            f"{name}, where later tokens change the logits of earlier ones by {change:.1e}",
            f"{NOT_CAUSAL} (check: never skips this check)",
        )
    return ""


@torch.no_grad()
def change_by_future(outer_model: nn.Module, batch: MicroBatch) -> float:
    """Return the relative change of a document's first-half logits when the tokens of its second half are replaced.

    Returns 0 if equal tokens give different logits (the test is then impossible), or if the first half has only special
    tokens.
    """
    model = inner_model(outer_model.eval())
    ids = _documents(batch.input_ids, batch)[-1][None]
    half, special = ids.shape[1] // 2, _special_tokens(model.config)
    ordinary = [token for token in ids[0, :half].tolist() if token not in special]
    if not ordinary:
        return 0.0
    others = torch.tensor(ordinary)[torch.arange(half, ids.shape[1]) % len(ordinary)]
    rows = ids, torch.cat([ids[:, :half], others[None]], dim=1), ids
    before, after, again = (
        outer_model(**taken_by(model, {"input_ids": row.clone(), "use_cache": False}, alone=True)).logits[0, :half]
        for row in rows
    )
    return float((after - before).norm() / before.norm()) if torch.equal(before, again) else 0.0


def _special_tokens(config: Any) -> set[int]:
    """Return the ids of all special tokens (``*_token_id``) in ``config`` and its sub-configs."""
    owners = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    values = [value for owner in owners if owner for key, value in vars(owner).items() if "_token_i" in key]
    return {token for value in values for token in (value if isinstance(value, list) else [value])}


def check_on_rank_0(
    pipeline: Callable[..., Any],
    chain: Chain,
    source: WeightSource,
    world: World,
    *,
    loss: Loss | None,
    in_chunks: bool = False,
) -> str:
    """Run ``check_model`` on rank 0 with a pipeline of one process; return its sentence on all ranks.

    Rank 0 logs a warning if the check was not possible.

    Args:
        pipeline: the class ``Pipeline``.
        chain: the model.
        source: initial values of its parameters.
        world: all processes.
        loss: loss of the user, or None for the model's own.
        in_chunks: run rows in chunks, whose borders are inside of documents.

    Raises:
        UserError: the model computes other numbers as a pipeline; on all ranks.
    """

    def run(copy: nn.Module, batch: MicroBatch, dtype: torch.dtype) -> tuple[float, dict[str, Tensor], list[Tensor]]:
        """Take one step of ``copy`` as a pipeline; return loss, gradients and hidden states."""
        alone = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
        still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
        small = Chain(copy, loss=loss)
        # Fused kernels need a GPU; stand-ins show that they are in the right places.
        small.compute_by(EAGER if chain.operations is EAGER else STAND_IN)
        pipe = pipeline(
            small,
            optimizer=still,
            dtype=dtype,
            micro_batch=batch.input_ids.shape[0],
            world=alone,
            schedule=ScheduleSettings(sequence_chunk=CHUNK if in_chunks else 0),
            training=TrainingSettings(clip_norm=None),
            checks=CheckSettings(check="never"),
        )
        if pipe.chain.in_turn and not chain.in_turn:
            pipe.close()
            raise unsupported(chain.name, f"{pipe.chain.in_turn}, as its values show; take them from position_ids")
        steps: list[StepResult] = []

        def step() -> None:
            rows, length = batch.input_ids.shape
            steps.append(pipe.step(LocalBatch(rows, length, [batch])))
            pipe.drain()

        hidden = run_watched(pipe.chain, batch.input_ids.shape[1], step)
        trainable = [slot.name for unit in pipe.chain.units if unit.trainable for slot in unit.slots]
        gradients = {name: value for name in trainable if (value := pipe.gradient(name)) is not None}
        pipe.close()
        return steps[0].loss, gradients, hidden

    def check() -> str:
        """Return the sentence of ``check_model``, or a sentence with the error (except UserError) that prevented it."""
        try:
            return check_model(chain, source, loss=loss, run=run)
        except UserError:
            raise
        except Exception as error:
            return f"{chain.name} was not checked: {type(error).__name__} ({error})"

    checked = world.text_of_rank_0(check)
    if world.rank == 0 and "not checked" in checked:
        logger.warning("%s", checked)
    return checked


def slices_of_documents(
    pipeline: Callable[..., Any], chain: Chain, source: WeightSource, world: World, *, loss: Loss | None, check: str
) -> tuple[float | None, str]:
    """Decide whether documents may be cut into slices that pass a pipeline one after another.

    Returns:
        A limit and the sentence of ``check_on_rank_0`` (``""`` without a check). A document that fits into a packed
        micro-batch is cut only if it takes longer than this multiple of the mean packed micro-batch. The limit is None
        if documents must stay whole. It is infinite, so that only documents that do not fit are cut, if no check was
        made or possible; a model that needs documents whole is then refused later.
    """
    if chain.why_not_chunks or chain.positions.first:
        return None, ""
    if check == "never":
        return math.inf, ""
    try:
        checked = check_on_rank_0(pipeline, chain, source, world, loss=loss, in_chunks=True)
    except UserError as error:
        if world.rank == 0:
            logger.warning("documents pass the pipeline whole: %s", error)
        return None, ""
    return math.inf if "not checked" in checked else LONG, checked
