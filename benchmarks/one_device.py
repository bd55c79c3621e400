"""One process on one device: what does it cost that weights could travel, where they do not have to?

    python benchmarks/one_device.py                                      # a small model on the CPU
    python benchmarks/one_device.py --model llama-8b --layers 4 --sequence-length 32768       # on a GPU

The same model, recomputation and precision in this project's runtime (``ours``), in a plain PyTorch loop (``plain``)
and under FSDP2 with one rank (``fsdp2``). Single steps alternate, so that drift of the machine hits all alike. Writes
``one-device.json`` into --out: seconds per step, tokens per second, MFU and, on CUDA, peak memory; for ours also the
memory that the schedule predicts (without the working set of a layer), the CPU time of the issuing thread per action,
and on CUDA the number of times that it waited for the device in a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import Pipeline
from tawpipe.model.build import PRESETS
from tawpipe.model.flops import mfu, peak_flops, training_flops
from tawpipe.runtime.optimizer import adamw
from tawpipe.schedule.settings import ScheduleSettings

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at one time, in all contenders."""
CUDA = torch.cuda.is_available()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="llama-1b" if CUDA else "tiny", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, help="so many of the model's layers; all by default")
    parser.add_argument("--vocabulary", type=int, help="tokens; the model's own by default")
    parser.add_argument("--sequence-length", type=int, default=4096 if CUDA else 512)
    parser.add_argument("--micro-batches", type=int, default=4, help="rows of a step; a micro-batch is one")
    parser.add_argument("--per-visit", type=int, default=2, help="micro-batches per visit of ours")
    parser.add_argument("--dtype", default="bfloat16" if CUDA else "float32", choices=["float32", "bfloat16"])
    parser.add_argument("--recompute", default="full", choices=["full", "none"])
    parser.add_argument("--compile", action="store_true", help="torch.compile every layer")
    parser.add_argument("--contenders", default="ours,plain,fsdp2", help="which of them, in what order")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("one-device"))
    return parser.parse_args()


class Ours:
    """This project's runtime in a world of one."""

    def __init__(self, config: LlamaConfig, args: argparse.Namespace) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        self.pipeline = Pipeline(
            model,
            optimizer=adamw(),
            schedule=ScheduleSettings(
                micro_batches_per_visit=args.per_visit, recompute=args.recompute, loss_chunk_tokens=CHUNK_TOKENS
            ),
            compile_layers=args.compile,
            dtype=getattr(torch, args.dtype),
        )
        self.shape = args.micro_batches, args.sequence_length
        self._issuing: list[float] = []
        self._waits: list[int] = []

    def step(self, ids: Tensor) -> float:
        if CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            begin = time.thread_time()
            result = self.pipeline.step({"input_ids": ids, "labels": ids})
            self._issuing.append(time.thread_time() - begin)
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
        self._waits.append(sum("synchroniz" in str(one.message) for one in said))
        self.pipeline.drain()
        return result.loss

    def notes(self) -> dict[str, Any]:
        actions = len(self.pipeline.schedule(self.shape[0]).programs[0])
        costs = self.pipeline.costs(*self.shape)
        return {
            "actions_per_step": actions,
            "issuing_thread_us_per_action": statistics.median(self._issuing) / actions * 1e6,
            "host_waits_per_step": statistics.median(self._waits) if CUDA else None,
            "predicted_gib": (costs.home_bytes + costs.buffer_bytes + costs.activation_bytes) / 2**30,
        }


class Plain:
    """A loop as one writes it: micro-batches, checkpointed layers, the loss in chunks, fp32 masters."""

    def __init__(self, config: LlamaConfig, args: argparse.Namespace) -> None:
        self.device, self.dtype = torch.device("cuda" if CUDA else "cpu"), getattr(torch, args.dtype)
        self.model: Any = LlamaForCausalLM(config).to(self.device)
        self.model.train()
        if args.recompute == "full":
            name = "activation_checkpointing_enable"  # older releases call it gradient_checkpointing_enable
            enable = getattr(self.model, name, None) or self.model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if args.compile:
            for layer in self.model.model.layers:
                layer.compile()
        self.parameters, self.masters = self.prepare()
        groups = [
            {"params": [p for p in self.masters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def prepare(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that compute, and those that are updated."""
        masters = list(self.model.parameters())
        if self.dtype == torch.float32:
            return masters, masters
        masters = [nn.Parameter(p.detach().clone()) for p in masters]
        return list(self.model.to(self.dtype).parameters()), masters

    def step(self, ids: Tensor) -> float:
        ids = ids.to(self.device)
        tokens = ids.shape[0] * (ids.shape[1] - 1)
        loss = sum(self.micro_batch(row, tokens) for row in ids.split(1))
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad(set_to_none=self.masters is not self.parameters)
        return float(loss)

    def micro_batch(self, row: Tensor, tokens: int) -> Tensor:
        hidden = self.model.model(input_ids=row, use_cache=False).last_hidden_state
        leaf = hidden.detach().requires_grad_()
        total = torch.zeros((), device=self.device)
        for begin in range(0, row.shape[1] - 1, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, row.shape[1] - 1)
            logits = self.model.lm_head(leaf[:, begin:end]).float()
            labels = row[:, begin + 1 : end + 1].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / tokens
            loss.backward()
            total += loss.detach()
        hidden.backward(leaf.grad)
        return total

    def notes(self) -> dict[str, Any]:
        return {}


class Fsdp2(Plain):
    """The same with ``fully_shard``: every layer a unit, weights cast by its mixed precision."""

    def prepare(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        dist.init_process_group("nccl" if CUDA else "gloo", rank=0, world_size=1)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for part in (*self.model.model.layers, self.model.model, self.model.lm_head):
            fully_shard(part, mp_policy=policy)
        shards = list(self.model.parameters())
        return shards, shards


def main() -> None:
    args = arguments()
    shape = PRESETS[args.model] | {"tie_word_embeddings": False, "max_position_embeddings": args.sequence_length}
    shape |= {"num_hidden_layers": args.layers} if args.layers else {}
    shape |= {"vocab_size": args.vocabulary} if args.vocabulary else {}
    config = LlamaConfig(**shape)
    torch.manual_seed(0)
    size = (args.micro_batches, args.sequence_length)
    steps = [torch.randint(0, config.vocab_size, size) for _ in range(args.warmup + args.steps)]
    makers = {"ours": Ours, "plain": Plain, "fsdp2": Fsdp2}
    contenders, held = {}, {}
    for name in args.contenders.split(","):
        before = torch.cuda.memory_allocated()
        contenders[name] = makers[name](copy.deepcopy(config), args)  # ours sets its attention in it
        held[name] = torch.cuda.memory_allocated() - before
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, list[int]] = {name: [] for name in contenders}
    for number, ids in enumerate(steps):
        for name, contender in contenders.items():
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            loss = contender.step(ids)
            taken = time.perf_counter() - begin
            held[name] += torch.cuda.memory_allocated() - before  # what the first step made to stay
            if number >= args.warmup:
                seconds[name].append(taken)
                losses[name].append(loss)
                peaks[name].append(torch.cuda.max_memory_allocated() - before + held[name])
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {os.cpu_count()} processors"
    rows = []
    for name, contender in contenders.items():
        median = statistics.median(seconds[name])
        rows.append(
            {
                "contender": name,
                "seconds_per_step": {"median": median, "min": min(seconds[name]), "max": max(seconds[name])},
                "tokens_per_second": size[0] * size[1] / median,
                "mfu": mfu(_flops(config, size), median, peak=peak_flops(device, args.dtype), num_devices=1),
                "peak_gib": max(peaks[name]) / 2**30 if CUDA else None,
                "losses": losses[name],
                **contender.notes(),
            }
        )
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "losses"}))
    environment = {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{device}, {torch.get_num_threads()} threads",
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "settings": vars(args) | {"out": str(args.out)}, "rows": rows}
    (args.out / "one-device.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def _flops(config: LlamaConfig, size: tuple[int, int]) -> float:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    computing = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    return training_flops(
        matmul_parameters=computing,
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * (config.hidden_size // config.num_attention_heads),
        lengths=[size[1]] * size[0],
    )


if __name__ == "__main__":
    main()
