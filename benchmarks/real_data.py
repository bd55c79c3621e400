"""Share of real data sets that is learned through real chat templates, with the ids, masks and loss of TRL beside it.

    python benchmarks/real_data.py --out benchmarks/results/DATE-real-data

Every set of LLaMA-Factory goes through the templates of five models, with SmolLM2's tokenizer and the markers of the
template as special tokens. Thoughts and calls are counted in the files by code of this benchmark, and looked for in the
text of the learned tokens. ``--trl`` trains one step of 64 alpaca rows with TRL's SFTTrainer and with ``tawpipe train``
and compares ids, masks and the loss over the tokens that both learn.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import real_things
from tawpipe.data.prepare import prepare_data
from tawpipe.data.settings import DataSettings
from tawpipe.errors import UserError

SETS = (
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "identity.json",
    "glaive_toolcall_en_demo.json",
    "glaive_toolcall_zh_demo.json",
    "reason_tool_use_demo_50.jsonl",
    "v1_sft_demo.jsonl",
    "kto_en_demo.json",
    "dpo_en_demo.json",
    "v1_dpo_demo.jsonl",
    "mllm_demo.json",
    "mllm_audio_demo.json",
    "mllm_video_demo.json",
    "mllm_video_audio_demo.json",
    "c4_demo.jsonl",
    "wiki_demo.txt",
)
TEMPLATES = {"SmolLM2": "", "Qwen3": "qwen3", "Llama 3.1": "llama3_1", "GLM 4.5": "glm4moe", "gpt-oss": "gptoss"}
MARKERS = re.compile(r"<\|[^<>|\s]{1,40}\|>|\[gMASK\]|<sop>")
ROWS = 64
"""Rows of the step that TRL makes, too."""


def through(template: str) -> Any:
    """SmolLM2's tokenizer with a template, whose markers are special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_things.smollm2())
    if template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = real_things.chat_template(template)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": sorted(set(MARKERS.findall(tokenizer.chat_template)))}
        )
    return tokenizer


def given_in(path: Path) -> tuple[int, list[str], list[list[str]]]:
    """The rows of a file, the thoughts in it, and the names, keys and values of the calls, each as texts."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return 1, [], []
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    thoughts, calls = list[str](), list[list[str]]()
    for message in (message for row in rows for message in row.get("messages") or row.get("conversations") or []):
        content = message.get("content", message.get("value"))
        parts = content if isinstance(content, list) else [{"type": "text", "value": content}]
        for part in parts:
            value = part.get("value", part.get("text")) or ""
            if part["type"] == "reasoning":
                thoughts.append(value)
            thoughts += re.findall(r"<think>(.*?)</think>", value, re.DOTALL)
            if part["type"] in ("tool_call", "function_call") or message.get("from") == "function_call":
                found = json.loads(value)
                calls += [list(leaves(call)) for call in (found if isinstance(found, list) else [found])]
    return len(rows), [thought.strip() for thought in thoughts if thought.strip()], calls


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value[:1] == "{":
        value = json.loads(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("name", "arguments"):
                yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def learned_texts(data: Any, tokenizer: Any) -> list[str]:
    """The text of the learned tokens of every document."""
    rows = [data.train.sample(number) for number in range(len(data.train))]
    return [tokenizer.decode([label for label in row.labels[0].tolist() if label >= 0]) for row in rows]


def row_of(path: Path, name: str, tokenizer: Any, cache: str) -> dict[str, Any]:
    """A line of the table."""
    rows, thoughts, calls = given_in(path)
    said: dict[str, Any] = {"set": path.name, "template": name, "rows": rows}
    settings = DataSettings(data=[str(path)], validation_fraction=0.0, packing="none", cache_dir=cache)
    try:
        data = prepare_data(settings, sequence_length=1 << 20, seed=0, tokenizer=tokenizer)
    except UserError as refusal:
        return {**said, "refused": rows, "why": [str(refusal).replace(str(path.parent) + "/", "")]}
    texts = learned_texts(data, tokenizer)
    everything = "\0".join(texts)
    spelled = lambda leaf: (leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1])  # noqa: E731
    known = [
        call for call in calls if any(all(any(s in text for s in spelled(leaf)) for leaf in call) for text in texts)
    ]
    size, read = data.report.train, data.report.read
    return said | {
        "documents": size.documents,
        "tokens": size.tokens,
        "learned": size.learned / size.tokens,
        "thoughts": f"{sum(thought in everything for thought in thoughts)} of {len(thoughts)}" if thoughts else "",
        "calls": f"{len(known)} of {len(calls)}" if calls else "",
        "refused": read.bad_rows + read.empty,
        "why": [trouble.line.replace(str(path.parent) + "/", "") for trouble in read.troubles],
    }


def table(lines: list[dict[str, Any]]) -> str:
    head = ("set", "template", "rows", "documents", "tokens", "learned", "thoughts", "calls", "refused")
    text = f"| {' | '.join(head)} |\n|{' --- |' * len(head)}\n"
    notes = dict[str, int]()
    for line in lines:
        numbers = [notes.setdefault(why, len(notes) + 1) for why in line["why"]]
        cells = [f"{value:,}" if isinstance(value := line.get(name, ""), int) else value for name in head]
        cells[5] = f"{cells[5]:.1%}" if cells[5] != "" else ""
        cells[8] = " ".join([cells[8], *(f"[{number}]" for number in numbers)])
        text += f"| {' | '.join(cells)} |\n"
    return text + "\n" + "".join(f"{number}. {why}\n" for why, number in notes.items())


def against_trl(work: Path) -> dict[str, Any]:
    """One step of 64 alpaca rows here and with TRL's SFTTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    folder = real_things.smollm2()
    rows = json.loads((real_things.data_sets() / "alpaca_en_demo.json").read_text(encoding="utf-8"))[:ROWS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {"data": [str(work / "rows.json")], "validation_fraction": 0.0, "packing": "none"}
    (work / "rows.json").write_text(json.dumps(rows))
    data = prepare_data(DataSettings(**settings, cache_dir=str(work)), sequence_length=8192, seed=0, model=str(folder))
    ours = [data.train.sample(number) for number in range(len(data.train))]
    chats = [
        {
            "prompt": [{"role": "user", "content": "\n".join(filter(None, (row["instruction"], row["input"])))}],
            "completion": [{"role": "assistant", "content": row["output"]}],
        }
        for row in rows
    ]
    config = SFTConfig(
        output_dir=str(work / "trl"), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=ROWS // 4,
        max_length=None, learning_rate=1e-5, logging_steps=1, report_to=[], use_cpu=True, bf16=False, packing=False,
        gradient_checkpointing=False, save_strategy="no", dataset_num_proc=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(chats), processing_class=tokenizer)
    theirs = {tuple(row["input_ids"]): [int(label >= 0) for label in row["labels"]] for row in trainer.train_dataset}
    equal, differ, white = 0, 0, 0
    masks = dict[tuple[int, ...], list[int]]()
    for row in ours:
        ids, labels = tuple(row.input_ids[0].tolist()), row.labels[0].tolist()
        if ids not in theirs:
            continue
        equal += 1
        mine = [0, *(int(label >= 0) for label in labels[:-1])]  # a label is the token behind its place
        for token, a, b in zip(ids, mine, theirs[ids], strict=True):
            white += a != b and not tokenizer.decode([token]).strip() and b == 1
            differ += a != b and bool(tokenizer.decode([token]).strip() or a)
        masks[ids] = [a * b for a, b in zip(mine, theirs[ids], strict=True)]
    both = [
        {
            **row,
            "labels": [i if a else -100 for i, a in zip(row["input_ids"], masks[tuple(row["input_ids"])], strict=True)],
        }
        for row in trainer.train_dataset
    ]
    trainer.train_dataset = Dataset.from_list(both)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    words = (
        f"--model {folder} --data {work}/rows.json --validation-fraction 0 --packing none --nproc 1 --steps 1 --seed 0"
    )
    words += f" --sequence-length 8192 --global-batch {ROWS} --dtype float32 --learning-rate 1e-5 --plan none"
    words += f" --output {work}/run"
    command = [
        sys.executable,
        "-m",
        "tawpipe",
        "train",
        *words.split(),
        "--export.enabled",
        "false",
        "--sample.tokens",
        "0",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first = json.loads((work / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "rows": ROWS, "rows of equal ids": equal, "tokens of white space that TRL alone learns": white,
        "other differences of the masks": differ, "TRL's loss": loss, "our loss": first["loss"],
        "difference": abs(loss - first["loss"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="folder for table.md and table.json")
    parser.add_argument("--sets", nargs="*", default=SETS, help="some of the sets")
    parser.add_argument("--templates", nargs="*", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--trl", action="store_true", help="train a step with TRL, too")
    asked = parser.parse_args()
    lines, folder = list[dict[str, Any]](), real_things.data_sets()
    with tempfile.TemporaryDirectory() as work:
        for name in asked.templates:
            tokenizer = through(TEMPLATES[name])
            lines += [row_of(folder / each, name, tokenizer, work) for each in asked.sets]
        result: dict[str, Any] = {"sets": lines}
        text = table(sorted(lines, key=lambda line: asked.sets.index(line["set"])))
        if asked.trl:
            result["trl"] = against_trl(Path(work))
            text += "\nOne step of alpaca rows, beside TRL's SFTTrainer: "
            text += ", ".join(f"{name} {value}" for name, value in result["trl"].items()) + ".\n"
    print(text)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "table.md").write_text(text)
        (asked.out / "table.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
