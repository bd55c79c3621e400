"""Every causal LM that transformers knows, tiny and random: one step through tawpipe against the plain model.

python tests/support/every_family.py                   # prints the outcome of every family
python tests/support/every_family.py FAMILY ...        # of some
python tests/support/every_family.py --write docs/models.md src/tawpipe/model/tested.py
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tawpipe
from family_configs import ORDINARY_TOKENS, REMARKS, families, tiny_config
from model_families import keep_fp64
from tawpipe.errors import UserError
from tawpipe.model.attention.indexers import freeze_indexers
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.stubs import taken_by
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.check import change_by_future
from tawpipe.pipeline.setup import refuse_cut_rows
from tawpipe.schedule.settings import ScheduleSettings

PACKED = ((11, 6, 7), (13, 11))
"""Lengths of the documents in the two rows of a step, each row a micro-batch."""
ALONE = ((24,), (24,))
"""The same without packing, for models that sample: a packed row draws its random numbers in another order."""
CHUNK = 12
"""Tokens of a chunk: documents cross its borders, and one begins a token before one."""
Rows = tuple[tuple[int, ...], ...]
TOLERANCE = 1e-9

REFUSALS = {
    r"called one after the other with hidden states only": "layers that are called several times or share results",
    r"config must say num_hidden_layers": "several stacks of layers",
    r"given a trainable tensor besides the hidden states": "layers that read the embedding once more (Zamba)",
    r"leaves a tensor in its attribute": "layers that keep their state from call to call (RecurrentGemma)",
    r"after its last layer the model reads": "heads that read what is from before the layers",
}
"""What a message of a refusal may say, and what is behind it."""
NOT_BUILT = {
    r"requires the timm library": "a vision tower of a package that is not installed",
    r"Multiple valid text configs": "transformers' from_config does not know which part is the language model",
    r"layer types producing a cache": "a draft model that only exists beside the model it drafts for",
}
"""Why transformers itself cannot build a family by ``AutoModelForCausalLM.from_config`` here."""


@dataclass(frozen=True)
class Runs:
    """How a family's steps run: what keeps documents apart, and why not in chunks, in sets, under pipelines; empty
    where they do.
    """

    apart: str
    chunks: str = ""
    sets: str = ""
    pipelines: str = ""

    @classmethod
    def of(cls, chain: Chain) -> Runs:
        chunks = why_not_cut(chain, ScheduleSettings(sequence_chunk=2))
        sets = why_not_cut(chain, ScheduleSettings(sequence_ranks=2))
        apart = "in turn" if chain.in_turn else "mixers" if chain.mixing else "attention"
        return cls(apart, chunks, sets, chain.why_not_staged)


@dataclass(frozen=True)
class Outcome:
    """How a family's step compares: ``equal``, ``refused``, ``wrong``, ``broken``, or ``not built`` by transformers."""

    kind: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    runs: Runs | None = None

    @property
    def expected(self) -> bool:
        """Equal, or not for a listed reason."""
        listed = {"refused": REFUSALS, "not built": NOT_BUILT}.get(self.kind, {})
        return self.kind == "equal" or any(re.search(pattern, self.reason) for pattern in listed)


def random_model(family: str) -> Any:
    """The family's model in training mode and fp64, with random values in all parameters and persistent buffers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        persistent = model.state_dict()
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name in persistent:
                noise = torch.randn_like(buffer)  # zeros among others are a mask, and stay
                buffer.add_(noise if not buffer.any() else noise * 0.1 * buffer)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # sdpa leaves soft caps out, and is the default of 5.17
    return model.double().train()


def micro_batches(rows: Rows) -> list[MicroBatch]:
    """Random tokens for documents with these lengths; every row a micro-batch."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for row in rows:
        ids = torch.randint(ORDINARY_TOKENS.start, ORDINARY_TOKENS.stop, (1, sum(row)), generator=generator)
        made.append(MicroBatch.of_documents(ids, ids, row))
    return made


def documents(batch: MicroBatch) -> Iterator[Tensor]:
    """The documents in which something is learned, without padding."""
    for ids, labels in zip(
        *(one.flatten().split(batch.lengths) for one in (batch.input_ids, batch.labels)), strict=True
    ):
        if (labels != IGNORE).any():
            yield ids


def plain_step(
    model: Any, batches: Sequence[MicroBatch], *, seeded: bool = False
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss per target and gradients of the model as it is, every document a row of its own."""
    model.zero_grad()
    targets, total = sum(batch.tokens for batch in batches), 0.0
    for index, batch in enumerate(batches):
        hooks = seed_layers(model, index) if seeded else []
        for document in documents(batch):
            logits = logits_of(model, document[None])
            loss = F.cross_entropy(logits[0, :-1], document[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        for hook in hooks:
            hook.remove()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The model's own forward pass."""
    return model(**taken_by(model, {"input_ids": ids, "use_cache": False}, alone=True)).logits


def seed_layers(model: Any, micro_batch: int) -> list[Any]:
    """Seed every layer as a pipeline of seed 0 does in its first step (``runtime.compute``); hooks to remove."""
    count = model.config.get_text_config().num_hidden_layers
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)

    def seed(block: int) -> None:
        words = np.random.SeedSequence([0, 0, micro_batch, block]).generate_state(2)
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))

    return [
        layer.register_forward_pre_hook(lambda *_, block=block: seed(block)) for block, layer in enumerate(layers, 1)
    ]


def samples(model: Any) -> bool:
    """Whether the model draws random numbers in training although all its dropout is 0."""
    ids = micro_batches(ALONE)[0].input_ids
    with torch.no_grad(), torch.random.fork_rng():
        first, second = (torch.manual_seed(seed) and logits_of(model, ids) for seed in (1, 2))
    return not torch.equal(first, second)


def why_not_cut(chain: Chain, settings: ScheduleSettings) -> str:
    """Why rows of a model cannot be cut by a setting; empty if they can."""
    try:
        refuse_cut_rows(chain, settings)
    except UserError as error:
        return error.expected.partition(", because ")[2]
    return ""


def our_step(model: Any, rows: Rows, *, together: int = 1, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    """The same by a pipeline, which takes the model's values away; so many rows are a micro-batch."""
    freeze_indexers(model)  # as the pipeline does, or they would have zeros for gradients
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    schedule = ScheduleSettings(**settings)
    pipeline = tawpipe.Pipeline(
        model,
        dtype=torch.float64,
        training=tawpipe.TrainingSettings(clip_norm=None),
        optimizer=sgd,
        checks=tawpipe.CheckSettings(check="never"),
        schedule=schedule,
    )
    parts = micro_batches(rows)
    parts = [MicroBatch.cat(parts[first : first + together]) for first in range(0, len(parts), together)]
    try:
        loss = pipeline.step(LocalBatch(len(parts), sum(rows[0]), parts)).loss
        pipeline.drain()
        gradients = {name: pipeline.gradient(name) for name in trainable}
        return loss, {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    finally:
        pipeline.close()


def differences(
    mine: tuple[float, dict[str, Tensor]], plain: tuple[float, dict[str, Tensor | None]], tolerance: float = TOLERANCE
) -> list[str]:
    """What differs by more than the tolerance. Gradients that are nothing are compared with the largest of all."""
    largest = max(float(gradient.norm()) for gradient in plain[1].values() if gradient is not None)
    found = []
    if not abs(mine[0] - plain[0]) <= tolerance * abs(plain[0]):
        found.append(f"loss by {abs(mine[0] / plain[0] - 1):.0e}")
    for name, gradient in mine[1].items():
        expected = plain[1][name]
        expected = torch.zeros_like(gradient) if expected is None else expected
        size = float(expected.norm())
        error = float((gradient - expected).norm()) / (size if size > 1e-12 * largest else largest)
        if not error <= tolerance:
            found.append(f"gradient of {name} by {error:.0e}")
    return found


@cache
def outcome(family: str) -> Outcome:
    """One step of the family's tiny model, by a pipeline and plainly."""
    known = [REMARKS[family]] if family in REMARKS else []
    remarks = list(known)
    try:
        model = random_model(family)
    except Exception as error:
        return Outcome("not built", _text(error))
    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)
        try:
            try:
                runs = Runs.of(Chain(deepcopy(model)))
            except UserError as error:
                if "freeze them" not in error.expected:
                    raise
                remarks.append(f"freeze what text does not use: {', '.join(freeze_unused(model))}")
                runs = Runs.of(Chain(deepcopy(model)))
            rows, ours = PACKED, our_step(deepcopy(model), PACKED)
            if sampling := samples(model):
                remarks.append("samples in training: compared with a plain model whose layers are seeded alike")
                rows, ours = ALONE, our_step(deepcopy(model), ALONE)
            plain = plain_step(model, micro_batches(rows), seeded=sampling)
            found = differences(ours, plain)
            assert change_by_future(deepcopy(model), micro_batches(rows)[0]) < TOLERANCE, "a token sees those after it"
            if not found and not runs.chunks and not sampling:
                try:
                    found = [
                        f"{one} in chunks" for one in differences(our_step(model, rows, sequence_chunk=CHUNK), plain)
                    ]
                except UserError as error:  # what can be seen when a layer runs only
                    runs = replace(runs, chunks=error.expected, sets=error.expected)
        except UserError as error:
            return Outcome("refused", error.expected, tuple(remarks))
        except Exception as error:
            return Outcome("broken", _text(error), tuple(remarks))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return Outcome("wrong", ", ".join(found[:3]) + more, tuple(remarks))
    return Outcome("equal", "", tuple(remarks), runs)


def freeze_unused(model: Any) -> list[str]:
    """Freeze the parameters that a plain step on text gives no gradient; returns the modules that hold only such."""
    gradients = plain_step(model, micro_batches(PACKED))[1]
    used = [name for name, gradient in gradients.items() if gradient is not None]
    found: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(gradients[name] is not None)
        parts = name.split(".")
        prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        if gradients[name] is None:
            found[next(p for p in prefixes if not any(f"{other}.".startswith(f"{p}.") for other in used))] = None
    return [f"`{name}`" for name in found]


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# what is written down

VERSIONS = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
_SECTIONS = {
    "equal": (
        "Equal to the plain model",
        "Unless a line says otherwise, a model runs on packed rows, in chunks (`--schedule.sequence-chunk`), in\n"
        "[context-parallel groups](glossary.md#text) (`--schedule.sequence-ranks`) and in "
        "[pipelines](glossary.md#schedules), and\ncan be [served](serving.md).\n\n"
        "* *mixers*: these run on each document, the rest on the whole row. Not in context-parallel groups, not "
        "served\n"
        "* *in turn*: layers run once per document length. Not served\n"
        "* *whole rows*: no chunks and no context-parallel groups",
    ),
    "refused": ("Refused", "With a message, before anything is allocated."),
    "wrong": ("Wrong", "Known to differ; do not train them."),
    "broken": ("Broken", "They end with an error that is not a refusal."),
    "not built": ("Not tested", "`AutoModelForCausalLM.from_config` cannot build them here."),
}


def page(found: dict[str, Outcome], versions: str = VERSIONS) -> str:
    """docs/models.md."""
    parts = [
        f"""\
# Which models

Look up here, by the `model_type` in its `config.json`, whether a model trains, and in which ways.

Every causal LM of transformers was tested. A tiny model with random values took one training [step](glossary.md#text)
here, on packed [rows](glossary.md#text) and in [chunks](glossary.md#text), and one as transformers' plain model, with
each [document](glossary.md#text) alone. *Equal* means: in fp64 the loss and every gradient differ by less than 1e-9 in
relative norm.

Written by `python tests/support/every_family.py --write docs/models.md` with {versions};
`tests/model/test_every_family.py` checks it.
"""
    ]
    for kind, (title, introduction) in _SECTIONS.items():
        chosen = {family: one for family, one in sorted(found.items()) if one.kind == kind}
        if not chosen:
            continue
        parts.append(f"## {title}: {len(chosen)}\n")
        if introduction:
            parts.append(f"{introduction}\n")
        parts.append("\n".join(_by_reason(chosen)) + "\n")
    return "\n".join(parts)


def _by_reason(chosen: dict[str, Outcome]) -> list[str]:
    """A line for each thing that is said of families, with their names; those of which nothing is said come first."""
    families: dict[str, list[str]] = {"": []}
    for family, tried in chosen.items():
        said = "; ".join(filter(None, [_short(tried.reason), *_ways(tried.runs), *tried.remarks]))
        families.setdefault(said, []).append(f"`{family}`")
    plain = families.pop("")
    lines = [f"{', '.join(plain)}.", ""] if plain else []
    return [*lines, *(f"* {', '.join(names)}: {said}" for said, names in families.items())]


def _ways(runs: Runs | None) -> Iterator[str]:
    """What is said of how a family runs; nothing of those that run in every way."""
    if runs is None or runs == Runs("attention"):
        return
    if runs.apart != "attention":
        yield f"*{runs.apart}*"
    if runs.chunks and runs.chunks == runs.sets:
        yield f"whole rows: {_short(runs.chunks)}"
    else:
        sets = runs.sets if runs.apart == "attention" else ""
        yield from (f"no {way}: {_short(why)}" for way, why in (("chunks", runs.chunks), ("sets", sets)) if why)
    if runs.pipelines:
        yield f"no pipelines: {_short(runs.pipelines)}"


def _short(reason: str) -> str:
    reason = re.sub(r" \(.*\)$", "", reason)  # what went wrong inside, which is not the same in every process
    reason = re.sub(r"layers of type .* carry", "some layers carry", reason)
    reason = re.sub(r"expected \d+ layers", "expected layers", reason)  # of the tiny model
    return re.split(r"\.( |$)", reason)[0][:240]


def equal_families(found: dict[str, Outcome]) -> str:
    """src/tawpipe/model/tested.py."""
    version = ".".join(transformers.__version__.split(".")[:2])
    names = textwrap.fill(
        " ".join(sorted(family for family, one in found.items() if one.kind == "equal")), 120, break_on_hyphens=False
    )
    return f'''\
"""Model families that were trained and compared with the plain model. ``every_family.py`` writes this file."""

from __future__ import annotations

TESTED_TRANSFORMERS = "{version}"
"""Version of transformers that they were compared with."""
_NAMES = """
{names}
"""
TESTED_FAMILIES = frozenset(_NAMES.split())
"""Values of ``config.model_type``."""
'''


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", nargs="+", type=Path, default=[], help="files to write: a page (.md), a list (.py)")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {}
    for family in given.families or families():
        found[family] = one = outcome(family)
        print(f"{family:26} {one.kind:10} {'; '.join(filter(None, [one.reason, *one.remarks]))[:300]}", flush=True)
    for path in given.write:
        path.write_text(page(found) if path.suffix == ".md" else equal_families(found), encoding="utf-8")
    if not all(one.expected for one in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
