"""What do sets cost? A layer's visits on one row that two processes compute together, and on their shares alone.

    python benchmarks/sets.py --out benchmarks/results/DATE-sets
    python benchmarks/sets.py --tokens 32768 --pairs 5 --out DIR

Half of a row's work is a process's own share of the tokens, forward and backward with all their gradients, attending to
as many keys as in the row. Alone, a process finds the keys of the other's tokens in its store from the beginning and
puts its own there as it computes them: no tokens run twice to their keys, nothing is gathered or summed up, and nobody
waits.

The processes have one thread each and do both ways in turn, so that drift of the machine hits both: a ratio is that of
neighbours, and the median of these counts. It is the speed of the set, by the clock of the slower process, over that of
the two that know nothing of each other, by the mean of theirs. Beside it stands the ratio of the seconds that the
processors worked for both, which other processes disturb less. The layer is that of ``chunks.py``, in fp32; between the
processes is gloo. Writes ``sets.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from chunks import Layer, config_of
from tawpipe.model.chunked import Chunk, KeyStore
from tawpipe.runtime.chunks import KeptAttention, LayerInChunks, spans_of
from tawpipe.runtime.rows import OnDevice, Rows
from tawpipe.runtime.sets import LayerInSet, SetTokens
from tawpipe.schedule.pieces import Ranges
from tawpipe_lab.rivals.fsdp_collectives import ring_reduce_scatter

RANKS = 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the row, which is one document")
    parser.add_argument("--chunks", type=int, nargs="*", default=[0, 4096], help="tokens of a chunk; 0: a whole share")
    parser.add_argument("--pairs", type=int, default=7, help="readings of both ways, after one that does not count")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1792)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


@dataclass(frozen=True)
class Alone(LayerInChunks):
    """A layer on some tokens of a row.

    Args:
        store: keys and values of all others.
        ranges: of the tokens.
    """

    store: KeyStore
    ranges: Ranges

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """The backward pass with keys that are there."""
        self._propagate(self._chunks(hidden), hidden, gradient, wanted=wanted, kept=kept)

    def _chunks(self, hidden: Rows) -> list[Chunk]:
        cut = ((begin, span) for begin, end in self.ranges for span in spans_of(end - begin, self.size))
        return [Chunk(self.store, begin + span.start, begin + span.stop) for begin, span in cut]


class Ways:
    """Both ways of one rank, on the same row."""

    def __init__(self, rank: int, args: argparse.Namespace, chunk: int) -> None:
        self.layer = Layer(config_of(argparse.Namespace(**vars(args), **LIKE_CHUNKS)), torch.float32)
        self.row, self.calls = self.layer.input(args.tokens)
        self.gradient = torch.randn(self.row.shape, generator=torch.Generator().manual_seed(1))
        self.dealt = SetTokens((args.tokens,), RANKS, rank)
        self.size = chunk or self.dealt.most
        self.own = self.of_own(self.row)
        with torch.no_grad():
            layer = self._set()
            layer.gather(self._gathered(layer))
        self.keys, self.values = layer.store.keys, layer.store.values

    def of_own(self, row: Tensor) -> Tensor:
        """This rank's tokens of a row."""
        return torch.cat([row[:, begin:end] for begin, end in self.dealt.own], dim=1)

    def together(self) -> Iterator[Callable[[], Tensor]]:
        """The forward and the backward visit in the set."""
        hidden = OnDevice(self.own)

        def forward() -> Tensor:
            layer, output = self._set(), torch.empty_like(self.own)
            layer.gather(self._gathered(layer))
            layer.forward(hidden, OnDevice(output))
            return output

        def backward() -> Tensor:
            layer, gradient = self._set(), self.of_own(self.gradient)
            layer.gather(self._gathered(layer))
            self._collect(lambda: layer.backward(hidden, gradient, wanted=True))
            sums = []
            for one in layer.key_gradients():
                sums.append(torch.empty_like(one[0]))
                ring_reduce_scatter(sums[-1].view(-1), one.view(-1), range(RANKS), dist.group.WORLD)
            self._collect(lambda: layer.keys_backward(hidden, sums, gradient), accumulate=True)
            return gradient

        yield from (forward, backward)

    def alone(self) -> Iterator[Callable[[], Tensor]]:
        """The same without a word to the other rank."""
        store = KeyStore(1, self.row.shape[1])
        store.keys, store.values = self.keys, self.values
        chain, hidden = self.layer.chain, OnDevice(self.row)
        layer = Alone(chain, 1, self.calls, self.size, no_draw, store, self.dealt.own)

        def forward() -> Tensor:
            output = torch.empty_like(self.row)
            layer.forward(hidden, OnDevice(output))
            return self.of_own(output)

        def backward() -> Tensor:
            gradient = self.gradient.clone()
            self._collect(lambda: layer.backward(hidden, gradient, wanted=True))
            return self.of_own(gradient)

        yield from (forward, backward)

    def timed(self, way: Callable[[], Iterator[Callable[[], Tensor]]]) -> dict[str, Any]:
        """Seconds of both visits by the clock, and of the processor; the sum of the output."""
        dist.barrier()
        clock, work, results = time.perf_counter(), time.process_time(), [visit() for visit in way()]
        seconds, worked = time.perf_counter() - clock, time.process_time() - work
        mine = {"seconds": seconds, "work": worked, "output": float(results[0].double().abs().sum())}
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, mine)
        return {name: [one[name] for one in found] for name in mine}

    def _set(self) -> LayerInSet:
        store, chain = KeyStore(1, self.row.shape[1]), self.layer.chain
        return LayerInSet(chain, 1, self.calls, self.size, no_draw, self.dealt, store)

    def _gathered(self, layer: LayerInSet) -> list[Tensor]:
        found = layer.keys(OnDevice(self.own))
        for one in found:
            dist.all_gather(list(one.unbind()), one[self.dealt.place].clone())
        return found

    def _collect(self, run: Callable[[], None], *, accumulate: bool = False) -> None:
        chain = self.layer.chain
        for unit in self.layer.units:
            chain.collect(unit, self.layer.gradients[unit], accumulate=accumulate, in_chunks=True)
        run()
        for unit in self.layer.units:
            chain.finish_collect(unit)


def no_draw(_: int, run: Callable[[], Tensor]) -> Tensor:
    """Runs without random numbers."""
    return run()


LIKE_CHUNKS: dict[str, Any] = {"attention": "grouped", "window": None}
"""What ``chunks.py`` asks about besides."""


def compared(ways: Ways, pairs: int) -> dict[str, Any]:
    """Both ways in turn."""
    readings = [[ways.timed(way) for way in (ways.together, ways.alone)] for _ in range(pairs + 1)][1:]
    middle = lambda value: statistics.median(value(one, two) for one, two in readings)  # noqa: E731
    first, second = readings[0]
    return {
        "set_s": middle(lambda one, _: max(one["seconds"])),
        "alone_s": middle(lambda _, two: statistics.mean(two["seconds"])),
        "speed": middle(lambda one, two: statistics.mean(two["seconds"]) / max(one["seconds"])),
        "of_work": middle(lambda one, two: sum(two["work"]) / sum(one["work"])),
        "difference": max(abs(a / b - 1) for a, b in zip(first["output"], second["output"], strict=True)),
        "readings": readings,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The readings as a page."""
    lines = [
        "| tokens | chunk | set of 2 s | 2 alone s | speed of the set | by processor time | outputs differ by |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['tokens']} | {row['chunk'] or 'share'} | {row['set_s']:.2f} | {row['alone_s']:.2f} | "
            f"{row['speed']:.3f} | {row['of_work']:.3f} | {row['difference']:.0e} |"
        )
    return "\n".join(lines)


def work(rank: int, args: argparse.Namespace, command: str, store: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    settings = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        **{name: value for name, value in vars(args).items() if name != "out"},
    }
    rows: list[dict[str, Any]] = []
    for chunk in args.chunks:
        rows.append({"tokens": args.tokens, "chunk": chunk} | compared(Ways(rank, args, chunk), args.pairs))
        if rank == 0:
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            text = json.dumps({"settings": settings, "rows": rows}, indent=1)
            (args.out / "sets.json").write_text(text + "\n", encoding="utf-8")
            (args.out / "table.md").write_text(f"`{command}`\n\n{table(rows)}\n", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    args.lengths = [args.tokens]
    with tempfile.TemporaryDirectory() as folder:
        given = args, shlex.join(["python", *sys.argv]), f"{folder}/store"
        spawn(work, given, nprocs=RANKS)


if __name__ == "__main__":
    main()
