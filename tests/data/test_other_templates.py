"""Chat templates of other people judge what is learned: 41 of the `trl` package, 30 shapes of chats.

For an answer, P is the prompt that transformers renders and R the chat up to the answer. What is learned is R without P
through its last special token. `answers_left_out.json` lists the answers that are not learned; it is written anew by
`python tests/data/test_other_templates.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections import Counter, defaultdict
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chat_families import byte_level
from chat_shapes import SHAPES
from tawpipe.data.chats.chat import Chat, ChatRenderer
from tawpipe.data.chats.messages import Malformed

LEFT_OUT = Path(__file__).with_name("answers_left_out.json")
MARKERS = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[a-z_]{2,30}\|>|<(?:start|end)_of_[a-z]+>|<end_of_utterance>|</?s>|<bos>|<eos>"
)
"""Texts that are tokens of their own in the models of these templates."""
REASONS = {
    "which the chat template refuses": "the template raises",
    "with tool calls, which": "the template shows no calls",
    "with tools, which": "the template shows no calls",
    "with words beside a call": "the template drops words beside a call",
    "with an answer that the chat template leaves out": "the template shows only pictures",
    "with a turn that the chat template leaves out": "the template shows no calls",
    "with an answer that the chat template shows behind no prompt": "no prompt",
    "with an answer that lacks a thought": "no prompt",
}
ONLY_PICTURES = ("idefics3", "llava_next", "smolvlm")
THOUGHTS = "reasoning_content", "reasoning", "thinking"


def folder() -> Path | None:
    spec = importlib.util.find_spec("trl")
    return Path((spec.submodule_search_locations or [""])[0], "chat_templates") if spec else None


needs_trl = pytest.mark.skipif(folder() is None, reason="needs the chat templates of the trl package")


@cache
def templates() -> dict[str, Any]:
    """A tokenizer for every template, whose markers are special tokens."""
    made = {}
    for path in sorted((folder() or Path()).glob("*.jinja")):
        if not path.stem.endswith("_training"):
            text = path.read_text(encoding="utf-8")
            tokenizer = byte_level(text, sorted({*MARKERS.findall(text), "<|endoftext|>", "<s>"}))
            tokenizer.eos_token, tokenizer.bos_token = "<|endoftext|>", "<s>"
            made[path.stem] = tokenizer
    return made


def rendered(tokenizer: Any, messages: list[dict], asks: bool, **given: Any) -> str:
    """The messages as transformers renders them, nulls included, which apply_chat_template takes away."""
    given |= {"chat_template": tokenizer.chat_template, "add_generation_prompt": asks}
    return render_jinja_template([messages], **given, **tokenizer.special_tokens_map)[0][0]


def in_every_form(messages: list[dict]) -> list[list[dict]]:
    """Thoughts under every name, arguments as an object and as text, no content as null and as an empty text."""
    forms = []
    has_calls = any(message.get("tool_calls") for message in messages)
    for as_text, content in product((False, True), (None, "")) if has_calls else [(False, "")]:
        form = [dict(message) for message in messages]
        for message in form:
            if thought := message.pop("reasoning_content", None):
                message |= dict.fromkeys(THOUGHTS, thought)
            for call in (calls := json.loads(json.dumps(message.get("tool_calls", [])))):
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = json.dumps(arguments) if as_text else arguments
            if calls:
                message |= {"tool_calls": calls, "content": message["content"] or content}
        forms.append(form)
    return forms


def expected(tokenizer: Any, messages: list[dict], tools: Any, number: int) -> set[str]:
    """P and the rest of R behind it, for the forms and switches in which R begins with P."""
    special = re.compile("|".join(re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values()))
    pairs = set()
    switches = {}, {"enable_thinking": True}, {"enable_thinking": False}
    for switch, form in product(switches, in_every_form(messages)):
        if pairs and switch:
            break
        render = partial(rendered, tokenizer, tools=tools, **switch)
        try:
            prompt, shown = render(form[:number], True), render(form[: number + 1], False)
        except Exception:  # a template may raise anything
            continue
        if not shown.startswith(prompt):
            continue
        rest = shown[len(prompt) :]
        ends = [match.end() for match in special.finditer(rest)]
        if ends:
            pairs.add(prompt + "\0" + rest[: ends[-1]])
            continue
        bare = [{key: value for key, value in message.items() if key not in THOUGHTS} for message in form[: number + 1]]
        for message in bare:
            message["content"] = (message["content"] or "").rpartition("</think>")[2].strip()
        role = "tool" if bare[number].get("tool_calls") else "user"
        behind = render([*bare, {"role": role, "content": "?"}], False)[len(render(bare, False).rstrip()) :]
        marker = special.search(behind)
        pairs.add(prompt + "\0" + rest.rstrip() + (behind[: marker.end()] if marker else ""))
    return pairs


def prompts_of(tokenizer: Any, messages: list[dict], tools: Any, number: int) -> list[str]:
    prompts = []
    for form in in_every_form(messages):
        with contextlib.suppress(Exception):
            prompts.append(rendered(tokenizer, form[:number], True, tools=tools))
    return prompts


def thought_of(message: dict) -> str:
    tagged = (message["content"] or "").rpartition("</think>")[0]
    return (message.get("reasoning_content") or tagged.replace("<think>", "")).strip()


def ends_of(tokenizer: Any, messages: list[dict], tools: Any, number: int) -> list[str]:
    """The chat through an answer, in every form, up to its last special token."""
    special = re.compile("|".join(re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values()))
    ends = []
    for form in in_every_form(messages):
        with contextlib.suppress(Exception):
            shown = rendered(tokenizer, form[: number + 1], False, tools=tools)
            ends.append(shown[: [match.end() for match in special.finditer(shown)][-1]])
    return ends


def is_written(text: str, thought: str, words: str, ends: list[str]) -> bool:
    """True for a thought with its closing tag, if one is learned, and the end of a chat from the words or a call on."""
    before, close, body = text.rpartition("</think>")
    body = body.lstrip() if close else text
    is_header = re.fullmatch(r"(<\|\w+\|>\w*)*", body.partition(words or body)[0].replace(thought, ""))
    return before.strip() in ("", thought) and bool(is_header) and any(end.endswith(body) for end in ends)


def learned_of(name: str, shape: str) -> Chat | Malformed:
    messages, tools = SHAPES[shape]
    try:
        return ChatRenderer(templates()[name]).chat(messages, tools)
    except Malformed as refusal:
        return refusal


def answers_of(shape: str) -> list[int]:
    return [number for number, message in enumerate(SHAPES[shape][0]) if message["role"] == "assistant"]


def left_out(name: str, shape: str) -> dict[int, str]:
    """The answers that are not learned, with the reason."""
    chat = learned_of(name, shape)
    refusals = [chat] if isinstance(chat, Malformed) else chat.lost
    reasons = {}
    for refusal in refusals:
        reason = next(reason for why, reason in REASONS.items() if refusal.why.startswith(why))
        if reason == "the template raises" and name in ONLY_PICTURES:
            reason = "the template shows only pictures"
        place = re.match(r"message (\d+)", refusal.detail)
        numbers = [int(place[1]) - 1] if place and not isinstance(chat, Malformed) else answers_of(shape)
        reasons |= dict.fromkeys(numbers, reason)
    return reasons


@needs_trl
@pytest.mark.parametrize("name", [*templates()])
def test_learned_text_is_every_answer_once_behind_its_prompt(name):
    """Every answer that is not listed is learned once, behind its prompt, and nothing else is learned."""
    listed = json.loads(LEFT_OUT.read_text())[name]
    tokenizer = templates()[name]
    for shape, (messages, tools) in SHAPES.items():
        lost = {
            number: reason
            for reason, places in listed.items()
            for place in places
            for number in [int(place.rpartition(" ")[2])]
            if place.rpartition(" ")[0] == shape
        }
        assert left_out(name, shape) == lost, shape
        chat = learned_of(name, shape)
        pieces = [] if isinstance(chat, Malformed) else [
            ("".join(piece.text for piece in document[:at]), piece.text)
            for document in chat.documents
            for at, piece in enumerate(document)
            if piece.counts
        ]  # fmt: skip
        wanted = [number for number in answers_of(shape) if number not in lost]
        assert len(pieces) == len(wanted), (shape, pieces)
        for number in wanted:
            pairs = expected(tokenizer, messages, tools, number)
            words = (messages[number]["content"] or "").rpartition("</think>")[2].strip()
            if pairs:
                assert any("\0".join(piece) in pairs for piece in pieces), (shape, number, pieces, pairs)
            else:  # the history is shown otherwise behind the answer, or the prompt begins a thought
                prompts = prompts_of(tokenizer, messages, tools, number)
                thought, ends = thought_of(messages[number]), ends_of(tokenizer, messages, tools, number)
                behind = [text for given, text in pieces if given in prompts and words in text]
                assert any(is_written(text, thought, words, ends) for text in behind), (shape, number, pieces)


@needs_trl
def test_few_answers_are_left_out_because_the_template_has_no_prompt():
    listed = json.loads(LEFT_OUT.read_text())
    reasons = Counter(dict.fromkeys(REASONS.values(), 0))
    for places in listed.values():
        reasons.update({reason: len(some) for reason, some in places.items()})
    rendered = len(templates()) * sum(len(answers_of(shape)) for shape in SHAPES) - reasons["the template raises"]
    assert len(listed) == len(templates()) == 41 and len(SHAPES) == 30
    pictures = [name for name, places in listed.items() if "the template shows only pictures" in places]
    assert pictures == [*ONLY_PICTURES]
    assert reasons["no prompt"] <= 0.03 * rendered, reasons


def write_left_out() -> None:
    lists: dict[str, dict[str, list[str]]] = {}
    for name in templates():
        by_reason = defaultdict(list)
        for shape in SHAPES:
            for number, reason in left_out(name, shape).items():
                by_reason[reason].append(f"{shape} {number}")
        lists[name] = dict(by_reason)
    LEFT_OUT.write_text(json.dumps(lists, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_left_out()
