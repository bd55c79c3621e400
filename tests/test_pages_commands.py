"""Every command that a page shows: no option that does not exist, and what can run here runs, on small data."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from forked_commands import run_tawpipe
from pages import PAGES, ROOT, Command, commands, complaint, inline_options, inline_scripts, known_options
from runs import TIMEOUT_S, environment
from tawpipe.cli import main
from tawpipe.commands import plan
from tawpipe.data.chats.templates import PLAIN
from tawpipe.data.tokenizer import train_tokenizer

ALL = [command for page in PAGES for command in commands(page)]
NOT_RUN = {
    r"torchrun .*": "needs several machines, or GPUs",
    r"tawpipe lab .*": "needs root and network namespaces: tests/lab makes such clusters",
    r"make (test|test-slow|test-all|lint|format|docs)\b.*": "works on this repository: CI runs it",
    r"make demo": "needs a model of 93 MB: tests/test_demo.py",
    r"python -m (venv|pip) .*": "installs: CI does it",
    r"tawpipe .*hf:org/name.*": "a data set of nobody: tests/data has a stand-in for the Hub",
    r"tawpipe .*/shared/.*": "needs a file that a cluster writes",
    r"tawpipe train (?=.*\.\.\.).*": "leaves options out",
    r"tawpipe open .*": "serves until ctrl-C: tests/commands/test_open.py",
    r"tawpipe train .*--inject rank=2.*": "a fault in step 7: tests/launch/test_restarts.py has such faults",
    r"tawpipe train --import examples/.*": "tests/schedule/test_add_a_strategy.py runs it",
    r"tawpipe plan .* --topology (cluster|machine)\.yaml .*": "needs a file that a cluster writes",
}
"""Commands that this file does not run, each with the reason."""
RUN_ELSEWHERE = {
    "coming-from.md": "tests/test_coming_from.py",
    "fine-tuning.md": "tests/test_fine_tuning.py",
    "serving.md": "tests/serving/test_serve_command.py",
}
STAND_INS = {
    "path/to/llama": "small-model",
    "path/to/model": "small-model",
    "my-model": "small-model",
    "Qwen/Qwen3-0.6B": "small-model",
    "Qwen/Qwen3-8B": "small-model",
    "meta-llama/Llama-3.1-8B": "llama-8b",
}
"""Models that nobody has here, and what is there instead."""
GIVEN = ["--model", "small-model", "--data", "corpus/*.txt"]
SMALL = ["--nproc", "1", "--nodes", "1", "--sequence-length", "128", "--micro-batch", "1"]
SMALL += ["--steps", "2", "--plan", "none", "--check", "never", "--sample.tokens", "2", "--cache-dir", "cache"]
SMALL += ["--validation-fraction", "0.2", "--evaluation.batches", "1", "--schedule.sequence-ranks", "1"]

RAN = set[tuple[str, ...]]()
"""Words of plans and checks that have run."""


def _not_run(command: Command) -> str | None:
    return next((pattern for pattern in NOT_RUN if re.fullmatch(pattern, command.text, flags=re.DOTALL)), None)


TO_RUN = [one for one in ALL if one.tawpipe and not _not_run(one) and one.page not in RUN_ELSEWHERE]


def test_parsers_accept_every_command_of_every_page():
    complaints = {f"{one.page}: {one.text}": said for one in ALL if (said := complaint(one))}
    assert not complaints
    assert len(ALL) > 40


def test_wrong_option_on_a_page_is_detected():
    for words in ("tawpipe train --learning-rat 1", "tawpipe plan --model tiny --topologie 2x2", "make trian"):
        assert complaint(Command("page.md", tuple(words.split())))


def test_options_in_page_text_exist():
    known = known_options()
    unknown = {
        f"{page.name}: {code}"
        for page in PAGES
        for option, code in inline_options(page)
        if option not in known and not any(one.startswith(option.removesuffix(".") + ".") for one in known)
    }
    assert not unknown


def test_scripts_in_page_text_exist_with_their_options(tmp_path: Path):
    (tmp_path / "page.md").write_text("Run `python benchmarks/none.py\n--out DIR`, not `python -m pip`.")
    assert [*inline_scripts(tmp_path / "page.md")] == [("benchmarks/none.py", "--out", "DIR")]
    scripts = [(page.name, *words) for page in PAGES for words in inline_scripts(page)]
    missing = {(page, file) for page, file, *_ in scripts if not (ROOT / file).exists()}
    assert not missing and len(scripts) > 25
    unknown = {
        (page, file, word)
        for page, file, *words in scripts
        if file.startswith("benchmarks/")
        for word in words
        if word.startswith("--") and f'"{word}"' not in (ROOT / file).read_text(encoding="utf-8")
    }
    assert not unknown


def test_every_page_command_is_run_or_listed_as_not_run():
    unused = [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, one.text, re.DOTALL) for one in ALL)]
    assert not unused, "no page has such a command any more"
    assert {one.page for one in ALL} >= RUN_ELSEWHERE.keys() and all(
        (ROOT / o).exists() for o in RUN_ELSEWHERE.values()
    )
    left = [one.text for one in ALL if not one.tawpipe and not _not_run(one) and one.page not in RUN_ELSEWHERE]
    assert not left, "run it, or say in NOT_RUN why not"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages' commands read, small."""
    folder = tmp_path_factory.mktemp("pages")
    draw = random.Random(0)
    words = ["".join(draw.choice("bdklmnrst") + draw.choice("aeiou") for _ in range(2)) for _ in range(60)]
    texts = [" ".join(draw.choice(words) for _ in range(100)) for _ in range(40)]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder / "small-model")
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder / "small-model")),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "small-model")
    chat = [
        [{"role": "user", "content": texts[i][:20]}, {"role": "assistant", "content": texts[i][20:30]}]
        for i in range(40)
    ]
    lines = "\n".join(json.dumps({"messages": turns}) for turns in chat) + "\n"
    for name in ("chats.jsonl", "chats/one.jsonl", "more/two.jsonl", "corpus/three/four.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(lines)
    for name in ("corpus/one.txt", "books/one.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n\n".join(texts))
    (folder / "corpus" / "two.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode()))
    rows = [f"{text[:15]},{text[15:25]}" for text in texts]
    (folder / "questions.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    return folder


def _pages() -> list[Any]:
    pages = sorted({one.page for one in TO_RUN})
    return [pytest.param(page, marks=pytest.mark.slow) for page in pages]


@pytest.mark.usefixtures("few_strategies", "short_past")
@pytest.mark.parametrize("page", _pages())
def test_commands_of_every_page_run(page: str, place: Path, tmp_path: Path, monkeypatch, capsys):
    """In their order, because some use what others have made."""
    folder = shutil.copytree(place, tmp_path / "page")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(plan, "MOST_S", 1.0)
    for number, command in enumerate(one for one in TO_RUN if one.page == page):
        words = [STAND_INS.get(word, word) for word in command.tawpipe or []]
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        if words[0] in ("plan", "prove") and ((*words,) in RAN or RAN.add((*words,))):
            continue  # on another page, and nothing is made by it
        if "--longest" in words:
            words += ["--model", "small-125m", "--topology", "2x2@10gbit"]  # tests/plan has the large ones
        if words[0] == "plan" and "--tokens-per-step" in words:
            words += ["--tokens-per-step", "65536", "--max-document", "16384", "--topology", "2x2@100gbit"]
        if words[0] == "train":
            words += ["--tokens-per-step", "512", "--max-document", "64"] if "--tokens-per-step" in words else []
            words += [] if "--model" in words else GIVEN[:2]
            words += [*([] if "--data" in words else GIVEN[2:]), *SMALL]
            words += [] if "--output" in words else ["--output", f"runs/{number}"]  # two in a second have one name
        elif words[0] == "prove":
            words += ["--device", "cpu", "--nproc", "2", "--only", "kernel"]
            done = run_tawpipe(words, environment(), TIMEOUT_S)
            assert done.returncode == 0, (command.text, done.stderr)
            continue
        elif "runs/first" in words and not Path("runs/first").exists():
            assert main(["train", *GIVEN, *SMALL, "--output", "runs/first"]) == 0
        assert main(words) == 0, (command.text, capsys.readouterr().err)
