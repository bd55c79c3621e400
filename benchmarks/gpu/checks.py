"""Checks over NCCL, several ranks on one GPU: some of ``tawpipe prove``, and what that does not run.

    python -m gpu.ranks 1 2 90 gpu.checks slices generate               # two ranks
    python -m gpu.ranks 2 2 90 gpu.checks sum exact nf4                 # two nodes of two
    python -m gpu.ranks 2 2 130 gpu.checks --out order.json prove:sets,order
    python -m gpu.ranks 2 2 150 gpu.checks --out bits.json --strategies flat,1f1b prove:waits,bits
    python -m gpu.checks serve                                          # one process

Words: ``sum`` (time of a small sum), ``slices`` (of documents, in pipelines), ``generate`` (texts from stages),
``exact`` (changed weights, coded without loss), ``nf4`` (LoRA on 4 bits), ``serve`` (texts in bf16),
``prove:CHECK,CHECK``. Each prints a line that begins with ``holds`` or ``FAILS``.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gpu.common import in_words
from tawpipe import CheckSettings, Pipeline, TrainingSettings
from tawpipe.model.batch import MicroBatch
from tawpipe.prove import exactness
from tawpipe.prove.models import alone, llama, rows, seeded_model, small
from tawpipe.prove.run import prove
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.settings import ScheduleSettings

LENGTHS = (40, 3, 9, 1, 17, 6, 12)
"""Tokens of documents, of which the longest pass stages in slices."""
PROMPTS = (1, 3, 17, 64, 300, 700, 129, 2)
"""Tokens of the prompts of ``serve``."""
APART, LOSSES_APART = 1e-6, 2e-2
"""Largest relative difference of gradients in fp64, and largest difference of losses in bf16."""


def frozen_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that changes nothing."""
    return torch.optim.SGD(parameters, lr=0.0)


def fp64(world: World, model: Any, **arguments: Any) -> Pipeline:
    """Make a pipeline whose numbers can be compared."""
    return Pipeline(
        model,
        world=world,
        dtype=torch.float64,
        optimizer=frozen_sgd,
        checks=CheckSettings(check="never"),
        **{"training": TrainingSettings(clip_norm=None), **arguments},
    )


def sum_over_ranks(world: World) -> str:
    """Time a sum of 4 KiB over all ranks."""
    values = torch.ones(1024, device=world.device)
    dist.all_reduce(values)
    begin = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(values)
        values.sum().item()
    return f"4 KiB over {world.size} ranks: {(time.perf_counter() - begin) * 100:.1f} ms"


def slices(world: World) -> str:
    """Compare gradients of documents that pass two stages in slices with those of a plain model."""
    generator, apart = torch.Generator().manual_seed(3), list[str]()
    ids = [torch.randint(0, 500, (1, length), generator=generator) for length in LENGTHS]
    documents = [MicroBatch.of_documents(row, row, [row.shape[1]]) for row in ids]
    model: Any = seeded_model(small())
    plain = model.to(world.device, torch.float64)
    tokens = sum(length - 1 for length in LENGTHS)
    for row in ids:
        logits = plain(row.to(world.device)).logits[0, :-1]
        (F.cross_entropy(logits, row[0, 1:].to(world.device), reduction="sum") / tokens).backward()
    for strategy in ("1f1b", "zero-bubble", "generated"):
        settings = ScheduleSettings(strategy=strategy, loss_chunk_tokens=6)
        pipeline = fp64(
            world, seeded_model(small()), training=TrainingSettings(clip_norm=None, bin_tokens=16), schedule=settings
        )
        bins = pipeline.deal(LENGTHS)
        cut = sum(sum(some) for some in bins.slices or ())
        for _ in range(2):
            pipeline.step(pipeline.part_of_documents(LENGTHS, documents.__getitem__, bins))
        pipeline.drain()
        pairs = [(pipeline.gradient(name), value.grad.cpu()) for name, value in plain.named_parameters()]
        most = max((_relative(got, wanted) for got, wanted in pairs if got is not None), default=0.0)
        pipeline.close()
        assert world.rank or (most < APART and cut > 1), f"{strategy}: {most:.1e} apart, {cut} slices"
        apart.append(f"{strategy} {most:.1e} apart ({cut} slices)")
    return ", ".join(apart)


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def generate(world: World) -> str:
    """Compare greedy texts from stages in fp64 with those of transformers."""
    model: Any = seeded_model(small())
    plain = copy.deepcopy(model).to(world.device, torch.float64).eval()
    pipeline = fp64(world, model)
    prompts = [[1, 2, 3], [7] * 11, [5, 4], list(range(100, 130)), [9]]
    texts, wrong = pipeline.generate(prompts, 12, temperature=0.0), 0
    pipeline.close()
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt], device=world.device)
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, plain(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        wrong += tuple(ids[0, len(prompt) :].tolist()) != tuple(text.ids)
    assert not wrong, f"{wrong} of {len(prompts)} texts differ"
    return f"{len(prompts)} texts equal"


def exact(world: World) -> str:
    """Compare weights after four steps, whose changes travel coded, with weights that travel as they are."""
    kept, share = dict[str, list[Tensor | None]](), 0.0
    for compression in ("none", "exact"):
        settings = ScheduleSettings(strategy="tawpipe-step", weights_compression=compression)
        optimizer = adamw(1e-4)
        pipeline = Pipeline(
            seeded_model(small()),
            optimizer=optimizer,
            dtype=torch.bfloat16,
            checks=CheckSettings(check="never"),
            world=world,
            schedule=settings,
        )
        pipeline.executor.refresh.check_every = 2
        for number in range(4):
            pipeline.step(rows(small(), 2 * world.size, 48, seed=number))
        pipeline.check_copies()
        kept[compression] = [pipeline.parameter(name) for name in pipeline.parameter_names]
        refresh = pipeline.executor.refresh
        share, healed = refresh.sent.share(), refresh.healed
        pipeline.close()
        assert not healed, f"copies differ: {healed}"
    if world.rank:
        return ""
    same = [torch.equal(*pair) for pair in zip(*kept.values(), strict=True)]  # type: ignore[arg-type]
    assert all(same), f"{sum(same)} of {len(same)} parameters have the same bits"
    return f"all {len(same)} parameters have the same bits; {share:.0%} of the bytes were sent"


def nf4(world: World) -> str:
    """Compare losses of LoRA on 4 bits over all ranks with those of one process, in bf16."""
    import peft

    losses = dict[str, list[float]]()
    for where, at in (("alone", alone(world.device)), ("together", world)):
        if where == "alone" and world.rank:
            continue
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        settings = ScheduleSettings(strategy="tawpipe-spread")
        pipeline = Pipeline(
            peft.get_peft_model(seeded_model(small()), config),
            optimizer=adamw(1e-2),
            dtype=torch.bfloat16,
            checks=CheckSettings(check="never"),
            world=at,
            training=TrainingSettings(quantize="nf4"),
            schedule=settings,
        )
        losses[where] = [pipeline.step(rows(small(), 2 * world.size, 48, seed=n)).loss for n in range(4)]
        pipeline.close()
    if world.rank:
        return ""
    most = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
    assert most < LOSSES_APART, losses
    return f"losses at most {most:.1e} apart"


def serve(world: World, hidden: int = 1024) -> str:
    """Compare texts in bf16 with transformers' logits for them in bf16 and in fp32."""
    if world.device.type != "cuda":
        hidden = 128
    model: Any = seeded_model(llama(hidden=hidden, layers=4, heads=8, vocabulary=2000))
    with torch.no_grad():  # weights that bf16 has
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    plain = {kind: copy.deepcopy(model).to(world.device, kind).eval() for kind in (torch.float32, torch.bfloat16)}
    pipeline = Pipeline(model, dtype=torch.bfloat16, checks=CheckSettings(check="never"), world=world)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 2000, (length,), generator=generator).tolist() for length in PROMPTS]
    texts, theirs, ours = pipeline.generate(prompts, 24, temperature=0.0), 0.0, 0.0
    pipeline.close()
    for prompt, text in zip(prompts, texts, strict=True):
        ids, drawn = torch.tensor([prompt + list(text.ids)], device=world.device), torch.tensor(text.ids)
        with torch.no_grad():
            logits = {kind: one(ids).logits[0, len(prompt) - 1 : -1].float() for kind, one in plain.items()}
        chances = {
            kind: some.log_softmax(-1).gather(1, drawn.to(world.device)[:, None])[:, 0].cpu()
            for kind, some in logits.items()
        }
        wide, narrow = chances.values()
        ours = max(ours, float((torch.tensor(text.logprobs) - wide).abs().max()))
        theirs = max(theirs, float((narrow - wide).abs().max()))
    words = f"logprobs {ours:.1e} from fp32, transformers' own in bf16 {theirs:.1e}"
    assert ours <= 2 * theirs + 1e-2, words
    return words


CHECKS: dict[str, Callable[[World], str]] = {
    "sum": sum_over_ranks,
    "slices": slices,
    "generate": generate,
    "exact": exact,
    "nf4": nf4,
    "serve": serve,
}


def proved(world: World, names: list[str], args: argparse.Namespace) -> str:
    """Run checks of ``tawpipe prove``, on some strategies if ``--strategies`` names them."""
    if args.strategies:
        exactness._names = lambda: args.strategies.split(",")
    exactness.STEPS = args.steps or exactness.STEPS
    assert not prove(world, args.out, only=names).failed, f"see {args.out}"
    return "see above"


def main() -> None:
    """Run the checks that the command line names, until one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checks", nargs="+", help=f"{', '.join(CHECKS)}, prove:CHECK,CHECK")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("prove.json"), help="of prove:...")
    parser.add_argument("--strategies", default="", help="of prove:...; all by default")
    parser.add_argument("--steps", type=int, default=0, help="of the check bits")
    args = parser.parse_args()
    world = connect(device=args.device)
    for name in args.checks:
        begin = time.perf_counter()
        kind, _, names = name.partition(":")
        try:
            words = proved(world, names.split(","), args) if kind == "prove" else CHECKS[kind](world)
        except Exception as error:
            if world.rank == 0:
                traceback.print_exc()
            print(f"FAILS {name}: {in_words(error)} (rank {world.rank})", flush=True)
            os._exit(1)  # others may be in the middle of it
        if world.rank == 0:
            print(f"holds {name}: {words} ({time.perf_counter() - begin:.0f} s)", flush=True)
    world.leave()


if __name__ == "__main__":
    main()
