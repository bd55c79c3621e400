"""What do chunks cost? One layer's visits, forward and backward, in chunks of a row and on the whole row.

    python benchmarks/chunks.py --out benchmarks/results/DATE-chunks
    python benchmarks/chunks.py --lengths 32768 --pairs 1 --threads 2 --out DIR

The layer is that of a Llama; its forward visit keeps its input and its backward visit computes it again, as the runtime
does (``runtime/compute/``), with weights in one buffer and their gradients collected in another. Both ways alternate
in one process, so that drift of the machine hits both: a ratio is that of neighbours, and the median of these counts.
Beside the seconds of the clock stand those that the processors worked for this process, which other processes disturb
less. The memory is the most that came and went during the two visits, the layer's keys, values and their gradients and
the scratch of kernels included; the row's input, output and gradient are not. Writes ``chunks.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PretrainedConfig

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.weights import InitSource
from tawpipe.runtime.compute.chunks import LayerInChunks
from tawpipe.runtime.compute.rows import OnDevice
from tawpipe.runtime.peak import peaks

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768], help="tokens of the row")
    parser.add_argument("--chunks", type=int, nargs="*", default=[1024, 2048, 4096], help="tokens of a chunk")
    parser.add_argument("--threads", type=int, nargs="*", default=[torch.get_num_threads()])
    parser.add_argument("--pairs", type=int, default=3, help="readings of both ways, after one that does not count")
    parser.add_argument("--attention", default="grouped", choices=["grouped", "latent"], help="latent: DeepSeek's MLA")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1792)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--window", type=int, help="tokens of a sliding window")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    """A model of one layer."""
    shape: dict[str, Any] = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": 128,
        "max_position_embeddings": max(args.lengths),
    }
    if args.attention == "latent":
        head = args.hidden // args.heads
        shape |= {"num_key_value_heads": args.heads, "q_lora_rank": args.hidden // 2, "kv_lora_rank": args.hidden // 4}
        shape |= {"qk_nope_head_dim": head, "qk_rope_head_dim": head // 2, "v_head_dim": head}
        return DeepseekV3Config(**shape, first_k_dense_replace=1, num_mtp_layers=0)
    if args.window:
        return transformers.MistralConfig(**shape, sliding_window=args.window)
    return LlamaConfig(**shape)


class Layer:
    """The only layer of a model, its weights and the gradients of these."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.chain = Chain(model)
        source = InitSource(self.chain, 0)
        values = [source.unit(unit, dtype=dtype).to(HERE) for unit in self.chain.units]
        self.chain.prepare(HERE, dtype)
        self.units = self.chain.blocks[1].units
        self.gradients = {unit: torch.empty_like(values[unit]) for unit in self.units}
        for unit, value in enumerate(values):
            self.chain.bind(unit, value)
        self.chain.find_tokens()

    def input(self, length: int) -> tuple[Tensor, Any]:
        """Hidden states of one document, and the layer's call."""
        ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(0))
        batch = MicroBatch.of_documents(ids, ids, (length,)).to(HERE)
        with torch.no_grad():
            return self.chain.embed(batch)

    def visits(self, hidden: Tensor, calls: Any, gradient: Tensor, chunk: int) -> list[Callable[[], Tensor | None]]:
        """The forward and the backward visit; ``chunk`` 0 for the whole row. In chunks ``gradient`` is replaced."""
        layer = LayerInChunks(self.chain, 1, calls, chunk, lambda _, run: run())

        def forward() -> Tensor:
            if not chunk:
                with torch.no_grad():
                    return self.chain.layer(1, hidden, calls)
            output = torch.empty_like(hidden)
            layer.forward(OnDevice(hidden), OnDevice(output))
            return output

        def backward() -> Tensor | None:
            for unit in self.units:
                self.chain.collect(unit, self.gradients[unit], accumulate=False, in_chunks=chunk > 0)
            if chunk:
                layer.backward(OnDevice(hidden), gradient, wanted=True)
                found = gradient
            else:
                leaf = hidden.detach().requires_grad_()
                self.chain.layer(1, leaf, calls).backward(gradient)
                found = leaf.grad
            for unit in self.units:
                self.chain.finish_collect(unit)
            return found

        return [forward, backward]


def timed(layer: Layer, hidden: Tensor, calls: Any, chunk: int) -> dict[str, Any]:
    """Seconds of both visits by the clock, and of the processors; the sums of what they give."""
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    clock, work, sums = [time.perf_counter()], [time.process_time()], []
    for visit in layer.visits(hidden, calls, gradient, chunk):
        result = visit()
        if HERE.type == "cuda":
            torch.cuda.synchronize()
        clock.append(time.perf_counter())
        work.append(time.process_time())
        assert result is not None
        sums.append(float(result.double().abs().sum()))
    sums += [float(one.double().abs().sum()) for one in layer.gradients.values()]
    forward, backward = clock[1] - clock[0], clock[2] - clock[1]
    return {"forward": forward, "backward": backward, "work": work[2] - work[0], "sums": sums}


def peak(layer: Layer, hidden: Tensor, calls: Any, chunk: int) -> int:
    """Bytes of tensors that came and went, at the highest: of the output and the input's gradient those too that a
    visit on the whole row makes anew, less one row's output, which both make.
    """
    gradient = torch.ones_like(hidden)
    readings = peaks(layer.visits(hidden, calls, gradient, chunk), HERE)
    return max(one.most - one.before for one in readings) - hidden.nbytes


def table(rows: list[dict[str, Any]]) -> str:
    """The readings as a page."""
    lines = [
        "| threads | tokens | chunk | whole row s | in chunks s | ratio | of processor time | backward alone "
        "| whole row MiB | in chunks MiB | sums differ by |",
        "| --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['threads']} | {row['tokens']} | {row['chunk']} | {row['whole_s']:.2f} | {row['chunks_s']:.2f} | "
            f"{row['ratio']:.3f} | {row['work_ratio']:.3f} | {row['backward_ratio']:.3f} | "
            f"{row['whole_bytes'] / 2**20:.0f} | {row['chunks_bytes'] / 2**20:.0f} | {row['difference']:.0e} |"
        )
    return "\n".join(lines)


def compared(layer: Layer, length: int, chunk: int, pairs: int) -> dict[str, Any]:
    """Both ways in turn, on rows of ``length`` tokens."""
    hidden, calls = layer.input(length)
    row = {"tokens": length, "chunk": chunk, "threads": torch.get_num_threads()}
    row |= {name: peak(layer, hidden, calls, size) for name, size in (("whole_bytes", 0), ("chunks_bytes", chunk))}
    readings = [[timed(layer, hidden, calls, size) for size in (0, chunk)] for _ in range(pairs)]
    total = lambda reading: reading["forward"] + reading["backward"]  # noqa: E731
    middle = lambda value: statistics.median(value(whole, cut) for whole, cut in readings)  # noqa: E731
    return row | {
        "whole_s": middle(lambda whole, _: total(whole)),
        "chunks_s": middle(lambda _, cut: total(cut)),
        "ratio": middle(lambda whole, cut: total(cut) / total(whole)),
        "backward_ratio": middle(lambda whole, cut: cut["backward"] / whole["backward"]),
        "work_ratio": middle(lambda whole, cut: cut["work"] / whole["work"]),
        "difference": max(abs(a / b - 1) for a, b in zip(readings[0][0]["sums"], readings[0][1]["sums"], strict=True)),
        "readings": readings,
    }


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    layer = Layer(config_of(args), getattr(torch, args.dtype))
    content: dict[str, Any] = {
        "settings": {
            "command": shlex.join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "device": HERE.type,
            **{name: value for name, value in vars(args).items() if name != "out"},
        },
        "rows": [],
    }
    rows: list[dict[str, Any]] = content["rows"]
    for threads in args.threads:
        torch.set_num_threads(threads)
        for length in args.lengths:
            for chunk in args.chunks:
                rows.append(compared(layer, length, chunk, args.pairs))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                (args.out / "chunks.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                page = f"`{content['settings']['command']}`\n\n{table(rows)}\n"
                (args.out / "table.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
