"""Real programs judge what tawpipe takes in and gives out, on SmolLM2-135M-Instruct.

    python benchmarks/real_model.py --install --out benchmarks/results/DATE-real-model

Losses beside a plain loop of transformers and peft, a resumed run, exports in transformers, peft, vLLM and llama.cpp,
the service under OpenAI's client and lm-eval, and the processor seconds of default runs. ``--only cost --steps 10
--kinds full`` measures these alone, in fewer steps and without an adapter. A program that is not installed skips its
part; ``--install`` makes the virtual environments. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import real_things
from real_sides import (
    ANSWER,
    LLAMA,
    PLAIN,
    RANK,
    TAWPIPE,
    VLLM,
    by_hand,
    command,
    count_different,
    elsewhere,
    greedy,
    largest_difference,
    log_probabilities,
    losses,
    open_folder,
    questions,
    round_by_hand,
    service_of,
    token_logs,
    tokenizer_of,
    without_stop,
)

PROMPTS = (
    "Who are you?",
    "What is a rail?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write a sentence about the sea.",
)
STEPS, BATCH, LENGTH, WARMUP = 10, 4, 128, 3
RATES = {"lora": 2e-4, "full": 1e-5}
COST_STEPS, PAIRS = 40, 3
TOLERANCE = 1e-3
"""Largest difference of log-probabilities between two programs that compute in 32 bits."""


class Skipped(Exception):
    """A part cannot run: the reason, with the command that changes it."""


@dataclass
class Reading:
    """A row of the table. It passes if ``number`` is at most ``limit``."""

    what: str
    judge: str
    number: float
    limit: float
    note: str = ""
    part: str = ""
    seconds: float = 0.0
    outcome: str = ""


@dataclass(frozen=True)
class Bench:
    """The model, and the folder that holds all runs and exports."""

    folder: Path
    steps: int = STEPS
    cost_steps: int = COST_STEPS
    kinds: Sequence[str] = tuple(RATES)
    install: bool = False

    @cached_property
    def model(self) -> Path:
        return real_things.smollm2()

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.model)

    @cached_property
    def chats(self) -> list[list[int]]:
        """``PROMPTS`` as the chat template asks them."""
        questions = ([{"role": "user", "content": text}] for text in PROMPTS)
        ask = self.tokenizer.apply_chat_template
        return [ask(question, add_generation_prompt=True)["input_ids"] for question in questions]

    @cached_property
    def data(self) -> Path:
        """Real chats, as LLaMA-Factory ships them."""
        path = self.folder / "identity.json"
        path.write_text((real_things.data_sets() / path.name).read_text(encoding="utf-8"), encoding="utf-8")
        return path

    @property
    def words(self) -> list[str]:
        """Settings that make tawpipe's rows single documents, so that a plain loop can have them."""
        settings = f"--sequence-length {LENGTH} --global-batch {BATCH} --packing none --validation-fraction 0"
        return [*settings.split(), "--model", str(self.model), "--cache-dir", str(self.folder / "cache")]

    def plan_of(self, data: Path, steps: int, out: Path, **more: Any) -> Path:
        """Write a file that tells ``plain`` the rows of every step, as tawpipe reads them, and the hyperparameters."""
        from tawpipe.data.prepare import prepare_data
        from tawpipe.data.settings import DataSettings

        settings = DataSettings(
            data=[str(data)], validation_fraction=0.0, packing="none", cache_dir=str(self.folder / "cache")
        )
        train = prepare_data(settings, sequence_length=LENGTH, seed=0, model=str(self.model)).train
        rows = [train.sample(number) for number in range(steps * BATCH)]
        pairs = [[row.input_ids[0].tolist(), row.labels[0].tolist()] for row in rows]
        batches = [pairs[first : first + BATCH] for first in range(0, len(pairs), BATCH)]
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"model": str(self.model), "out": str(out), "batches": batches, **more})
        (out / "plan.json").write_text(text)
        return out / "plan.json"

    def trained(self, kind: str, name: str, steps: int, *words: str) -> Path:
        """The folder of a run of ``kind`` (lora or full) on one process, from the plain loop's adapter."""
        out = self.folder / name
        start = ["--lora.adapter", str(self.plain(kind) / "initial")] if kind == "lora" else []
        settings = f"--plan none --nproc 1 --nodes 1 --dtype float32 --learning-rate {RATES[kind]} --steps {steps}"
        settings += f" --optimizer.schedule inverse-sqrt --optimizer.warmup-steps {WARMUP} --optimizer.weight-decay 0.1"
        settings += f" --sample.temperature 0 --sample.tokens {ANSWER}"
        more = ["--data", str(self.data), "--output", str(out), "--sample.prompt", *PROMPTS, *settings.split()]
        if "--resume" not in words:
            shutil.rmtree(out, ignore_errors=True)  # of an earlier start in the same --work
        command([*TAWPIPE, "train", *self.words, *more, *start, *words])
        return out

    def plain(self, kind: str) -> Path:
        """The folder of the plain loop's run of ``kind``."""
        out = self.folder / f"plain-{kind}"
        if not (out / "losses.json").exists():
            plan = self.plan_of(self.data, self.steps, out, lora=kind == "lora", rate=RATES[kind], warmup=WARMUP)
            command([*PLAIN, str(plan)])
        return out

    def run(self, kind: str) -> Path:
        """The folder of a finished run of ``kind``."""
        done = (self.folder / kind / "model").exists()
        return self.folder / kind if done else self.trained(kind, kind, self.steps)

    def export(self, form: str) -> Path:
        """The run with an adapter as a whole model in a format of ``tawpipe export``."""
        out = self.folder / f"merged-{form}"
        if not out.exists():
            command([*TAWPIPE, "export", str(self.run("lora")), "--merge", "--format", form, "--output", str(out)])
        return out

    def python(self, name: str) -> str:
        """The Python of another program's environment; skips the part that has none."""
        python = real_things.environment(name, install=self.install)
        if python is None:
            raise Skipped(f"env-{name} is not installed: python benchmarks/real_model.py --install --only {name}")
        return str(python)


def training(bench: Bench) -> Iterator[Reading]:
    for kind in ("lora", "full"):
        expected = json.loads((bench.plain(kind) / "losses.json").read_text())
        distance = largest_difference(losses(bench.run(kind)), expected)
        judge = "transformers and peft" if kind == "lora" else "transformers"
        note = f"losses {expected[0]:.4f} to {expected[-1]:.4f}"
        yield Reading(f"{kind}: losses of {bench.steps} steps, largest difference", judge, distance, 1e-5, note)


def resuming(bench: Bench) -> Iterator[Reading]:
    from safetensors.torch import load_file

    for kind in ("lora", "full"):
        once, name = bench.run(kind), f"halves-{kind}"
        bench.trained(kind, name, bench.steps // 2)
        halves = bench.trained(kind, name, bench.steps, "--resume", "auto")
        distance = largest_difference(losses(halves), losses(once))
        yield Reading(f"{kind}: losses after a resume, largest difference", "at once", distance, 0)
        (file,) = [path.name for path in (once / "model").glob("*.safetensors")]
        tensors, others = load_file(once / "model" / file), load_file(halves / "model" / file)
        different = sum(not tensor.equal(others.pop(key)) for key, tensor in tensors.items()) + len(others)
        yield Reading(f"{kind}: tensors that differ of {len(tensors)}", "at once", different, 0)


def exporting(bench: Bench) -> Iterator[Reading]:
    run = bench.run("lora")
    merged, adapter = open_folder(bench.export("hf")), open_folder(run / "model")
    answers = greedy(merged, bench.chats)
    samples = {row["prompt"]: row["text"] for row in map(json.loads, (run / "samples.jsonl").read_text().splitlines())}
    texts = [bench.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
    number = count_different(texts, [samples[prompt] for prompt in PROMPTS])
    yield Reading(f"texts of {len(PROMPTS)} that differ from the run's samples", "transformers", number, 0, texts[0])
    number = count_different(greedy(adapter, bench.chats), answers)
    yield Reading("adapter: texts that differ from the merged model's", "peft", number, 0)
    read = [ids + answer for ids, answer in zip(bench.chats, answers, strict=True)]
    expected = log_probabilities(merged, read)
    number = max((a - b).abs().max().item() for a, b in zip(log_probabilities(adapter, read), expected, strict=True))
    yield Reading("adapter: log-probabilities, largest difference from the merged model's", "peft", number, TOLERANCE)
    weights = merged.state_dict()
    for form, limit in (("w8a8", 0.501), ("w4a16", 0.53)):  # of 4 bits the largest is 7.5 scales, which bf16 rounds
        steps = [((few - weights[name]) / step).abs().max().item() for name, few, step in by_hand(bench.export(form))]
        note = f"{len(steps)} matrices"
        yield Reading(f"{form}: largest difference of a weight, in scales", "by hand", max(steps), limit, note)
    try:
        version("compressed-tensors")
    except ModuleNotFoundError:
        raise Skipped("compressed-tensors is not installed: pip install compressed-tensors") from None
    for form, limit in (("w8a8", 0.2), ("w4a16", 1.0)):
        model, folder = open_folder(bench.export("hf")), bench.export(form)
        round_by_hand(model, folder, activations=form == "w8a8")
        few = log_probabilities(open_folder(folder), read)
        number = max((a - b).abs().max().item() for a, b in zip(few, log_probabilities(model, read), strict=True))
        yield Reading(f"{form}: log-probabilities, largest difference by hand", "transformers", number, TOLERANCE)
        divergence = statistics.fmean(
            (b.exp() * (b - a)).sum(-1).mean().item() for a, b in zip(few, expected, strict=True)
        )
        yield Reading(f"{form}: divergence (KL) from the merged model", "transformers", divergence, limit)


def in_vllm(bench: Bench) -> Iterator[Reading]:
    python, stop = bench.python("vllm"), bench.tokenizer.eos_token_id
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DO_NOT_TRACK": "1"}
    # Its kernel for 4 bits computes in 16. Activations in 8 bits have scales of amax / 127 there and of amax / 127.5 in
    # transformers: this model answers such a rounding with differences of 0.35.
    for form, dtype, limit in (("hf", "float32", TOLERANCE), ("w8a8", "float32", 0.5), ("w4a16", "bfloat16", 0.1)):
        folder = bench.export(form)
        model = open_folder(folder)
        answers = greedy(model, bench.chats)
        read = [ids + answer for ids, answer in zip(bench.chats, answers, strict=True)]
        try:
            texts, logs = elsewhere(python, VLLM, folder, dtype, bench.chats, read, ANSWER, **environment)
        except RuntimeError as error:
            yield Reading(f"{form}: opened", "vLLM", math.inf, limit, str(error)[-300:])
            continue
        differences = [abs(a - b) for a, b in zip(logs, token_logs(model, read), strict=True)]
        mean, note = statistics.fmean(differences), f"largest {max(differences):.2g}"
        yield Reading(f"{form}: log-probabilities, mean difference", "vLLM", mean, limit, note)
        if form == "hf":
            number = count_different(without_stop(texts, stop), without_stop(answers, stop))
            yield Reading("hf: texts that differ", "vLLM", number, 0)


def in_llama(bench: Bench) -> Iterator[Reading]:
    python, folder = bench.python("llama"), bench.export("hf")
    if not bench.install and not (real_things.HOME / "llama_cpp_python-0.3.36").exists():
        raise Skipped("llama.cpp's converter is not here: python benchmarks/real_model.py --install --only llama")
    tools = real_things.package("llama_cpp_python", "0.3.36") / "vendor" / "llama.cpp"
    file = bench.folder / "merged.gguf"
    converter = [python, str(tools / "convert_hf_to_gguf.py"), str(folder)]
    command([*converter, "--outfile", str(file), "--outtype", "f32"])
    model, stop = open_folder(folder), bench.tokenizer.eos_token_id
    texts, logs = elsewhere(python, LLAMA, file, bench.chats, ANSWER)
    number = count_different(without_stop(texts, stop), without_stop(greedy(model, bench.chats), stop))
    yield Reading("GGUF in 32 bits: texts that differ", "llama.cpp", number, 0)
    expected = [token_logs(model, [ids + new])[len(ids) - 1 :] for ids, new in zip(bench.chats, texts, strict=True)]
    distance = max(map(largest_difference, logs, expected))
    yield Reading("GGUF in 32 bits: log-probabilities, largest difference", "llama.cpp", distance, TOLERANCE)


def serving(bench: Bench) -> Iterator[Reading]:
    try:
        from openai import OpenAI
    except ImportError:
        raise Skipped("openai is not installed: pip install openai") from None
    folder = bench.export("hf")
    model = open_folder(folder)
    answers = greedy(model, bench.chats)
    expected = [bench.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    with service_of(folder, bench.folder / "serve.log") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)
        texts, streams, logs, expected_logs = list[str](), list[str](), list[float](), list[float]()
        for prompt, ids, answer in zip(PROMPTS, bench.chats, answers, strict=True):
            how: Any = {"model": "tuned", "temperature": 0, "max_tokens": ANSWER}
            how["messages"] = [{"role": "user", "content": prompt}]
            choice = client.chat.completions.create(**how, logprobs=True).choices[0]
            texts.append(choice.message.content or "")
            parts = client.chat.completions.create(**how, stream=True)
            streams.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
            assert choice.logprobs is not None and choice.logprobs.content is not None
            logs += [entry.logprob for entry in choice.logprobs.content]
            # the token that ends a text may be left out of the answer
            expected_logs += token_logs(model, [ids + answer])[len(ids) - 1 :][: len(choice.logprobs.content)]
        yield Reading("chat completions that differ from transformers", "openai", count_different(texts, expected), 0)
        yield Reading("streams that differ", "openai", count_different(streams, expected), 0)
        distance, note = largest_difference(logs, expected_logs), f"{len(logs)} tokens"
        yield Reading("log-probabilities: largest difference", "openai", distance, TOLERANCE, note)
        logs = list[float]()
        for ids in bench.chats:
            wanted: Any = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
            answer = client.completions.create(model="tuned", prompt=ids, **wanted).choices[0].logprobs
            assert answer is not None and answer.token_logprobs is not None
            logs += answer.token_logprobs[1 : len(ids)]
        distance, note = largest_difference(logs, token_logs(model, bench.chats)), f"{len(logs)} tokens"
        yield Reading("prompts' log-probabilities, largest difference", "openai", distance, TOLERANCE, note)
        how = {"model": "tuned", "max_tokens": ANSWER, "temperature": 0}
        text = client.completions.create(prompt=bench.chats[0], **how).choices[0].text
        yield Reading("completions: texts that differ", "openai", int(text != expected[0]), 0)


def in_lm_eval(bench: Bench) -> Iterator[Reading]:
    python, folder, tasks = bench.python("lm-eval"), bench.export("hf"), bench.folder / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    task = {"task": "choices", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}}, "metric_list": [{"metric": "acc"}]}
    task |= {"doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "right"}
    (tasks / "choices.yaml").write_text(json.dumps(task))  # JSON is YAML

    def judged(name: str, *model: str) -> tuple[float, list[float]]:
        out = bench.folder / f"lm-eval-{name}"
        shutil.rmtree(out, ignore_errors=True)
        words = ["--tasks", "choices", "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
        command([python, "-m", "lm_eval", *model, *words], HF_DATASETS_CACHE=str(bench.folder / "datasets"))
        (file,) = out.rglob("samples_choices_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        logs = [float(answer[0]) for row in rows for answer in row["filtered_resps"]]
        return statistics.fmean(row["acc"] for row in rows), logs

    words = f"--model hf --device cpu --batch_size 1 --model_args pretrained={folder},dtype=float32"
    right, expected = judged("hf", *words.split())
    with service_of(folder, bench.folder / "serve-lm-eval.log") as address:
        words = f"--model local-completions --batch_size 1 --model_args model=tuned,base_url={address}/v1/completions"
        words += f",tokenizer={folder},tokenized_requests=True,max_retries=1,max_length=1024"
        accuracy, logs = judged("served", *words.split())
    distance = largest_difference(logs, expected)
    yield Reading(f"log-likelihoods of {len(logs)} choices, largest difference", "lm-eval", distance, TOLERANCE)
    note = f"{accuracy:.3f} and {right:.3f}"
    yield Reading("accuracy, served less opened by transformers", "lm-eval", abs(accuracy - right), 0, note)


def cost(bench: Bench) -> Iterator[Reading]:
    data, steps = bench.folder / "texts.jsonl", bench.cost_steps
    rows = (real_things.data_sets() / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    data.write_text("\n".join(row for row in rows if len(row) > 8 * LENGTH) + "\n", encoding="utf-8")

    def seconds(words: Sequence[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command(words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def pair(kind: str, count: int) -> tuple[float, float]:
        """Seconds of a run and of the plain loop."""
        lora, (out, plain) = kind == "lora", (bench.folder / f"cost-{kind}{side}" for side in ("", "-plain"))
        shutil.rmtree(out, ignore_errors=True)
        words = ["--data", str(data), "--output", str(out), *(["--lora.rank", str(RANK)] if lora else [])]
        plan = bench.plan_of(data, count, plain, lora=lora, rate=RATES[kind], warmup=1)
        ours = seconds([*TAWPIPE, "train", *bench.words, *words, "--steps", str(count), "--sample.tokens", "0"])
        return ours, seconds([*PLAIN, str(plan)])

    bench.plan_of(data, steps, bench.folder / "cost-tokens")  # from here on nobody tokenises
    for kind in bench.kinds:
        both = [(pair(kind, steps), pair(kind, 1)) for _ in range(PAIRS)]
        each = [tuple((a - b) / (steps - 1) for a, b in zip(*runs, strict=True)) for runs in both]
        for what, pairs, limit in ((f"run of {steps} steps", [whole for whole, _ in both], 1.25), ("step", each, 1.1)):
            note = "seconds of tawpipe and the plain loop: " + ", ".join(f"{a:.2f} and {b:.2f}" for a, b in pairs)
            ratio, judge = statistics.median(a / b for a, b in pairs), "transformers" + " and peft" * (kind == "lora")
            yield Reading(f"{kind}: processor seconds of a {what}, as a multiple", judge, ratio, limit, note)


PARTS: dict[str, Callable[[Bench], Iterator[Reading]]] = {
    "training": training,
    "resume": resuming,
    "exports": exporting,
    "vllm": in_vllm,
    "llama": in_llama,
    "service": serving,
    "lm-eval": in_lm_eval,
    "cost": cost,
}


def readings(part: str, bench: Bench) -> Iterator[Reading]:
    """The rows of a part; what stops it is its last row."""
    begin = time.monotonic()
    try:
        for row in PARTS[part](bench):
            row.part, row.seconds, begin = part, time.monotonic() - begin, time.monotonic()
            row.outcome = "passed" if row.number <= row.limit else "failed"
            yield row
    except Skipped as reason:
        yield Reading("all that follows", "", math.nan, math.nan, str(reason), part, 0.0, "skipped")
    except Exception as error:  # the other parts run
        note = f"{type(error).__name__}: {error}"
        yield Reading("all that follows", "", math.nan, math.nan, note, part, time.monotonic() - begin, "failed")


def line(row: Reading) -> str:
    note = row.note.replace("\n", " ").replace("|", "/")[:300]
    cells = (row.part, row.what, row.judge, f"{row.number:.3g}", f"{row.limit:.3g}", f"{row.seconds:.0f}")
    return f"| {' | '.join(cells)} | {row.outcome} | {note} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="folder for table.md and table.json")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), help="some of the parts")
    parser.add_argument("--steps", type=int, default=COST_STEPS, help="steps of the runs whose cost is measured")
    parser.add_argument("--kinds", nargs="*", default=[*RATES], choices=[*RATES], help="runs whose cost is measured")
    parser.add_argument("--install", action="store_true", help="make the environments of the other programs")
    parser.add_argument("--work", type=Path, help="folder for runs and exports, which is kept and used again")
    asked = parser.parse_args()
    load, commit = os.getloadavg()[0], command(["git", "rev-parse", "--short", "HEAD"]).strip()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    head = "| part | what | judge | number | limit | seconds | outcome | note |\n"
    head += "| --- | --- | --- | ---: | ---: | ---: | --- | --- |"
    print(head)
    rows = list[Reading]()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(asked.work or Path(temporary), cost_steps=asked.steps, kinds=asked.kinds, install=asked.install)
        bench.folder.mkdir(parents=True, exist_ok=True)
        for part in asked.only:
            for row in readings(part, bench):
                rows.append(row)
                print(line(row), flush=True)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        machine = f"{os.cpu_count()} cores, load {load:.1f} before the start, at {commit}"
        title = f"# A real model\n\n{machine}. {packages}.\n"
        title += f"`{shlex.join(['python', 'benchmarks/real_model.py', *sys.argv[1:]])}`\n\n"
        (asked.out / "table.md").write_text("\n".join([title + head, *map(line, rows)]) + "\n", encoding="utf-8")
        (asked.out / "table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.outcome == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
