"""Programs that judge a real model: a plain loop, transformers, vLLM, llama.cpp, and what they are asked.

``python benchmarks/real_sides.py PLAN`` is the plain loop, with the file that ``real_model.py`` writes for it.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import real_things

ANSWER, RANK, QUESTIONS = 32, 8, 120
TAWPIPE = (sys.executable, "-m", "tawpipe")
PLAIN = (sys.executable, str(Path(__file__).resolve()))
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def command(words: Sequence[str], **more: str) -> str:
    """Run a command and return what it prints; the error of one that fails has its last lines."""
    environment = {**os.environ, **OFFLINE, **more}
    if not words[0].startswith(sys.executable):
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise RuntimeError(f"{shlex.join(words)[:200]} ended with {done.returncode}: {lines}")
    return done.stdout


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def open_folder(folder: Path) -> Any:
    """A folder in transformers, or in peft if it holds an adapter."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    adapter = (folder / "adapter_config.json").exists()
    kind: Any = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The likeliest continuations of some prompts, by ``generate`` of transformers."""
    import torch

    answers = list[list[int]]()
    for ids in prompts:
        tensor = torch.tensor([ids])
        whole = model.generate(
            input_ids=tensor, attention_mask=torch.ones_like(tensor), do_sample=False, max_new_tokens=ANSWER
        )
        answers.append(whole[0, len(ids) :].tolist())
    return answers


def log_probabilities(model: Any, texts: Sequence[list[int]]) -> list[Any]:
    """Logarithms of the probabilities of all tokens, at every place of some texts."""
    import torch

    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in texts]


def token_logs(model: Any, texts: Sequence[list[int]]) -> list[float]:
    """The log-probability of every token but the first of some texts."""
    logs = log_probabilities(model, texts)
    pairs = zip(logs, texts, strict=True)
    return [log[place, token].item() for log, ids in pairs for place, token in enumerate(ids[1:])]


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def count_different(some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> int:
    """Number of texts that differ."""
    return sum(list(a) != list(b) for a, b in zip(some, others, strict=True))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def plain(file: Path) -> None:
    """Train in one process with transformers and peft as a file of ``plan_of`` says; save losses and model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plan = json.loads(file.read_text())
    out = Path(plan["out"])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    if plan["lora"]:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        model.save_pretrained(out / "initial")
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan["rate"], betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses = list[float]()
    for step, batch in enumerate(plan["batches"]):
        tokens = sum(label >= 0 for _, labels in batch for label in labels)
        losses.append(0.0)
        for ids, labels in batch:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(labels), reduction="sum") / tokens
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        warm = (step + 1) / plan["warmup"]
        for group in optimizer.param_groups:
            group["lr"] = plan["rate"] * (warm if warm <= 1 else math.sqrt(plan["warmup"] / step))
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out / "model")
    tokenizer_of(plan["model"]).save_pretrained(out / "model")
    (out / "losses.json").write_text(json.dumps(losses))


def by_hand(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Name, values and scales of every matrix that a folder holds in 8 or 4 bits."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for scales in [name for name in tensors if name.endswith("_scale")]:
        name, scale = scales.removesuffix("_scale"), tensors[scales].float()
        values = tensors.get(name)
        if values is None:  # eight numbers of 4 bits in one of 32, the first in the lowest bits
            packed = tensors[f"{name}_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)
            values = ((packed & 15) - 8).flatten(1)
        scale = scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
        yield name, values.float() * scale, scale


def round_by_hand(model: Any, folder: Path, *, activations: bool) -> None:
    """Give a whole model the matrices of a folder in few bits, and their inputs 8 bits if ``activations``."""

    def rounded(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = inputs[0].abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127.5
        return ((inputs[0] / scale).round().clamp(-128, 127) * scale,)

    weights = model.state_dict()
    for name, values, _ in by_hand(folder):
        weights[name].copy_(values)
        if activations:
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(rounded)


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, dtype, chats, texts, tokens = json.loads(sys.argv[1])
llm = LLM(folder, dtype=dtype, max_model_len=512, enforce_eager=True)
how = {"temperature": 0}
ask = lambda many, **more: llm.generate([{"prompt_token_ids": ids} for ids in many], SamplingParams(**how, **more))
answers = [list(out.outputs[0].token_ids) for out in ask(chats, max_tokens=tokens)]
logs = [out.prompt_logprobs for out in ask(texts, max_tokens=1, prompt_logprobs=1)]
logs = [log[token].logprob for row, ids in zip(logs, texts) for log, token in zip(row[1:], ids[1:])]
print("RESULT" + json.dumps([answers, logs]))
"""
LLAMA = """
import json, sys, xllamacpp
path, chats, tokens = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 512, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
answers = []
for ids in chats:
    asked = {"prompt": ids, "n_predict": tokens, "temperature": 0, "n_probs": 1, "cache_prompt": False}
    answers.append(server.handle_completions(asked)["choices"][0]["logprobs"]["content"])
print("RESULT" + json.dumps([[[each[name] for each in answer] for answer in answers] for name in ("id", "logprob")]))
"""


def elsewhere(python: str, program: str, *words: Any, **environment: str) -> Any:
    """Run a program in another environment; return what it prints behind the word RESULT."""
    printed = command([python, "-c", program, json.dumps(words, default=str)], **environment)
    return json.loads(printed.rpartition("RESULT")[2].splitlines()[0])


def without_stop(answers: Sequence[list[int]], stop: int) -> list[list[int]]:
    """Answers without the token that ends a text, which some programs leave out."""
    return [[token for token in answer if token != stop] for answer in answers]


@contextmanager
def service_of(folder: Path, log: Path) -> Iterator[str]:
    """The address of a service of a folder."""
    words = [*TAWPIPE, "serve", "--model", str(folder), "--name", "tuned", "--port", "0", "--dtype", "float32"]
    environment = {**os.environ, **OFFLINE}
    with log.open("w") as out, subprocess.Popen(words, env=environment, stdout=out, stderr=out) as service:
        try:
            end, address = time.monotonic() + 300, None
            while address is None:
                if service.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"tawpipe serve did not start: {log.read_text()[-300:]}")
                time.sleep(0.2)
                address = re.search(r"http://[\d.]+:\d+", log.read_text())
            yield address[0]
        finally:
            service.terminate()


def questions() -> list[dict[str, Any]]:
    """Sums, and words of real texts in the order of the alphabet, each with four choices."""
    draw = random.Random(0)
    rows = json.loads((real_things.data_sets() / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    words = sorted({word for row in rows for word in re.findall(r"\b[a-z]{4,8}\b", row["output"])})
    asked = list[dict[str, Any]]()
    for number in range(QUESTIONS):
        if number % 2:
            a, b = draw.randint(2, 60), draw.randint(2, 60)
            choices, right = [str(c) for c in draw.sample([a + b, a + b + 1, a + b - 1, a + b + 10], 4)], str(a + b)
            text = f"Question: What is {a} + {b}?\nAnswer:"
        else:
            choices = draw.sample(words, 4)
            text = f"Question: Which word comes first in a dictionary: {', '.join(choices)}?\nAnswer:"
            right = min(choices)
        asked.append({"text": text, "choices": choices, "right": choices.index(right)})
    return asked


if __name__ == "__main__":
    plain(Path(sys.argv[1]))
