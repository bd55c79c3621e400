"""One long look at convergence: thousands of steps in bf16, in this project's runtime and under FSDP2.

    python benchmarks/long_look.py --out benchmarks/results/DATE-long-look                  # all rows, about an hour
    python benchmarks/long_look.py --out benchmarks/results/DATE-long-look --rows ours-a    # one of them

A small Llama learns the standard library's sources, from the same initial weights in every row. ``fsdp2-a`` is FSDP2
as torch ships it, on two processes; ``fsdp2-b`` is the same with other batches: what a seed changes. ``ours-a`` is this
project on two nodes of one process. Rows that end with ``-a`` see the same batches with the same learning rates. Two
rows of 20 steps in fp32 say first whether both sides do the same arithmetic.

A row is written to ``losses.json`` when it is done, and rows found there are not run again. ``table.md`` is made of
what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import Pipeline, TrainingSettings
from tawpipe.data.prepare import prepare_data
from tawpipe.data.rows import PackedDataset
from tawpipe.data.settings import DataSettings
from tawpipe.launch.launcher import Shape, launch
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.train.settings.learning_rate import RunSpan, factor
from tawpipe_lab.real_modules import ATTENTION

WARMUP, LEAST = 100, 0.1
VALIDATION = 128
"""Rows of the held-out set."""
EVERY = 100
"""Steps between two validations, and over which the training loss is smoothed."""
CHECK_STEPS, TOLERANCE = 20, 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
LENGTH, BATCH = 128, 8
"""Tokens of a row, rows of a step."""
PROCESSES = 2
RATE, DECAY, BETAS, EPS, CLIP = 2e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
VALIDATED = 16
"""Rows that a rival validates at once."""
Batch = dict[str, Tensor]
"""input_ids, labels and position_ids [rows, S], in the Hugging Face convention."""


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        kind: of the sides.
        order: which of the data's orders; 0 is seed A.
        steps: where it is not all of them.
    """

    kind: str
    text: str
    order: int = 0
    dtype: str = "bfloat16"
    steps: int | None = None


ROWS = {
    "check-fsdp2": Row("fsdp2", "FSDP2, fp32", dtype="float32", steps=CHECK_STEPS),
    "check-ours": Row("ours", "ours, fp32", dtype="float32", steps=CHECK_STEPS),
    "fsdp2-a": Row("fsdp2", "FSDP2, seed A"),
    "fsdp2-b": Row("fsdp2", "FSDP2, seed B", order=1),
    "ours-a": Row("ours", "ours, seed A"),
}
HALVES = {"all": False, "last half": True}


class Result(NamedTuple):
    """Result of a rival's step; see `tawpipe.runtime.homes.step_result.StepResult`."""

    loss: float
    grad_norm: float


def make_model() -> LlamaForCausalLM:
    """The model with its initial weights, the same in every process."""
    torch.manual_seed(0)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **none, **ATTENTION, max_position_embeddings=LENGTH))


def cut(batch: Batch, part: int, parts: int) -> Batch:
    """One of equal parts of the rows."""
    rows = len(batch["labels"]) // parts
    return {name: tensor[part * rows : (part + 1) * rows] for name, tensor in batch.items()}


class Ours:
    """This project's runtime with its defaults, a process's rows in two micro-batches."""

    def __init__(self, dtype: torch.dtype, world: World) -> None:
        self.pipeline = Pipeline(
            make_model(),
            optimizer=adamw(RATE, weight_decay=DECAY, betas=BETAS, eps=EPS),
            micro_batch=BATCH // world.size // 2,
            schedule=ScheduleSettings(micro_batches_per_visit=2),
            dtype=dtype,
            training=TrainingSettings(clip_norm=CLIP),
            world=world,
        )

    def step(self, batch: Batch, factor: float) -> Any:
        return self.pipeline.step(batch, rate=factor)

    def evaluate(self, batch: Batch) -> float:
        return self.pipeline.evaluate(batch).loss

    def close(self) -> None:
        self.pipeline.close()


class Fsdp2:
    """FSDP2 as torch ships it: every layer and the rest fully sharded, in its mixed precision."""

    def __init__(self, dtype: torch.dtype, world: World) -> None:
        self.world, self.model = world, make_model()
        mesh = init_device_mesh("cpu", (world.size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)

    def step(self, batch: Batch, factor: float) -> Result:
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * factor
        tokens = int((batch["labels"] != IGNORE).sum())
        loss = self.losses(cut(batch, self.world.rank, self.world.size)) / tokens
        (loss * self.world.size).backward()  # FSDP2 takes the mean over the processes
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Result(self.sum(loss.detach().double()), float(norm.full_tensor()))

    def losses(self, batch: Batch) -> Tensor:
        """The sum over all tokens, of logits in fp32; transformers keeps packed documents apart by their positions."""
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        assert logits is not None
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        mine = cut(batch, self.world.rank, self.world.size)
        parts = len(mine["labels"]) // VALIDATED
        total = torch.stack([self.losses(cut(mine, part, parts)).double() for part in range(parts)]).sum()
        return self.sum(total) / int((batch["labels"] != IGNORE).sum())

    def sum(self, value: Tensor) -> float:
        """Add up over all processes."""
        dist.all_reduce(value)
        return float(value)

    def close(self) -> None:
        self.world.leave()


SIDES: dict[str, Any] = {"ours": Ours, "fsdp2": Fsdp2}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("long-look"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", default=",".join(ROWS), help="those to run that are not there yet")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.folder, args.steps)
        return
    if unknown := set(args.rows.split(",")) - set(ROWS):
        parser.error(f"--rows {','.join(unknown)}: some of {', '.join(ROWS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path, rows = args.out / "losses.json", {}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        if content["settings"] != settings(args.steps):
            raise SystemExit(f"{path} holds rows with other settings: {content['settings']}")
    for name in args.rows.split(","):
        if name not in rows:
            rows[name] = run(name, args)
            if len({row["data"] for row in rows.values()}) > 1:
                raise SystemExit(f"{name} saw other data than the rows in {path}: the standard library has changed")
            rows = {one: rows[one] for one in ROWS if one in rows}
            content = {"settings": settings(args.steps), "rows": rows}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if {"check-fsdp2", "check-ours"} <= set(rows) and check(rows) > TOLERANCE:
            raise SystemExit(f"the two sides do not do the same arithmetic: {check(rows):.1e} apart in fp32")
    (args.out / "table.md").write_text("\n".join(table(args.steps, rows)) + "\n", encoding="utf-8")


def settings(steps: int) -> dict[str, Any]:
    """What must be the same for rows to be compared."""
    return {
        "model": SHAPE,
        "length": LENGTH,
        "batch": BATCH,
        "validation_rows": VALIDATION,
        "steps": steps,
        "learning_rate": RATE,
        "warmup_steps": WARMUP,
        "min_learning_rate_ratio": LEAST,
        "weight_decay": DECAY,
        "betas": list(BETAS),
        "eps": EPS,
        "clip_norm": CLIP,
        "evaluate_every": EVERY,
    }


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row in processes of its own."""
    row = ROWS[name]
    with tempfile.TemporaryDirectory(prefix="tawpipe-long-look-") as temporary:
        folder = Path(temporary)
        fingerprint = make_batches(folder, row, row.steps or args.steps)
        words = ["--worker", name, "--folder", temporary, "--steps", str(args.steps)]
        code = launch([sys.executable, __file__, *words], Shape(PROCESSES, PROCESSES))
        if code:
            raise SystemExit(code)
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return {"row": asdict(row), "environment": environment(), "data": fingerprint, **found}


def make_batches(folder: Path, row: Row, steps: int) -> str:
    """Write the row's batches, and return the fingerprint of the data.

    Another order is that of another epoch, so that the held-out documents stay the same.
    """
    data = prepare_data(DataSettings(vocab_size=SHAPE["vocab_size"]), sequence_length=LENGTH, seed=0)
    train, validation = data.train, data.validation
    assert isinstance(train, PackedDataset) and validation is not None
    first = row.order * len(train)
    parts = {
        "train": (train, range(first, first + steps * BATCH)),
        "validation": (validation, range(VALIDATION)),
    }
    for name, (source, numbers) in parts.items():
        batch = MicroBatch.cat([source.sample(number) for number in numbers])
        labels = batch.labels.roll(1, dims=1)  # unshifted, as all sides take them
        rows = {"input_ids": batch.input_ids, "labels": labels, "position_ids": batch.position_ids}
        torch.save(rows, folder / f"{name}.pt")
    return data.fingerprint


def environment() -> dict[str, Any]:
    """Where and how a row was run."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{os.cpu_count()} x {names[0] if names else platform.machine()}",
        "command": shlex.join(["python", *sys.argv]),
    }


def work(name: str, folder: Path, steps: int) -> None:
    """One process of a row; the first one writes what came of it."""
    row, world = ROWS[name], connect()
    train, validation = (torch.load(folder / f"{part}.pt") for part in ("train", "validation"))
    side = SIDES[row.kind](getattr(torch, row.dtype), world)
    results: list[Any] = []
    validations = [side.evaluate(validation)]
    begin, seconds = time.perf_counter(), 0.0
    count = row.steps or steps
    for step in range(count):
        scale = factor("cosine", step, RunSpan(steps, WARMUP, least=LEAST))
        batch = {field: tensor[step * BATCH : (step + 1) * BATCH] for field, tensor in train.items()}
        results.append(side.step(batch, scale))
        if (step + 1) % EVERY == 0 or step + 1 == count:
            validations.append(side.evaluate(validation))
            seconds = time.perf_counter() - begin
            if world.rank == 0:
                print(f"{name}: step {step + 1}, validation {validations[-1]:.4f}, {seconds:.0f} s", flush=True)
    found = {
        "losses": [round(result.loss, 7) for result in results],
        "grad_norms": [round(result.grad_norm, 7) for result in results],
        "validation_losses": [round(value, 7) for value in validations],
        "seconds": round(seconds, 1),
    }
    side.close()
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def check(rows: dict[str, Any]) -> float:
    """The largest difference of a loss or gradient norm between both sides in fp32."""
    fsdp2, ours = rows["check-fsdp2"], rows["check-ours"]
    fields = ("losses", "grad_norms", "validation_losses")
    return max(float(np.abs(np.subtract(fsdp2[field], ours[field])).max()) for field in fields)


def smoothed(row: dict[str, Any]) -> np.ndarray:
    """The mean training loss of the last ``EVERY`` steps, from step ``EVERY`` on."""
    width = min(EVERY, len(row["losses"]))
    return np.convolve(row["losses"], np.ones(width) / width, mode="valid")


def distances(one: dict[str, Any], other: dict[str, Any], *, last_half: bool) -> list[float]:
    """Mean and largest distance of the smoothed training losses, then of the validation losses but the first."""
    found = []
    for a, b in (
        (smoothed(one), smoothed(other)),
        (np.array(one["validation_losses"][1:]), np.array(other["validation_losses"][1:])),
    ):
        apart = np.abs(a - b)[len(a) // 2 if last_half else 0 :]
        found += [float(apart.mean()), float(apart.max())]
    return found


def table(steps: int, rows: dict[str, Any]) -> list[str]:
    """Markdown."""
    full = {name: row for name, row in rows.items() if ROWS[name].steps is None}
    parameters = sum(p.numel() for p in make_model().parameters())
    lines = [
        f"{steps} steps of {BATCH} rows of {LENGTH} tokens. A Llama of {parameters:,} parameters "
        f"({SHAPE['num_hidden_layers']} layers, hidden size {SHAPE['hidden_size']}, vocabulary "
        f"{SHAPE['vocab_size']:,}, tied embeddings) learns the standard library's sources. AdamW at {RATE:g} with "
        f"{WARMUP} steps of warm-up and a cosine down to {LEAST:g} of it, weight decay {DECAY:g}, betas {BETAS[0]:g} "
        f"and {BETAS[1]:g}, clipping at {CLIP:g}. All rows begin with the same weights; those of seed A see the same "
        f"batches. Validation: {VALIDATION} held-out rows, every {EVERY} steps.",
    ]
    if full:
        lines += [
            "",
            "| row | precision | processes | validation loss at the end | training loss, last tenth |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
    places: dict[str, list[str]] = {}
    for name, row in full.items():
        where, last = row["environment"], row["losses"][-max(1, steps // 10) :]
        versions = ", ".join(f"{key} {value}" for key, value in where["versions"].items())
        places.setdefault(f"{where['date']}, {where['machine']}, {versions}", []).append(ROWS[name].text)
        lines.append(
            f"| {ROWS[name].text} | {ROWS[name].dtype} | {PROCESSES} | {row['validation_losses'][-1]:.4f} "
            f"| {np.mean(last):.4f} |"
        )
    for place, texts in places.items():
        lines += ["", place + (f": {'; '.join(texts)}" if len(places) > 1 else "")]
    if {"check-fsdp2", "check-ours"} <= set(rows):
        lines += ["", f"FSDP2 and ours in fp32, {CHECK_STEPS} steps: losses and norms at most {check(rows):.1e} apart."]
    if "fsdp2-a" in full:
        lines += _compare(full)
    return lines


def _compare(full: dict[str, Any]) -> list[str]:
    """How far every row is from FSDP2 with seed A."""
    lines = [
        "",
        f"How far losses are from those of {ROWS['fsdp2-a'].text}, in the mean and at most. Training losses are means "
        f"of {EVERY} steps; those of seed B are of other batches. Validation losses are of the same rows for all.",
        "",
        "| row | steps | training, mean | largest | validation, mean | largest |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    found = {
        (name, half): distances(full[name], full["fsdp2-a"], last_half=last_half)
        for name in full
        if name != "fsdp2-a"
        for half, last_half in HALVES.items()
    }
    for (name, half), numbers in found.items():
        lines.append(f"| {ROWS[name].text} | {half} | " + " | ".join(f"{one:.4f}" for one in numbers) + " |")
    if {"ours-a", "fsdp2-b"} <= set(full):
        within = all(
            mine <= spread
            for half in HALVES
            for mine, spread in zip(found["ours-a", half], found["fsdp2-b", half], strict=True)
        )
        lines += ["", f"Ours within the spread of two seeds of FSDP2 in every column: {'yes' if within else 'NO'}."]
    return lines


if __name__ == "__main__":
    main()
