"""What coding without loss takes and saves: bits, seconds and time of the processor, on numbers of a real run.

    python benchmarks/coding.py --out benchmarks/results/DATE-coding
    python benchmarks/coding.py --record FOLDER

A small Llama is trained on this project's own text, with bf16 weights, fp32 masters and AdamW, by one core. Of its
weights the changes from step to step are coded, of its gradients sums of so many micro-batches. ``--record`` keeps the
weights of the steps in FOLDER/RATE.pt, for the lab's suite ``exact``, instead.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.runtime.transport.exact import CODED, best_form, changes, decode_change, encode_change
from tawpipe.runtime.transport.exact_gradients import decode_gradient, encode_gradient
from tawpipe.schedule.spec import coded_bytes

VOCABULARY, LENGTH, ROWS, SUMMANDS = 4096, 128, 8, (1, 2, 4, 8, 16, 32)
ROOT = Path(__file__).parents[1]


def tokens() -> Tensor:
    """This project's sources and pages, by a vocabulary of their own."""
    files = [*sorted(ROOT.glob("src/**/*.py")), *sorted(ROOT.glob("docs/*.md"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return torch.tensor([number for text in texts for number in tokenizer.encode(text).ids])


class Run:
    """A training run of one process: fp32 masters, and a model in bf16 that computes."""

    def __init__(self, text: Tensor, rate: float) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        model: Any = LlamaForCausalLM(config)
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self.model, self._text = model.bfloat16(), text
        self._optimizer = torch.optim.AdamW(self.masters, rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._dice = torch.Generator().manual_seed(1)

    def weights(self) -> Tensor:
        """All of them, bf16."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def units(self) -> list[int]:
        """Elements of what travels as one: the embedding, every layer, the head with its norm."""
        inside, model = self.model.model, self.model
        parts = ([inside.embed_tokens], *([layer] for layer in inside.layers), [inside.norm, model.lm_head])
        return [sum(weight.numel() for part in unit for weight in part.parameters()) for unit in parts]

    def gradients(self, count: int) -> list[Tensor]:
        """Of so many micro-batches, in bf16."""
        found = []
        for _ in range(count):
            begins = torch.randint(0, len(self._text) - LENGTH, (ROWS,), generator=self._dice)
            rows = torch.stack([self._text[begin : begin + LENGTH] for begin in begins])
            self.model(input_ids=rows, labels=rows).loss.backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]))
            self.model.zero_grad()
        return found

    def step(self) -> None:
        """One micro-batch, clipped as usual."""
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        for master, part in zip(self.masters, self.gradients(1)[0].float().split(sizes), strict=True):
            master.grad = part.view_as(master)
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)


def timed(run: Callable[[], object], elements: int) -> float:
    """Nanoseconds of the processor for an element, the best of three."""
    taken = []
    for _ in range(3):
        begin = time.process_time()
        run()
        taken.append(time.process_time() - begin)
    return 1e9 * min(taken) / elements


def of_changes(text: Tensor, rate: float, steps: int) -> dict[str, Any]:
    """Bits and times of the changes of every step."""
    run, bits = Run(text, rate), list[float]()
    before = run.weights()
    for step in range(steps):
        run.step()
        home = run.weights()
        sent = 0
        for new, old in zip(home.split(run.units()), before.split(run.units()), strict=True):
            sent += best_form(changes(new, old).tolist(), new.numel()).message_bytes(new.numel())
        bits.append(8 * sent / home.numel())
        if step < steps - 1:
            before = home
    row: dict[str, Any] = {"rate": rate, "mean_bits": statistics.mean(bits), "most_bits": max(bits), "bits": bits}
    counts = changes(home, before).tolist()
    form = best_form(counts, home.numel())
    row["zeros"], row["count_ns"] = 1 - counts[0] / home.numel(), timed(lambda: changes(home, before), home.numel())
    if form.bits in CODED:
        message = torch.empty(form.message_bytes(home.numel()), dtype=torch.uint8)
        row["write_ns"] = timed(lambda: encode_change(home, before, form, message), home.numel())
        copy = before.clone()
        decode_change(message, form, copy)
        assert torch.equal(copy.view(torch.int16), home.view(torch.int16))
        row["read_ns"] = timed(lambda: decode_change(message, form, copy), home.numel())
    return row


def of_sums(text: Tensor, steps: int) -> list[dict[str, Any]]:
    """Bits and times of sums of gradients in fp32, and of gradients in bf16, after some steps."""
    run = Run(text, 3e-4)
    for _ in range(steps):
        run.step()
    each, rows = run.gradients(max(SUMMANDS)), list[dict[str, Any]]()
    sums = [("fp32", count, torch.stack(each[:count]).float().sum(0)) for count in SUMMANDS]
    for kind, count, values in [*sums, ("bf16", 1, each[0])]:
        room = torch.empty(coded_bytes(values.numel(), values.itemsize), dtype=torch.uint8)
        target, used = torch.empty_like(values), encode_gradient(values, room)
        decode_gradient(room, target)
        assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))
        row = {"kind": kind, "summands": count, "bits": 8 * used / values.numel(), "plain_bits": 8 * values.itemsize}
        row["write_ns"] = timed(lambda values=values, room=room: encode_gradient(values, room), values.numel())
        row["read_ns"] = timed(lambda target=target, room=room: decode_gradient(room, target), values.numel())
        rows.append(row)
    return rows


def even_mbit(row: dict[str, Any], spared_bits: float) -> float:
    """Mbit/s of the link below which a core codes faster than it carries what is spared, one after the other."""
    return 1e3 * spared_bits / sum(row.get(name, 0.0) for name in ("count_ns", "write_ns", "read_ns"))


def table(environment: dict[str, Any], weights: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"{environment['date']}, `{environment['command']}`, one core; ns of the processor for an element",
        "",
        "| weights, learning rate | bits of 16: mean | most | count | write | read | gains below Mbit/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in weights:
        times = " | ".join(f"{row[name]:.1f}" if name in row else "-" for name in ("count_ns", "write_ns", "read_ns"))
        gains = f"{even_mbit(row, 16 - row['mean_bits']):.0f}" if "write_ns" in row else "-"
        lines.append(f"| {row['rate']:.0e} | {row['mean_bits']:.2f} | {row['most_bits']:.2f} | {times} | {gains} |")
    lines += [
        "",
        "| gradients, sums of | bits | of | write | read | gains below Mbit/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in gradients:
        gains = even_mbit(row, row["plain_bits"] - row["bits"])
        lines.append(
            f"| {row['summands']}, {row['kind']} | {row['bits']:.1f} | {row['plain_bits']} | {row['write_ns']:.1f} "
            f"| {row['read_ns']:.1f} | {gains:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("exact"))
    parser.add_argument("--record", type=Path, help="keep weights there, and measure nothing")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4, 3e-4, 1e-3, 2e-3])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = tokens()
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        for rate in args.rates:
            run = Run(text, rate)
            weights = [run.weights()]
            for _ in range(args.steps):
                run.step()
                weights.append(run.weights())
            torch.save(torch.stack(weights), args.record / f"{rate:.0e}.pt")
            print(args.record / f"{rate:.0e}.pt", flush=True)
        return
    environment = {
        "versions": {"torch": torch.__version__},
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    content = {"environment": environment, "gradients": of_sums(text, args.steps)}
    content["weights"] = [of_changes(text, rate, args.steps) for rate in args.rates]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "exact.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = table(environment, content["weights"], content["gradients"])
    (args.out / "table.md").write_text(lines, encoding="utf-8")
    print(lines)


if __name__ == "__main__":
    main()
