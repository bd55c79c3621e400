"""Data drawn at random, beside a plain reading of it that shares no code with tawpipe.data.

The plain reading knows what a row means, because it was written from that: pieces of text that are learned or not. What
an epoch shows is spelled token by token, and compared with these pieces byte by byte. Held-out documents are looked at
likewise, and their loss is that of a plain model on each alone.
"""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from chat_families import FAMILIES, TRAINED
from pipelines import make_pipeline
from states import ALONE
from tawpipe.data.prepare import prepare_data
from tawpipe.data.settings import DataSettings
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE
from tawpipe.train.batches import Batches
from tawpipe.train.judging.evaluation import Evaluation
from tawpipe.train.settings.config import EvaluationConfig, TrainConfig
from tawpipe.train.settings.decided import BatchShape

NAMES = ["{0}", "{0}", "[{0}] x", "{0}*", "what{0}?", "[!a]{0}", "half={0}"]
"""Stems of files; most could be read as patterns, which their neighbours match."""
LINKED = ["", "", "link", "circle"]
"""Ways to a file: by its name, by a link to it, or by a pattern in a folder with links in circles."""
FORMS = ["jsonl", "jsonl", "json", "parquet", "csv", "tsv", "txt"]
PROMPTS, ANSWERS = ["prompt", "instruction"], ["completion", "response", "output"]
COLUMNS = ["text", "messages", "conversations", *PROMPTS, *ANSWERS, "input", "system"]
BREAKS = ["\n", "\n\n", "\n\n\n\n", "\r\n", "\t", "  "]
PARTS = [*BREAKS, "and", "so it is", "é", "日本", "🙂", "7", '"', ",", "'", "''\"", "x" * 9]
TOKENIZERS = ["trained", "trained", "gemma3", "llama3", "mistral", "mistral", "qwen3"]
TRIES = 20_000
"""Ways in which pieces are laid out before it is left open whether they fit."""
LONGEST_TOKEN = 16
"""Bytes; the first token of a piece of a document is learned by nobody, and may be left out with it."""

Pieces = tuple[tuple[str, bool], ...]
"""A document: text, and whether it is learned."""


# what is drawn


def _text(draw: random.Random, *, longest: int = 8) -> str:
    parts = [str(draw.randrange(10**5)), *draw.choices(PARTS, k=draw.randint(0, longest))]
    return draw.choice(["", "", "", " ", *BREAKS]) + " ".join(parts)


def _meaning(draw: random.Random) -> dict[str, Any]:
    """What a row means."""
    kind, long = draw.choice(["text", "ask", "ask", "chat"]), 40 if draw.random() < 0.3 else 8
    if kind == "text":
        return {"text": _text(draw, longest=12)}
    if kind == "ask":
        named = {"prompt": draw.choice(PROMPTS), "answer": draw.choice(ANSWERS)}
        parts = [_text(draw, longest=long) for _ in range(draw.choice([1, 1, 2]))]
        return {"parts": parts, "said": _text(draw), "system": draw.choice(["", "", _text(draw)]), **named}
    turns = [["system", _text(draw), 1]] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        turns.append(["user", _text(draw, longest=long), 1])
        turns.append(["assistant", _text(draw), 0 if draw.random() < 0.15 else 1])
    return {"turns": turns}


def _bad(draw: random.Random, names: dict[str, str]) -> dict[str, Any]:
    """A row that is left out."""
    ask, more = {"prompt": _text(draw)}, {"instruction": _text(draw), "output": _text(draw)}
    chat = {"messages": [{"role": "user", "content": _text(draw)}]}
    row = draw.choice([ask | {"response": None}, ask | more, chat, {"body": _text(draw)}])
    return row | ({"output": None} if names.keys() & PROMPTS else {})  # one that is named would be the one that counts


def _row(draw: random.Random, one: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A row with this meaning, and perhaps with columns that hold nothing."""
    if "text" in one:
        row: dict[str, Any] = {"text": one["text"]}
    elif "parts" in one:
        row = {one["prompt"]: one["parts"][0], one["answer"]: one["said"]}
        row |= {"input": one["parts"][1]} if len(one["parts"]) > 1 else {}
        row |= {"system": one["system"]} if one["system"] else {}
    else:
        gpt = draw.random() < 0.5
        role, content = ("from", "value") if gpt else ("role", "content")
        roles = {"user": "human", "assistant": "gpt"} if gpt else {}
        turns = [
            {role: roles.get(who, who), content: said, **({} if weight else {"weight": 0})}
            for who, said, weight in one["turns"]
        ]
        row = {draw.choice(["messages", "conversations"]): turns}
    empty = {name: draw.choice([None, None, "", []]) for name in COLUMNS if name not in row and draw.random() < 0.2}
    row = {names.get(name, name): value for name, value in (row | empty).items()}
    return dict(draw.sample(list(row.items()), len(row)))


def draw(draw: random.Random) -> dict[str, Any]:
    """Files of rows, what each row means, and settings."""
    meanings = [_meaning(draw) for _ in range(draw.randint(1, 9))]
    names = {name: f"my {name}" for name in COLUMNS if draw.random() < 0.1}
    sets = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        form = draw.choice(FORMS)
        some = [draw.choice(meanings) for _ in range(draw.randint(1, 6))]
        rows = [[_row(draw, one, names), one] for one in some]
        rows += [[_bad(draw, names), None] for _ in range(draw.choice([0, 0, 0, 2]))]
        draw.shuffle(rows)
        if form == "txt":
            text = {"text": _text(draw, longest=12)}
            rows = [[text, text]]
        packed = {"gz": draw.random() < 0.2, "bom": draw.random() < 0.2, "style": draw.randrange(99)}
        packed |= {"name": draw.choice(NAMES), "linked": draw.choice(LINKED)}
        sets.append({"form": form, "rows": rows, **packed})
    cut = draw.random() < 0.5
    case = {
        "sets": sets,
        "names": names,
        "use": draw.choice(["mixture", "mixture", "validation"]) if len(sets) > 1 else "one",
        "tokenizer": draw.choice(TOKENIZERS),
        "template": draw.choice([None, None, None, "plain", "chatml"]),
        "as_chat": draw.choice(["off", "off", "on", "auto"]),
        "packing": draw.choice([*(["split"] * 2 * cut), "fit", "balanced", "none"]),
        "length": draw.randint(12, 60) if cut else 1024,
        "fraction": draw.choice([0.0, 0.1, 0.5, 0.9]),
        "epoch": draw.choice([0, 0, 1]),
        "seed": draw.randrange(99),
        "evaluated": draw.choice([0, 0, 1, 2]),
    }
    stream = case["packing"] in ("balanced", "none") and not cut and draw.random() < 0.3
    # Of what a mixture holds out, validation has shares, and how long a pass of a stream is, nobody says.
    stream = stream and (case["use"] != "mixture" or case["fraction"] == 0)
    return case | {"window": draw.choice([2, 4096] if case["fraction"] == 0 else [4096]) if stream else 0}


# the plain reading


def _chat(name: str, turns: list[list[Any]], bos: str, eos: str) -> Pieces:
    """A chat as the template says, by hand, through its last learned answer; the white space behind an end is shown."""
    pieces: list[tuple[str, bool]] = [(bos, False)] if name in ("llama3", "gemma3", "mistral") else []
    first = ""
    if name in ("gemma3", "mistral") and turns[0][0] == "system":
        first, turns = turns[0][1] + "\n\n", turns[1:]
    last_user = max(n for n, turn in enumerate(turns) if turn[0] == "user")
    for n, (role, said, weight) in enumerate(turns):
        mine = role == "assistant"
        if name not in ("plain", "chatml"):
            said = said.strip()
        before, after, lead = {
            "plain": (f"<|{role}|>\n", (eos if mine else "") + "\n", ""),
            "chatml": (f"<|im_start|>{role}\n", "<|im_end|>\n", ""),
            "qwen3": (f"<|im_start|>{role}\n", "<|im_end|>\n", "<think>\n\n</think>\n\n" if n > last_user else ""),
            "llama3": (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""),
            "gemma3": (f"<start_of_turn>{'model' if mine else 'user'}\n", "<end_of_turn>\n", "" if n else first),
            "mistral": ("", eos, " ") if mine else ("[INST] ", "[/INST]", first if n == last_user else ""),
        }[name]
        lead = "" if name == "qwen3" and not mine else lead
        pieces += [(before, False), (lead + said + after.rstrip("\n"), bool(mine and weight))]
        pieces += [("\n", False)] if after.endswith("\n") else []
    return tuple(pieces)


def _chats(name: str, turns: list[list[Any]], bos: str, eos: str) -> list[Pieces]:
    """The documents of a chat: one for every answer where the template shows earlier turns otherwise than the last."""
    learned = [n for n, (role, said, weight) in enumerate(turns) if role == "assistant" and weight and said.strip()]
    endless = name == "chatml" and eos != "<|im_end|>"  # without a token that ends a turn, the end of text does
    if endless or name == "qwen3" or (name == "mistral" and turns[0][0] == "system"):
        alone = []
        for last in learned:
            shown = [[role, said, int(n == last)] for n, (role, said, _) in enumerate(turns[: last + 1])]
            alone.append(_chat(name, shown, bos, eos))
        return [(*each[:-1], ("\n" + eos, True)) for each in alone] if endless else alone
    blank = [[role, said, int(weight and bool(said.strip()))] for role, said, weight in turns]
    return [_chat(name, blank[: learned[-1] + 1], bos, eos)] if learned else []


def _documents(one: dict[str, Any], case: dict[str, Any], tokenizer: Any) -> list[Pieces]:
    """The documents that a row means; none if nothing of it is learned."""
    name = case["template"] or (case["tokenizer"] if case["tokenizer"] != "trained" else "plain")
    eos = tokenizer.eos_token
    if name == "chatml" and "<|im_end|>" in tokenizer.get_vocab():
        eos = "<|im_end|>"
    first, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    placed = tokenizer.decode(first[:1]) if first[0] != plain[0] else ""
    begin = placed if tokenizer.bos_token in (None, placed) else ""
    has_template = bool(case["template"]) or case["tokenizer"] != "trained"
    as_chat = case["as_chat"] == "on" or (case["as_chat"] == "auto" and has_template)
    if "turns" in one or ("parts" in one and as_chat):
        turns = one.get("turns")
        if not turns:
            texts = {"system": one["system"], "user": "\n".join(one["parts"]), "assistant": one["said"]}
            turns = [[role, text, 1] for role, text in texts.items() if text]
        found = _chats(name, turns, tokenizer.bos_token or "", eos)
        found = [each if each[0][0] == begin else ((begin, False), *each) for each in found]
        if case["tokenizer"] == "mistral" and name != "mistral" and not begin:
            found = [((" ", False), *each) for each in found]
        return found
    given, said = "", one.get("text") or one.get("said") or ""
    if "parts" in one:
        parts = [one["system"], *one["parts"]] if one["system"] else one["parts"]
        given = "".join(parts) if one["answer"] == "completion" else "".join(part + "\n\n" for part in parts)
    if case["tokenizer"] == "mistral":  # it puts a space before a text
        first = given or said
        lead = "" if first.startswith(" ") else " "
        given, said = (lead + given, said) if given else (given, lead + said)
    return [((begin, False), (given, False), (said, True), (eos, True))]


class Shown(NamedTuple):
    """Bytes, each with whether it is learned; of what an epoch shows the first token's are not known."""

    text: bytes
    learned: tuple[bool, ...]
    first: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, pieces: Pieces) -> Shown:
        parts = [(text.encode(), counts) for text, counts in pieces]
        return cls(b"".join(text for text, _ in parts), tuple(counts for text, counts in parts for _ in text))

    def holds(self, at: int, other: Shown) -> bool:
        """True if the other is what stands here from ``at`` on."""
        begin, end = at + other.first, at + len(other.text)
        return self.text[at:end] == other.text and self.learned[begin:end] == other.learned[other.first :]


ORDINARY = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(one): one for one in ORDINARY} | {
    chr(256 + n): one for n, one in enumerate(sorted({*range(256)} - {*ORDINARY}))
}
"""Letters of byte-level vocabularies, and what they stand for."""


def _spelled(tokenizer: Any, number: int, pieces: bool) -> bytes:
    token = tokenizer.convert_ids_to_tokens(number)
    if number in tokenizer.added_tokens_decoder:
        return token.encode()
    if not pieces:
        return bytes(BYTES[letter] for letter in token)
    return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()


def _shown(source: Any, samples: range, spell: Callable[[int], bytes], pad: int) -> list[Shown]:
    """The segments of some samples, without padding."""
    found = []
    for number in samples:
        row = source.sample(number)
        ids, labels = row.input_ids[0].tolist(), row.labels[0].tolist()
        at = 0
        for length in row.lengths:
            own, said = ids[at : at + length], labels[at : at + length]
            at += length
            wrong = [pair for pair in zip(said, [*own[1:], IGNORE], strict=True) if pair[0] not in (IGNORE, pair[1])]
            assert not wrong, f"labels that are not the next token: {wrong}"
            parts = [spell(token) for token in own]
            flags = [False, *(label != IGNORE for label in said[:-1])]
            learned = tuple(flag for part, flag in zip(parts, flags, strict=True) for _ in part)
            if any(flags) or any(token != pad for token in own):
                found.append(Shown(b"".join(parts), learned, len(parts[0]), length))
    return found


def _places(text: bytes, part: bytes, at: int = 0) -> Iterator[int]:
    at = text.find(part, at)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _untiled(documents: Sequence[Shown], left: Sequence[Shown], length: int, packing: str, pad: bytes) -> str:
    """What is left if every document is laid out with segments; empty if nothing is."""
    for one in left:
        if not any(document.holds(at, one) for document in documents for at in _places(document.text, one.text)):
            return f"in no row: {one.text}, of which is learned {bytes(compress(one.text, one.learned))}"
    deepest, tries = [0, 0], [0]

    def lay(number: int, at: int, left: tuple[Shown, ...]) -> bool:
        tries[0] += 1
        if [number, at] > deepest:
            deepest[:] = number, at
        if number == len(documents) or tries[0] > TRIES:
            return not left or tries[0] > TRIES
        document = documents[number]
        if at == len(document.text):
            return lay(number + 1, 0, left)
        for n, one in enumerate(left):
            begins = [at] if packing in ("split", "fit") else _places(document.text, one.text, at)
            for begin in begins:
                end = begin + len(one.text)
                if sum(document.learned[at:begin]) > LONGEST_TOKEN:
                    break
                if packing == "fit" and one.tokens == length:
                    end = len(document.text)  # the rest is cut off
                whole = packing != "fit" or end == len(document.text)
                if whole and document.holds(begin, one) and lay(number, end, left[:n] + left[n + 1 :]):
                    return True
        if packing == "split":  # padding alone is not told apart from padding
            end = at + len(pad)
            return document.text[at:end] == pad and lay(number, end, left)
        rest = document.learned[at : at + length if packing == "fit" else None]
        return sum(rest) <= LONGEST_TOKEN and lay(number + 1, 0, left)

    if lay(0, 0, tuple(sorted(left, key=lambda one: -len(one.text)))):
        return ""
    lost = [document.text for document in documents[deepest[0] : deepest[0] + 1]]
    return f"not laid out from byte {deepest[1]} on: {lost} with {[one.text for one in left]}"


# the files


def _entry(folder: Path, number: int, one: dict[str, Any]) -> str:
    """Write the file of a set, with neighbours that its name would match as a pattern; return what names it."""
    inside = folder / one["name"].format(number)
    inside.mkdir()
    path = _write(inside, number, one)
    suffix = path.name.removeprefix(one["name"].format(number))
    for stem in {f"{number}", f"{number}9", f"what{number}1", f"b{number}"} - {path.name.removesuffix(suffix)}:
        (inside.parent / stem).mkdir(exist_ok=True)
        for neighbour in {
            folder / stem / path.name,
            *([] if one["linked"] == "circle" else [inside / (stem + suffix)]),
        }:
            neighbour.write_bytes(b"a neighbour")
    if one["linked"] == "circle":
        for link, target in {"above": ".", "again" + suffix: path.name, "[loop]": f"../{inside.name}"}.items():
            (inside / link).symlink_to(target)
        return f"{inside}/**/*"
    if one["linked"] == "link":
        (inside / f"a[{number}]{suffix}").symlink_to(path.name)
        return f"{inside}/a[{number}]{suffix}"
    return str(path)


def _write(folder: Path, number: int, one: dict[str, Any]) -> Path:
    draw, rows = random.Random(one["style"]), [row for row, _ in one["rows"]]
    path = folder / f"{one['name'].format(number)}.{one['form']}"
    names = list(dict.fromkeys(name for row in rows for name in row))
    if one["form"] == "parquet":
        table = [{name: _as_text(row.get(name)) for name in names} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return path
    if one["form"] == "txt":
        text = rows[0]["text"]
    elif one["form"] in ("csv", "tsv"):
        quoting, end = (
            draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
            draw.choice(["\n", "\r\n"]),
        )
        stream, delimiter = io.StringIO(), "," if one["form"] == "csv" else "\t"
        table = csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator=end)  # pyright: ignore
        table.writerows([names, *([_as_text(row.get(name)) or "" for name in names] for row in rows)])
        text = stream.getvalue()
    elif one["form"] == "json":
        text = json.dumps(rows, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
    else:
        lines = [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows]
        lines += draw.choice([[], ["", "  "], ["{"], ['{"text": "a", "text": "b"}']])
        text = draw.choice(["\n", "\r\n"]).join(lines) + draw.choice(["", "\n"])
    data = (b"\xef\xbb\xbf" if one["bom"] else b"") + text.encode()
    if one["gz"]:
        path, data = path.with_name(path.name + ".gz"), gzip.compress(data)
    path.write_bytes(data)
    return path


def _as_text(value: Any) -> Any:
    """What a table has of a row's value."""
    return (json.dumps(value) if value else None) if isinstance(value, list) else value


def check(case: dict[str, Any]) -> str:
    """What differs between what an epoch shows and what the rows mean.

    Raises:
        UserError: nothing is learned, as the plain reading says as well.
    """
    tokenizer = copy.deepcopy(TRAINED if case["tokenizer"] == "trained" else FAMILIES[case["tokenizer"]][0])
    means = [[one for _, one in each["rows"] if one] for each in case["sets"]]
    documents = [[Shown.of(each) for one in own for each in _documents(one, case, tokenizer)] for own in means]
    with tempfile.TemporaryDirectory(prefix="tawpipe-hunt-") as folder:
        paths = [_entry(Path(folder), number, one) for number, one in enumerate(case["sets"])]
        settings = DataSettings(
            data=[f"{path}={1 + n}" for n, path in enumerate(paths)] if case["use"] == "mixture" else paths[:1],
            validation_data=paths[1:] if case["use"] == "validation" else [],
            validation_fraction=case["fraction"],
            columns=[f"{name}={column}" for name, column in case["names"].items()],
            chat_template=case["template"],
            as_chat=case["as_chat"],
            long_chats="anywhere",  # which is laid out here as well
            packing=case["packing"],
            streaming=case["window"] > 0,
            stream_window=case["window"] or 4096,
            cache_dir=f"{folder}/cache",
        )
        try:
            data = prepare_data(settings, sequence_length=case["length"], seed=case["seed"], tokenizer=tokenizer)
        except UserError as error:
            if all(documents) and case["length"] == 1024 and not case["window"]:
                return f"refused: {error}"
            raise
        if case["use"] == "validation":
            documents = [documents[0], [one for own in documents[1:] for one in own]]
        wrong = _compared(case, documents, data, tokenizer)
        if not wrong and case["evaluated"] and data.validation is not None:
            wrong = _evaluated(case, data, paths)
    return wrong


def _compared(case: dict[str, Any], documents: list[list[Shown]], data: Any, tokenizer: Any) -> str:
    pad = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
    if case["template"] == "chatml" and "<|im_end|>" in tokenizer.get_vocab():
        pad = tokenizer.pad_token_id or tokenizer.convert_tokens_to_ids("<|im_end|>")
    spell = lambda number: _spelled(tokenizer, number, case["tokenizer"] in ("gemma3", "mistral"))  # noqa: E731
    out = [] if data.validation is None else _shown(data.validation, range(len(data.validation)), spell, pad)
    trained = []
    for one, own in zip(data.sets, documents, strict=False):
        if case["window"]:  # an epoch has what is not held out
            held = case["use"] != "validation" and [one.text for one in out]
            rows = sum(not held or document.text not in held for document in own)
        else:
            rows = len(one)
        trained.append(_shown(one, range(case["epoch"] * rows, (case["epoch"] + 1) * rows), spell, pad))
    count = sum(map(len, documents[: len(trained)]))
    if (read := data.report.read.documents) != count and case["window"] != 2:
        return f"{read} documents read, not {count}"
    how = case["length"], case["packing"], spell(pad)
    if case["use"] == "validation":
        return _untiled(documents[0], trained[0], *how) or _untiled(documents[1], out, *how)
    wrong = _untiled(documents[0], [*trained[0], *out], *how) if case["use"] == "one" else ""
    if wrong or case["length"] < 1024:
        return wrong
    return _sides(case, documents, trained, out, tokenizer)


def _sides(
    case: dict[str, Any], documents: list[list[Shown]], trained: list[list[Shown]], out: list[Shown], tokenizer: Any
) -> str:
    """What is wrong with what is held out, where every document is shown whole."""
    known = list(dict.fromkeys(one for own in documents for one in own))

    def whole(segments: list[Shown]) -> Counter[Shown]:
        found = Counter[Shown]()
        for one in segments:
            found[next((d for d in known if len(d.text) == len(one.text) and d.holds(0, one)), one)] += 1
        return found

    held = set(whole(out))
    for number, (own, seen) in enumerate(zip(documents, map(whole, trained), strict=True)):
        if both := held & set(seen):
            return f"trained on in set {number}, and held out: {[one.text for one in both]}"
        if unknown := set(seen) - set(own):
            return f"in no row of set {number}: {[one.text for one in unknown]}"
        if wrong := [one.text for one, count in Counter(own).items() if seen[one] not in (0, count)]:
            return f"not as often as in set {number}: {wrong}"
        if missing := [one.text for one in set(own) - set(seen) - held if case["use"] == "one"]:
            return f"neither trained on nor held out: {missing}"
    spare = any(not any(set(own) == {one} for own in documents) for one in known)
    rows = (_documents(one, case, tokenizer) for each in case["sets"] for _, one in each["rows"] if one)
    alone = all(len(row) <= 1 for row in rows)  # the documents of a row stay on one side
    if case["fraction"] > 0 and bool(out) != spare and not case["window"] and alone:
        return f"{len(out)} held out, though one document {'could' if spare else 'could not'} be spared"
    return ""


def _evaluated(case: dict[str, Any], data: Any, paths: list[str]) -> str:
    """The validation loss of a small model beside that of each held-out document alone."""
    torch.set_num_threads(1)
    size = max(data.tokenizer.get_vocab().values()) + 1
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    config: Any = LlamaConfig(vocab_size=size, max_position_embeddings=2048, **sizes)
    model, rows = LlamaForCausalLM(config).double(), case["evaluated"]
    given: dict[str, Any] = {
        "data": paths,
        "sequence_length": case["length"],
        "global_batch": rows,
        "packing": case["packing"],
    }
    config = TrainConfig(**given, evaluation=EvaluationConfig(every=1, batches=10**6))
    total, tokens = 0.0, 0
    with torch.no_grad():
        count = len(data.validation)
        for number in range(count if case["packing"] == "balanced" else max(count // rows, 1) * min(rows, count)):
            row, at = data.validation.sample(number), 0
            for length in row.lengths:
                ids, labels = (one[:, at : at + length] for one in (row.input_ids, row.labels))
                at += length
                if (labels != IGNORE).any():
                    logits = model(ids).logits[0]
                    total += F.cross_entropy(logits, labels[0], ignore_index=IGNORE, reduction="sum").item()
                    tokens += int((labels != IGNORE).sum())
    bins = {"bin_tokens": 3 * case["length"]} if case["packing"] == "balanced" else {}
    pipeline = make_pipeline(model, world=ALONE, dtype=torch.float64, check="never", **bins)
    evaluation, shape = config.evaluation, BatchShape.of(config, config.packing, 1)
    batches = Batches(shape, pipeline, data, model=config.model, evaluated=evaluation.batches)
    try:
        found: Any = Evaluation(evaluation, pipeline, data, batches).measure(0)["validation_loss"]
    finally:
        batches.close()
        pipeline.close()
    same = abs(found * tokens - total) <= 1e-9 * total if tokens else math.isnan(found)
    return "" if same else f"validation loss {found}, plain {total} over {tokens} tokens"
