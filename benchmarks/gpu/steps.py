"""Time training steps of a Llama on one device: seconds, MFU, memory, and the host's part, ours beside others.

    python -m gpu.steps "side=ours shape=1b tokens=4096 rows=4 recompute=none" "side=plain shape=1b" ...

Each text is one measurement with the settings that it names (``Setting``); the others have their defaults. Sides: ours;
plain, a loop with transformers' checkpointing, a loss in chunks, fp32 masters and fused AdamW; fsdp2, torch's sharding
of one rank. ``side=plain recompute=none micro=4 liger=1 fused_loss=1`` is the strongest plain loop where it fits. The
FLOPs of all sides are counted by one formula. Prints a line of JSON for each. An error, out of memory too, is such a
line, and the next measurement begins.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers.models.llama.modeling_llama as modeling
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpu.common import in_words, say, wait
from tawpipe import CheckSettings, Pipeline, TrainingSettings
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import PRESETS
from tawpipe.model.flops import chain_flops, mfu, peak_flops
from tawpipe.plan.cost.profile import clock_mhz
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.settings import ScheduleSettings

SHAPES = {"tiny": "tiny", "1b": "llama-1b", "8b": "llama-8b"}
LOSS_TOKENS = 2048
"""Positions whose logits the other sides have at one time."""
WARM_TOKENS = 256
KINDS = (
    ("products", r"gemm|cutlass|nvjet|s16816|wgmma|xmma|cublas|dot_kernel"),
    ("attention", r"flash|fmha|cudnn.*sdpa|sdpa|attention"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("optimizer and norm", r"FusedAdam|fused_adam|multi_tensor|foreach|lpnorm"),
    ("embedding", r"embedding|index_select|indexSelect"),
    ("copies", r"memcpy|memset|copy_kernel|direct_copy|bfloat16_copy|CatArray|fill"),
    ("sums", r"reduce"),
    ("element by element", r"elementwise|triton|vectorized|rms|silu|rope"),
)
"""Kinds of kernels, and what their names contain; the first that fits counts."""
PLAIN = modeling.LlamaRMSNorm.forward, modeling.LlamaMLP.forward, modeling.apply_rotary_pos_emb
"""The functions of transformers in whose place Liger's are put: norm, gate and rotary angles."""


@dataclass(frozen=True)
class Setting:
    """One measurement.

    Args:
        side: ours, plain or fsdp2.
        shape: tiny, 1b or 8b, with untied embeddings; 8b:4 has four of the layers.
        tokens, rows: of a row, and rows of a step.
        micro: rows of a micro-batch.
        lora: rank of adapters; 0 trains everything.
        nf4: 1 keeps frozen weights in 4 bits (ours).
        recompute: full, selective, none, or a list by layers (ours); full or none (others).
        visit: micro-batches of a visit (ours).
        chunk: tokens of a chunk of a row (ours); 0 computes whole rows.
        offload: layers whose inputs wait in the host's memory (ours).
        homes: none, state or all in the host's memory (ours).
        loss: positions whose logits exist at one time; 0 for the default.
        liger: 1 takes Liger's kernels for norms, rotary angles and the gate.
        fused_loss: 1 takes Liger's head with cross-entropy, which keeps no logits, instead of chunks (others).
        compile: 1 compiles every layer.
        steps, warm: measured steps, and steps before them.
        short: 1 begins with a step of short rows, in the place of warm ones that would take long.
        profile: 1 lists the kernels of one more step.
        most: GiB that it may take; 0 for all there is.
    """

    side: str = "ours"
    shape: str = "1b"
    tokens: int = 4096
    rows: int = 4
    micro: int = 1
    lora: int = 0
    nf4: int = 0
    recompute: str = "full"
    visit: int = 2
    chunk: int = 0
    offload: int = 0
    homes: str = "none"
    loss: int = 0
    liger: int = 0
    fused_loss: int = 0
    compile: int = 0
    steps: int = 4
    warm: int = 2
    short: int = 0
    profile: int = 0
    most: float = 0.0

    @classmethod
    def read(cls, text: str) -> Setting:
        """Read ``name=value`` words.

        Raises:
            ValueError: a name that is not known, or a value of another type.
        """
        types, values = {one.name: type(one.default) for one in fields(cls)}, dict[str, Any]()
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in types or not value:
                raise ValueError(f"got {word}; expected NAME=VALUE with one of {', '.join(types)}")
            values[name] = types[name](value)
        return cls(**values)

    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        name, _, layers = self.shape.partition(":")
        shape: dict[str, Any] = dict(PRESETS[SHAPES[name]])
        shape |= {"tie_word_embeddings": False, "max_position_embeddings": 1 << 22}
        shape |= {"num_hidden_layers": int(layers)} if layers else {}
        return LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)

    def adapted(self, model: Any) -> Any:
        """Return the model with adapters, if there are to be any."""
        if not self.lora:
            return model
        import peft

        return peft.get_peft_model(
            model,
            peft.LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules="all-linear", task_type="CAUSAL_LM"),
        )


def use_liger(used: bool) -> None:
    """Put Liger's kernels in the place of transformers' functions, or put these back."""
    norm, gate, rope = PLAIN
    if used:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
        from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

        norm = lambda self, x: LigerRMSNormFunction.apply(  # noqa: E731
            x, self.weight, self.variance_epsilon, 0.0, "llama", False
        )
        gate = lambda self, x: self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))  # noqa: E731
        rope = lambda q, k, cos, sin, *_, **__: LigerRopeFunction.apply(q, k, cos, sin)  # noqa: E731
    target: Any = modeling
    target.LlamaRMSNorm.forward, target.LlamaMLP.forward, target.apply_rotary_pos_emb = norm, gate, rope


def fused_loss(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of hidden states [b, S, H], by Liger's product with cross-entropy.

    Args:
        head: the head, without a bias.
        labels: [b, S], already shifted; -100 does not count.
    """
    from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

    return functional.liger_fused_linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())


def fill_on_device(self: Storage, source: object, world: object, world_size: int) -> None:
    """Fill homes with random values where they are: to draw 8 billion on a processor takes a minute."""
    with torch.no_grad():
        for unit, master in self.master.items():
            if self.units[unit].packing is not None:
                master.view(torch.uint8).fill_(0x3C)
            else:
                values = torch.randn(min(master.numel(), 1 << 24), device=self.device) * 0.02
                for part in master.split(1 << 24):
                    part.copy_(values[: part.numel()])
            self.refresh(unit)


class Ours:
    """This project's runtime."""

    def __init__(self, setting: Setting, world: World) -> None:
        Storage.fill = fill_on_device
        with torch.device("meta"):
            model = setting.adapted(LlamaForCausalLM(setting.config()))
        schedule: dict[str, Any] = {
            "recompute": setting.recompute,
            "micro_batches_per_visit": setting.visit,
            "loss_chunk_tokens": setting.loss,
        }
        schedule |= {"sequence_chunk": setting.chunk} if setting.chunk else {}
        schedule |= {"offloaded_layers": setting.offload} if setting.offload else {}
        schedule |= {"host_homes": setting.homes} if setting.homes != "none" else {}
        self.pipeline = Pipeline(
            model,
            optimizer=adamw(),
            schedule=ScheduleSettings(**schedule),
            dtype=torch.bfloat16,
            checks=CheckSettings(check="never"),
            micro_batch=setting.micro,
            training=TrainingSettings(quantize="nf4" if setting.nf4 else "none", compile_layers=bool(setting.compile)),
            world=world,
        )
        use_liger(bool(setting.liger))  # after the model was followed on the meta device
        self.chain = self.pipeline.chain

    def step(self, ids: Tensor) -> tuple[float, float]:
        """Return the loss, and seconds until the step was issued."""
        begin = time.perf_counter()
        result = self.pipeline.step({"input_ids": ids, "labels": ids})
        issued = time.perf_counter() - begin
        self.pipeline.drain()
        return result.loss, issued

    def close(self) -> None:
        self.pipeline.close()


class Plain:
    """A loop in plain PyTorch."""

    def __init__(self, setting: Setting, world: World) -> None:
        self.setting, self.device, config = setting, world.device, setting.config()
        with torch.device("meta"):
            self.chain = Chain(setting.adapted(LlamaForCausalLM(copy.deepcopy(config))))  # with our attention
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                model: Any = LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        self.inner, self.head = model.model, model.lm_head
        if setting.recompute == "full":
            checkpoint = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            checkpoint({"use_reentrant": False})
        self.whole = setting.adapted(model).to(torch.bfloat16)
        if setting.lora:
            model.enable_input_require_grads()
        use_liger(bool(setting.liger))
        if setting.fused_loss:  # called as a module, for which FSDP2 gathers the weight
            self.head.forward = partial(fused_loss, self.head)
        if setting.compile:
            for layer in self.inner.layers:
                layer.compile()
        self.prepare()
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def prepare(self) -> None:
        """Make fp32 masters of what is trained."""
        self.parameters = [p for p in self.whole.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]

    def step(self, ids: Tensor) -> tuple[float, float]:
        """Return the loss, and seconds until the step was issued."""
        begin, loss = time.perf_counter(), torch.zeros((), device=self.device)
        tokens = ids.shape[0] * (ids.shape[1] - 1)
        for rows in ids.to(self.device).split(self.setting.micro):
            hidden = self.inner(input_ids=rows, use_cache=False).last_hidden_state
            leaf = hidden.detach().requires_grad_()
            for part in self.losses(leaf, rows):
                part = part / tokens
                part.backward()
                loss += part.detach()
                del part
            hidden.backward(leaf.grad)
            del hidden, leaf
            self.collect()
        self.update()
        issued = time.perf_counter() - begin
        return float(loss), issued

    def losses(self, hidden: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """Yield sums of the losses of a micro-batch, a chunk of positions at a time."""
        length = rows.shape[1] - 1
        if self.setting.fused_loss:
            yield self.head(hidden, F.pad(rows[:, 1:], (0, 1), value=-100)) * (len(rows) * length)
            return
        size = max(1, (self.setting.loss or LOSS_TOKENS) // len(rows))
        for first in range(0, length, size):
            last = min(first + size, length)
            logits, labels = self.head(hidden[:, first:last]).float(), rows[:, first + 1 : last + 1]
            yield F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            del logits

    def collect(self) -> None:
        """Add the gradients of a micro-batch up in fp32, as ours does."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def update(self) -> None:
        """Clip, update and clear."""
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)  # pyright: ignore
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        pass


class Fsdp2(Plain):
    """``Plain`` under torch's sharding, with one rank."""

    def prepare(self) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if not dist.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", rank=0, world_size=1)
        self.whole.float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.inner.layers, self.inner, self.head):
            fully_shard(part, mp_policy=policy)
        self.masters = self.parameters = [p for p in self.whole.parameters() if p.requires_grad]


SIDES: dict[str, type[Ours | Plain]] = {"ours": Ours, "plain": Plain, "fsdp2": Fsdp2}


def list_kernels(side: Ours | Plain, ids: Tensor) -> None:
    """Print the kernels of a step by kind, and those that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        side.step(ids)
        torch.cuda.synchronize()
    times, counts, kinds = Counter[str](), Counter[str](), Counter[str]()
    for event in watched.events() or ():
        if str(event.device_type).endswith("CUDA"):
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    for name, took in times.items():
        kinds[next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "other")] += took
    say(kernels=sum(counts.values()), ms={kind: round(took / 1e3, 1) for kind, took in kinds.most_common()})
    for name, took in times.most_common(14):
        print(f"    {took / 1e3:8.1f} ms {counts[name]:6d} x {name[:110]}", flush=True)


def measure(text: str, world: World) -> None:
    """Make and run one measurement, and print its line."""
    setting, device = Setting.read(text), world.device
    config, on_cuda, begin = setting.config(), device.type == "cuda", time.perf_counter()
    if on_cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, setting.most * 2**30 / total) if setting.most else 1.0
        torch.cuda.set_per_process_memory_fraction(share, device)
    torch.manual_seed(0)  # sides in plain torch begin with equal weights
    side = SIDES[setting.side](setting, world)
    made_s, generator = time.perf_counter() - begin, torch.Generator().manual_seed(0)
    flops = (chain_flops(side.chain, [setting.tokens]) or 0.0) * setting.rows
    rows_of = lambda length: torch.randint(0, config.vocab_size, (setting.rows, length), generator=generator)  # noqa: E731
    if setting.short:
        side.step(rows_of(WARM_TOKENS))
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, issued, losses = list[float](), list[float](), list[float]()
    for _ in range(setting.warm + setting.steps):
        ids = rows_of(setting.tokens)
        wait(device)
        begin = time.perf_counter()
        loss, host = side.step(ids)
        seconds.append(time.perf_counter() - begin)
        issued.append(host)
        losses.append(round(loss, 4))
    median, host = (statistics.median(values[setting.warm :]) for values in (seconds, issued))
    peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16") if on_cuda else None
    used = mfu(flops, median, peak=peak, num_devices=1)
    line: dict[str, Any] = {
        "what": text,
        "seconds": round(median, 4),
        "least": round(min(seconds[setting.warm :]), 4),
        "mfu": used and round(used, 3),
        "tokens_per_s": round(setting.rows * setting.tokens / median),
        "issued_s": round(host, 4),
        "issued_ms_per_layer_and_micro_batch": round(
            host / (-(-setting.rows // setting.micro) * (config.num_hidden_layers or 1)) * 1e3, 2
        ),
        "losses": losses,
        "made_s": round(made_s, 1),
        "mhz": clock_mhz(device),
    }
    if on_cuda:
        line["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        line["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 2)
    say(**line)
    if setting.profile and on_cuda:
        list_kernels(side, rows_of(setting.tokens))
    side.close()


def main() -> None:
    """Make all measurements that the command line names, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("settings", nargs="+", help='for example "side=ours shape=1b recompute=none"')
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    world = connect(device=args.device)
    for text in args.settings:
        try:
            measure(text, world)
        except Exception as error:  # of memory, above all; the next setting is another
            say(what=text, error=in_words(error))
        use_liger(False)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
