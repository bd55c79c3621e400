"""Training with settings drawn at random, beside a plain loop in one process: losses, norms and weights are the same.

Both play the same words (``step``, ``set``, ``save``, ``load``, ...), the pipeline in up to two parts, which may differ
in strategy and number of processes: the second goes on from what the first has saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, OneCycleLR

import tawpipe
from cases import from_bits, llama, random_delays
from model_families import FAMILIES, MORE_FAMILIES, VOCABULARY, family_config, keep_fp64, real_model
from pipelines import SETTINGS, make_pipeline
from pool import WorkerPool
from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.runtime.compute.randomness import OwnGenerator, seed_of
from tawpipe.runtime.world import World

LIMIT = 1e-8
"""Relative, of fp64: an order of sums shows at 1e-15, and AdamW makes more of it."""
LENGTH, TIMEOUT_S, SEED = 20, 60, 3
SHAPES = [(1, 1), (1, 1), (1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (4, 1), (3, 1), (1, 3)]
"""Nodes, and processes of each."""

Rows = list[list[tuple[Tensor, Tensor]]]
"""Rows of documents: ids and labels, not shifted."""

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}),
    "adamw fused": (AdamW, {"lr": 1e-3, "eps": 1e-6, "betas": (0.8, 0.9)}),
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd fused": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd bare fused": (SGD, {"lr": 0.1}),
    "adam": (Adam, {"lr": 1e-3, "eps": 1e-6, "amsgrad": True}),
    "rmsprop": (RMSprop, {"lr": 1e-3, "eps": 1e-4, "momentum": 0.5, "centered": True}),
    "adagrad": (Adagrad, {"lr": 1e-2, "eps": 1e-4}),
    "nadam": (NAdam, {"lr": 1e-3, "eps": 1e-6}),
    "adafactor whole": (Adafactor, {"lr": 1e-2, "eps": (1e-8, 1e-3)}),
}
CHANGES: dict[str, list[Any]] = {
    "lr": [1e-4, 0.02],
    "weight_decay": [0.0, 0.5],
    "momentum": [0.2, 0.7],
    "betas": [(0.2, 0.5), (0.5, 0.99)],
    "eps": [1e-3],
    "nesterov": [False],
}
"""Options of optimizers that change while they train, and change back."""
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-4, 1e-2, 1, base_momentum=0.2, max_momentum=0.9),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=60),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 4),
}
PROJECTIONS = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", PROJECTIONS),
    "dora": ("LoraConfig", {**PROJECTIONS, "use_dora": True}),
    "rslora": ("LoraConfig", {**PROJECTIONS, "r": 3, "use_rslora": True, "target_modules": "all-linear"}),
    "some layers": ("LoraConfig", {**PROJECTIONS, "layers_to_transform": [1]}),
    "dropout": ("LoraConfig", {**PROJECTIONS, "lora_dropout": 0.3}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}),
    "head": ("LoraConfig", {**PROJECTIONS, "modules_to_save": ["lm_head"]}),
    "loha": ("LoHaConfig", {"r": 2, "target_modules": ["v_proj"], "init_weights": False}),
    "vera": ("VeraConfig", {"r": 2, "target_modules": ["q_proj"], "projection_prng_key": 1}),
    "lokr": ("LoKrConfig", {"r": 2, "target_modules": ["o_proj"], "init_weights": False}),
}
STAGES = ("1f1b", "interleaved-1f1b", "zero-bubble", "generated", "solved")
EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
TRAVEL = (
    "tawpipe-spread",
    "tawpipe-step",
    "tawpipe-striped",
    "tawpipe-whole",
    "flat",
    "hsdp",
    "tawpipe-groups",
    "weipipe",
)
POOL = WorkerPool()


# what is drawn


def draw(draw: random.Random) -> dict[str, Any]:
    """A model, its optimizer, the form of batches, and one or two parts with settings and words."""
    chance = lambda share: draw.random() < share  # noqa: E731
    model = draw.choice(["llama", "llama", "llama", "gpt2", *FAMILIES, *MORE_FAMILIES])
    adapter = draw.choice(list(ADAPTERS)) if model not in MORE_FAMILIES and chance(0.25) else ""
    dropout = 0.3 if adapter == "dropout" or (model == "gpt2" and chance(0.7)) else 0.0
    optimizer = draw.choice(["sgd fused", "sgd fused", *OPTIMIZERS])
    if optimizer == "adafactor whole" and model in EXPERTS:  # a matrix there is an expert's
        optimizer = "adamw"
    case: dict[str, Any] = {
        "model": model,
        "tied": chance(0.5),
        "dropout": dropout,
        "adapter": adapter,
        "quantize": draw.choice(["nf4", "int8"]) if (model, adapter) == ("llama", "lora") else "none",
        "frozen": draw.choice(["embed", ".0.", ".1.", "norm", "mlp"]) if not adapter and chance(0.15) else "",
        "optimizer": optimizer,
        "decay of vectors": 0.0 if not optimizer.startswith("adafactor") and chance(0.3) else None,
        "scheduler": draw.choice(list(SCHEDULERS)) if chance(0.2) else "",
        "form": "rows" if dropout else draw.choice(["rows", "rows", "masked", "packed", "bins"]),
        "micro_batch": 1 if dropout else draw.choice([1, 1, 2]),
        "clip_norm": draw.choice([None, 0.3, 1.0]),
        "early_updates": False,
        "skip_limit": draw.choice([0, 3]),
        "check": "always" if chance(0.1) else "never",
        "parts": [],
    }
    if case["form"] == "bins":
        case["micro_batch"] = 1
    if "momentum" in case["optimizer"] or not (OPTIMIZERS[optimizer][1].keys() & {"momentum", "betas", "amsgrad"}):
        case["scheduler"] = case["scheduler"].replace("cyclic", "cosine").replace("one cycle", "cosine")
    if case["clip_norm"] is None and chance(0.4):
        case["early_updates"] = True
    slots: list[int] = []
    for first in [True, *([False] if chance(0.25) else [])]:
        nodes, local = draw.choice(SHAPES)
        whole = optimizer.endswith("whole") and not chance(0.1)
        part: dict[str, Any] = {"nodes": nodes, "local": local}
        part["knobs"] = _knobs(draw, case, nodes, local, strategy="tawpipe-whole" if whole else "")
        case["parts"].append({**part, "words": _words(draw, case, slots, first)})
    return case


def _words(draw: random.Random, case: dict[str, Any], slots: list[int], first: bool) -> list[list[Any]]:
    """What is done; ``slots`` are the states that there are to load, kept over the parts."""
    words: list[list[Any]] = []
    rows, most, usual = draw.randint(1, 7), *draw.choice([(7, 0.8), (7, 0.8), (4, 0.0)])  # or few, in mixed order
    seed = lambda: [draw.randrange(10**6), rows if draw.random() < usual else draw.randint(1, most)]  # noqa: E731

    def save() -> None:
        slots.append(len(slots))
        words.append(["save", slots[-1]])

    if first and draw.random() < 0.5:
        save()
    kind, options = OPTIMIZERS[case["optimizer"]]
    known = kind([nn.Parameter(torch.zeros(1))], **options).param_groups[0]
    changeable = [name for name in CHANGES if name in known and (name, known[name]) != ("nesterov", False)]
    back: list[list[Any]] = []
    for _ in range(draw.randint(2, 5)):
        what = draw.random()
        if back and what < 0.5:
            words.append(back.pop())
        elif what < 0.3 and "whole" not in case["optimizer"]:
            option = draw.choice(changeable)
            words.append(["set", option, draw.choice(CHANGES[option])])
            back.append(["set", option, known[option]])
        elif what < 0.4:
            words.append(["evaluate", *seed()])
        elif what < 0.5:
            save()
        elif what < 0.55:
            words.append(["step", *seed(), 0])
        elif what < 0.75 and not case["early_updates"] and (case["skip_limit"] or slots):
            words.append(["bad", *seed()])
            if slots and (not case["skip_limit"] or draw.random() < 0.6):
                words.append(["load", draw.choice(slots)])
        elif what < 0.8 and slots:
            words.append(["load", draw.choice(slots)])
        words.append(["step", *seed(), draw.choice([1, 1, 1, 0.5])])
    return words


def _knobs(draw: random.Random, case: dict[str, Any], nodes: int, local: int, strategy: str = "") -> dict[str, Any]:
    """Settings of the schedule, most of them left as they are."""
    strategy = strategy or draw.choice(STAGES if draw.random() < 0.3 and nodes * local > 1 else TRAVEL)
    if case["form"] == "bins" and strategy in STAGES:
        strategy = "tawpipe-spread"
    layers = 5 if case["model"] == "llama" and not case["adapter"] else 3
    if strategy in ("interleaved-1f1b", "zero-bubble", "generated") and nodes * local > layers // 2:
        strategy = "1f1b"  # they have several stages on every process
    recompute = ["none", "none:1,full", "none:2,full", "full"]
    if strategy in STAGES:
        open_to: dict[str, list[Any]] = {"stages": ["world", "nodes", "locals"], "recompute": recompute}
    else:
        chunk = {"sequence_chunk": [3, 7, 19], "sequence_ranks": [n for n in (2, 3) if not local % n] or [1]}
        open_to = {
            **(chunk if not case["dropout"] else {}),
            "recompute": recompute,
            "micro_batches_per_visit": [1, 2, 3],
            "look_ahead": [0, 1, 3],
            "gradient_buffers": [1, 3],
            "reuse": [False],
        }
        if strategy != "weipipe":
            open_to |= {"keep_mib": [0, 1], "offloaded_layers": [1, layers]}
        if strategy == "tawpipe-groups":
            world, sizes = nodes * local, [1, local, nodes * local]
            state = draw.choice(sizes)
            smaller = [size for size in sizes if size <= state]
            open_to["groups"] = [f"{draw.choice(smaller)}/{draw.choice(smaller)}/{state}", f"1n/{world}/{world}"]
        elif strategy.startswith("tawpipe"):
            caches = [0, "all"] if strategy == "tawpipe-whole" else [0, 1, 2, "all"]
            open_to |= {"step_cache": caches, "gradients_scope": ["visit", "step"]}
        if strategy in ("tawpipe-striped", "tawpipe-whole") and not (case["tied"] or case["adapter"]):
            places = range(nodes if strategy == "tawpipe-striped" else nodes * local)
            open_to["homes"] = [",".join(str(draw.choice(places)) for _ in range(layers + 2))]
    open_to |= {"loss_chunk_tokens": [1, 6], "host_homes": ["state", "state" if strategy in STAGES else "all"]}
    knobs: dict[str, Any] = {name: draw.choice(values) for name, values in open_to.items() if draw.random() < 0.2}
    if "sequence_chunk" in knobs or knobs.get("sequence_ranks", 1) > 1:
        knobs = {name: value for name, value in knobs.items() if name not in ("recompute", "keep_mib")}
    if knobs.get("recompute", "full") != "full":
        knobs = {name: value for name, value in knobs.items() if name not in ("keep_mib", "offloaded_layers")}
    if not knobs.get("reuse", True) and strategy.startswith("tawpipe"):
        knobs["step_cache"] = 0
    delays = {"delays": 0.003} if draw.random() < 0.15 else {}
    return {"strategy": strategy, **knobs, **delays}


# what both loops are given


def model_of(case: dict[str, Any]) -> Any:
    """The case's model in fp64, with the same values each time."""
    name, tied, dropout = case["model"], case["tied"], case["dropout"]
    if name == "llama" and not case["adapter"]:
        model: Any = llama(torch.float64, tied=tied)
    else:
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout} if name == "gpt2" else {}
        model = real_model(family_config(name, tied=tied, **drops))
    if case["adapter"]:
        import peft

        kind, options = ADAPTERS[case["adapter"]]
        torch.manual_seed(11)
        model = peft.get_peft_model(model, getattr(peft, kind)(**options)).to(torch.float64)
    for name, parameter in model.named_parameters():
        if case["frozen"] and case["frozen"] in name:
            parameter.requires_grad_(False)
    return model.train()


def optimizer_of(case: dict[str, Any], *, plain: bool) -> Any:
    """A factory, by which a plain loop has the optimizer that is not fused."""
    kind, options = OPTIMIZERS[case["optimizer"]]
    if case["optimizer"].endswith("fused") and not plain:
        options = {**options, "fused": True}

    def make(parameters: Sequence[Any]) -> Optimizer:
        groups: Any = list(parameters)
        if (decay := case["decay of vectors"]) is not None:
            shape = (lambda p: p.shape) if plain else (lambda p: tawpipe.piece_of(p).shape)
            vectors = [p for p in parameters if len(shape(p)) < 2]
            others = [p for p in parameters if len(shape(p)) > 1]
            groups = [{"params": one} for one in (others, vectors) if one]
            for group in groups:
                if group["params"] is vectors:
                    group["weight_decay"] = decay
        return kind(groups, **options)

    return tawpipe.whole_matrices(make) if case["optimizer"].endswith("whole") and not plain else make


def rows_of(case: dict[str, Any], seed: int, rows: int, learned: str = "some") -> Rows:
    """The rows of a batch; of most documents the first labels do not count, perhaps none of them does."""
    draw, generator, made = random.Random(seed), torch.Generator().manual_seed(seed), Rows()
    for _ in range(rows):
        lengths = [LENGTH] if case["form"] == "rows" else [draw.randint(2, LENGTH)]
        while case["form"] == "packed" and sum(lengths) < LENGTH:
            lengths.append(draw.randint(1, LENGTH - sum(lengths)))
        made.append([])
        for length in lengths:
            ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
            labels = ids.clone()
            if learned != "all":
                labels[: length if learned == "none" else draw.randint(0, length)] = IGNORE
            made[-1].append((ids, labels))
    return made


# the two loops


class Plain:
    """Words played by torch alone, on one document after another; with dropout on one micro-batch."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.model = case, model_of(case)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        base = self.model.get_base_model() if case["adapter"] else self.model
        self.named = dict(base.named_parameters())
        if case["quantize"] != "none":
            with torch.no_grad():
                for name, parameter in self.named.items():
                    if ".layers." in name and not parameter.requires_grad and parameter.ndim == 2:
                        parameter.copy_(from_bits(case["quantize"], parameter))
        self.optimizer = optimizer_of(case, plain=True)(self.trained)
        self.scheduler = SCHEDULERS[case["scheduler"]](self.optimizer) if case["scheduler"] else None
        self.number, self.saved = 0, dict[int, Any]()
        if case["dropout"]:
            self._place = (0, 0)
            layers = base.transformer.h if case["model"] == "gpt2" else base.model.layers
            for block, module in enumerate([base, *layers]):  # a layer's own stand inside the model's
                module.forward = partial(self._seeded, module.forward, block)

    def _seeded(self, forward: Callable[..., Any], block: int, *of: Any, **how: Any) -> Any:
        with OwnGenerator(torch.Generator().manual_seed(seed_of(SEED, *self._place, block))):
            return forward(*of, **how)

    def _parts(self, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
        for m, row in enumerate(rows):
            self._place = self.number, m
            for ids, labels in row:
                yield ids[None], F.pad(labels[None, 1:], (0, 1), value=IGNORE)

    def _loss(self, rows: Rows, *, backward: bool) -> float:
        total, parts = 0.0, list(self._parts(rows))
        tokens = sum(int((labels != IGNORE).sum()) for _, labels in parts)
        for ids, labels in self._parts(rows):
            if (labels != IGNORE).any():
                logits = self.model(input_ids=ids, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                total += loss.item() / tokens
                if backward:
                    (loss / tokens).backward()
        return total if tokens else math.nan

    def step(self, seed: int, rows: int, rate: float) -> list[float]:
        self.optimizer.zero_grad()
        loss = self._loss(rows_of(self.case, seed, rows, "some" if rate else "none"), backward=True)
        self.number += 1
        norm = 0.0
        if not math.isnan(loss):
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            clip = self.case["clip_norm"]
            norm = float(nn.utils.clip_grad_norm_(self.trained, math.inf if clip is None else clip))
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * rate
            self.optimizer.step()
            for group, own in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = own
        if self.scheduler:
            self.scheduler.step()
        return [loss, norm]

    def bad(self, seed: int, rows: int) -> None:
        self.number += 1

    def set(self, option: str, value: Any) -> None:
        for group in self.optimizer.param_groups:
            group[option] = value

    def evaluate(self, seed: int, rows: int) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            loss = self._loss(rows_of(self.case, seed, rows), backward=False)
        self.model.train()
        return [loss]

    def save(self, slot: int) -> None:
        state = {parameter: deepcopy(one) for parameter, one in self.optimizer.state.items()}
        self.saved[slot] = deepcopy(self.model.state_dict()), state, self.number

    def load(self, slot: int) -> None:
        weights, state, self.number = self.saved[slot]
        self.model.load_state_dict(weights)
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: deepcopy(one) for parameter, one in state.items()})


class Piped:
    """The same words, played by a pipeline."""

    def __init__(self, world: World, case: dict[str, Any], part: dict[str, Any], folder: Path) -> None:
        self.case, self.folder = case, folder
        self._bad = False
        knobs = {name: value for name, value in part["knobs"].items() if name in SETTINGS}
        if most := part["knobs"].get("delays"):
            knobs["delay"] = lambda lane: random_delays(zlib.crc32(lane.encode()) + world.rank, most)
        if any(word[0] == "bad" for one in case["parts"] for word in one["words"]):
            knobs["loss"] = self._loss
        same = ("micro_batch", "clip_norm", "early_updates", "skip_limit", "check", "quantize")
        self.pipeline = make_pipeline(
            model_of(case),
            optimizer=optimizer_of(case, plain=False),
            dtype=torch.float64,
            world=world,
            strict=True,
            seed=SEED,
            bin_tokens=2 * LENGTH if case["form"] == "bins" else 0,
            timeout=timedelta(seconds=TIMEOUT_S),
            **{name: case[name] for name in same},
            **knobs,
        )
        self.scheduler = SCHEDULERS[case["scheduler"]](self.pipeline.optimizer) if case["scheduler"] else None

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return total * math.inf if self._bad else total

    def _batch(self, rows: Rows, *, training: bool = True) -> Any:
        if self.case["form"] == "bins":
            lone = [one for row in rows for one in row]
            made = [MicroBatch.of_documents(ids[None], labels[None], [len(ids)]) for ids, labels in lone]
            lengths = [len(ids) for ids, _ in lone]
            return self.pipeline.part_of_documents(lengths, made.__getitem__, training=training)
        ids, labels, positions = (torch.full((len(rows), LENGTH), value) for value in (0, 5, 0))
        for row, documents in enumerate(rows):
            used = sum(len(one) for one, _ in documents)
            ids[row, :used], labels[row, :used] = (torch.cat(one) for one in zip(*documents, strict=True))
            positions[row, :used] = torch.cat([torch.arange(len(one)) for one, _ in documents])
        real = torch.arange(LENGTH) < torch.tensor([sum(len(one) for one, _ in row) for row in rows])[:, None]
        more = {"masked": {"attention_mask": real.long()}, "packed": {"position_ids": positions}}
        return {"input_ids": ids, "labels": labels} | more.get(self.case["form"], {})

    def step(self, seed: int, rows: int, rate: float) -> Any:
        batch = self._batch(rows_of(self.case, seed, rows, "some" if rate else "none"))
        result = self.pipeline.step(batch, rate=rate or 1.0)
        if self.scheduler:
            self.scheduler.step()
        return lambda: [result.loss, result.grad_norm]

    def bad(self, seed: int, rows: int) -> None:
        self.pipeline.drain()
        self._bad = True
        with contextlib.nullcontext() if self.case["skip_limit"] else pytest.raises(RunError):
            result = self.pipeline.step(self._batch(rows_of(self.case, seed, rows, "all")))
            assert not result.finite
            self.pipeline.drain()
        self._bad = False

    def set(self, option: str, value: Any) -> None:
        for group in self.pipeline.optimizer.param_groups:
            group[option] = value

    def evaluate(self, seed: int, rows: int) -> Any:
        result = self.pipeline.evaluate(self._batch(rows_of(self.case, seed, rows), training=False))
        return lambda: [result.loss]

    def save(self, slot: int | str) -> None:
        self.pipeline.save(self.folder / str(slot))

    def load(self, slot: int | str) -> None:
        self.pipeline.load(self.folder / str(slot))


@contextlib.contextmanager
def _exact(case: dict[str, Any]) -> Iterator[None]:
    """Everything in fp64, without a word; but for packed weights, whose scales are fp32."""
    logging.disable()
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        if case["quantize"] == "none":
            keep_fp64(patch)
        yield
    logging.disable(logging.NOTSET)


def played(world: World, *, case: dict[str, Any], number: int, folder: str, before: Any) -> Any:
    """A part of a case: its numbers, options at its end, and on rank 0 its weights; or the error that refuses it."""
    part = case["parts"][number]
    words, begun = part["words"], False
    with _exact(case):
        try:
            piped = Piped(world, case, part, Path(folder))
            for word, *values in words if case["form"] != "bins" else ():
                if word in ("step", "evaluate", "bad"):
                    piped.pipeline.schedule(values[1], training=word != "evaluate")
            if before:
                piped.load("between")
                piped.pipeline.optimizer.load_state_dict(before[0])
                if piped.scheduler:
                    piped.scheduler.load_state_dict(before[1])
            begun = True
            said = [getattr(piped, word)(*values) for word, *values in words]
        except UserError as error:
            if begun and error.setting != "where":  # a state with a momentum, where the factory has none
                raise
            return error.setting, repr(error.value), error.expected
        numbers = [one() for one in said if one]
        piped.pipeline.check_copies()
        weights = {name: piped.pipeline.parameter(name) for name in piped.pipeline.parameter_names}
        piped.save("between")
        options = piped.pipeline.optimizer.state_dict(), piped.scheduler and piped.scheduler.state_dict()
        piped.pipeline.close()
    return {"numbers": numbers, "weights": weights, "options": options}


def check(case: dict[str, Any]) -> str:
    """What differs between the pipeline and the plain loop.

    Raises:
        UserError: the pipeline refuses the settings.
    """
    torch.set_num_threads(1)
    found: list[list[float]] = []
    weights, options = dict[str, Tensor](), None
    with tempfile.TemporaryDirectory(prefix="tawpipe-hunt-") as folder:
        for number, part in enumerate(case["parts"]):
            how = {"timeout_s": 3 * TIMEOUT_S, "case": case, "number": number, "folder": folder, "before": options}
            said, *_ = POOL.run("hunt_training:played", part["nodes"], part["local"], **how)
            if isinstance(said, tuple):
                raise UserError(*said)
            found, weights, options = found + said["numbers"], said["weights"], said["options"]
    with _exact(case):
        plain, expected, names = Plain(case), list[list[float]](), list[str]()
        for number, (word, *values) in enumerate([word for part in case["parts"] for word in part["words"]]):
            if numbers := getattr(plain, word)(*values):
                expected.append(numbers)
                names.append(f"{word} {number}")
    wrong = [
        f"{name}: {mine}, plain {right}"
        for name, mine, right in zip(names, found, expected, strict=True)
        if not all(map(_alike, mine, right))
    ]
    for name, value in weights.items():
        error = float((value - plain.named[name].detach()).norm() / plain.named[name].detach().norm().clamp_min(1e-12))
        if not error <= LIMIT:
            wrong.append(f"{name}: off by {error:.0e}")
    return "\n".join(wrong[:12])


def _alike(mine: float, right: float) -> bool:
    return (math.isnan(mine) and math.isnan(right)) or abs(mine - right) <= LIMIT * max(1e-6, abs(right))
