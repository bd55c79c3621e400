"""How close are the modelled seconds of a bin? One layer, bins of documents of all kinds, measured and modelled.

    python benchmarks/bins.py --out benchmarks/results/DATE-bins

A profile is measured as ``tawpipe plan`` does it, on rows of ``--measured`` tokens at most. What it says of bins that
are up to many times as large is compared with what they take, forward and backward, of a layer that sees everything and
of one with a window. On CPUs the seconds are those of the process, so that others on the same processors disturb less.
Writes ``table.md`` and ``bins.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MistralConfig

from tawpipe.model.chain import Chain
from tawpipe.plan.bench import Bench
from tawpipe.plan.dealt import in_turn
from tawpipe.plan.lengths import lengths_of
from tawpipe.plan.profile import Clock, measure, size_of
from tawpipe.schedule.balance import LayerTime

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOW = time.perf_counter if HERE.type == "cuda" else time.process_time
LAYER = 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--measured", type=int, default=1024, help="tokens of the longest row of the profile")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest document")
    parser.add_argument("--bins", type=int, default=3, help="drawn from lognormal:6.35,2.33, besides those made up")
    parser.add_argument("--passes", type=int, default=3, help="of which the medians count")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def chain_of(args: argparse.Namespace, window: int | None) -> Chain:
    """A layer like Mistral's, with heads of 32, between an embedding and a head."""
    config = MistralConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=1,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        sliding_window=window,
        max_position_embeddings=args.longest,
    )
    return Chain(AutoModelForCausalLM.from_config(config))


def bins_of(args: argparse.Namespace) -> list[list[int]]:
    """Documents of bins: long ones, short ones, and both, of all sums up to ``longest``; and some drawn."""
    most = args.longest
    made = [[most], [most // 2], [most // 2] * 2, [most // 4], [most // 8] * 8, [most // 32] * 32, [most // 64] * 16]
    made += [[most // 2, *[most // 64] * 32], [most // 4, *[most // 128] * 16]]
    drawn = lengths_of("lognormal:6.35,2.33").cut(most).step(8 * args.bins * most, 0)
    packed = in_turn(drawn, 1, most, LayerTime(()))
    bins = [[packed.lengths[number] for number in one.documents] for row in packed.single for one in row]
    return made + [one for one in bins if len(one) > 1][: args.bins]


def readings(args: argparse.Namespace, window: int | None) -> list[dict[str, Any]]:
    """Every bin, modelled and measured; of both the median of a few passes, in which they take turns."""
    dtype, bins, windows = getattr(torch, args.dtype), bins_of(args), [window] if window else []
    sizes = [size_of(lengths, windows).seen(window) for lengths in bins]
    modelled: list[list[float]] = [[] for _ in bins]
    measured: list[list[float]] = [[] for _ in bins]
    for _ in range(args.passes):
        profile = measure(chain_of(args, window), dtype=dtype, device=HERE, tokens=args.measured, packed=True, now=NOW)
        cost = profile.blocks[LAYER]
        clock = Clock(Bench(chain_of(args, window), HERE, dtype, 1024), now=NOW)
        for number, lengths in enumerate(bins):
            modelled[number].append(cost.forward.of(sizes[number]) + cost.backward.of(sizes[number]))
            measured[number].append(sum(clock.seconds(LAYER, lengths)))
            print(window, lengths[:4], modelled[number][-1], measured[number][-1], flush=True)
    said, took = map(statistics.median, modelled), map(statistics.median, measured)
    return [
        {
            "window": window,
            "documents": len(lengths),
            "longest": max(lengths),
            "tokens": sum(lengths),
            "modelled_s": one,
            "measured_s": other,
            "error": one / other - 1,
        }
        for lengths, one, other in zip(bins, said, took, strict=True)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The readings as a page."""
    lines = [
        "| window | documents | the longest | tokens | modelled s | measured s | error |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {row['window'] or 'none'} | {row['documents']} | {row['longest']} | {row['tokens']} | "
        f"{row['modelled_s']:.4f} | {row['measured_s']:.4f} | {row['error']:+.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rows = [row for window in (None, args.window) for row in readings(args, window)]
    errors = [abs(row["error"]) for row in rows]
    where = torch.cuda.get_device_name(HERE) if HERE.type == "cuda" else platform.processor() or platform.machine()
    command = shlex.join(["python", "benchmarks/bins.py", *sys.argv[1:]])
    words = f"Error of {len(rows)} bins: median {statistics.median(errors):.1%}, largest {max(errors):.1%}."
    page = f"# Modelled and measured seconds of bins\n\n{words} `{command}`, torch {torch.__version__}, {where}.\n\n"
    (args.out / "table.md").write_text(page + table(rows) + "\n", encoding="utf-8")
    (args.out / "bins.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(words)


if __name__ == "__main__":
    main()
