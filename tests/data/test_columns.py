"""Rows with more columns than they need: what holds something is meant, and nothing is dropped without a word."""

import re

import pytest

from chats import learned
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Renderer
from tawpipe.data.report import Skipped
from tawpipe.data.tokenizer import train_tokenizer

CHAT = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
SAID = "<|assistant|>\nFour.<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the answer to every question is a number of the house " * 20], 300)


def text_of(tokenizer, row: dict, *names: str) -> tuple[str, str]:
    """The row's document, and what is learned of it."""
    whole, (said,) = learned(tokenizer, row, *names)
    return whole.replace("<|endoftext|>", "").strip(), said.replace("<|endoftext|>", "").strip()


@pytest.mark.parametrize("nothing", [None, "", []])
def test_empty_column_never_hides_a_filled_column(tokenizer, nothing):
    for full, *empty in (("instruction", "prompt"), ("prompt", "instruction", "messages", "text")):
        row = dict.fromkeys(empty, nothing) | {full: "a", "output": "b"}
        assert text_of(tokenizer, row) == ("a\n\nb", "b")
    for full, *empty in (("output", "response", "completion"), ("response", "output", "conversations")):
        row = {"prompt": "a"} | dict.fromkeys(empty, nothing) | {full: "b"}
        assert text_of(tokenizer, row) == ("a\n\nb", "b")
    for full, *empty in (("conversations", "messages"), ("messages", "prompt", "completion", "text", "conversations")):
        assert text_of(tokenizer, dict.fromkeys(empty, nothing) | {full: CHAT})[1] == "Four."
    assert text_of(tokenizer, {"messages": nothing, "prompt": nothing, "completion": nothing, "text": "a"})[0] == "a"


def test_a_prompt_may_be_empty(tokenizer):
    for nothing in ("", None):
        assert text_of(tokenizer, {"prompt": nothing, "completion": "b"}) == ("b", "b")
    given, said = [CHAT[:1], CHAT[1:]]
    for prompt, whole in ((given, "<|user|>\nTwo and two?\n<|assistant|>\nFour."), ([], "<|assistant|>\nFour.")):
        assert text_of(tokenizer, {"prompt": prompt, "completion": said}) == (whole, "Four.")


@pytest.mark.parametrize(
    ("row", "names", "expected"),
    [
        ({"prompt": "a", "instruction": "c", "output": "b"}, "prompt=instruction", "c\n\nb"),
        ({"prompt": "a", "instruction": "c", "output": "b"}, "instruction=prompt", "a\n\nb"),
        ({"prompt": "a", "response": "b", "output": "c"}, "output=output", "a\n\nc"),
        ({"text": "x", "messages": CHAT, "conversations": [*CHAT, *CHAT]}, "messages=messages", SAID),
    ],
)
def test_two_filled_columns_for_one_use_need_the_columns_setting(tokenizer, row, names, expected):
    raw = Columns().row("here", row)
    assert isinstance(raw, RawRow)
    skipped = Renderer(tokenizer).render(raw)[-1]
    assert isinstance(skipped, Skipped) and skipped.kind == "row"
    assert re.search("filled.*of which --columns names one", str(skipped))
    whole, _ = text_of(tokenizer, row, names)
    assert whole.endswith(expected.replace("<|endoftext|>", ""))


def test_two_columns_with_equal_content_count_as_one(tokenizer):
    row = {"prompt": "a", "instruction": "a", "response": "b", "output": "b"}
    assert text_of(tokenizer, row) == ("a\n\nb", "b")
    forms = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]
    assert text_of(tokenizer, {"messages": CHAT, "conversations": forms})[1] == "Four."
