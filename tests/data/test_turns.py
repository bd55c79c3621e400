"""Turns of a chat that say of themselves that they are not learned."""

import json
import re

import pytest

from chats import learned
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Renderer
from tawpipe.data.report import Skipped
from tawpipe.data.tokenizer import train_tokenizer

CHAT = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the answer to every question is a number of the house " * 20], 300)


@pytest.mark.parametrize("kind", ["messages", "conversations"])
def test_a_turn_of_weight_0_is_not_learned(tokenizer, kind):
    def turns(*weights: object) -> list[dict]:
        role, content = ("role", "content") if kind == "messages" else ("from", "value")
        asked = {role: "user", content: "a", "weight": None}
        return [one for n, weight in enumerate(weights) for one in (
            asked, {role: "assistant", content: f"say {n}", **({} if weight == "none" else {"weight": weight})}
        )]  # fmt: skip

    for weights, said in (([0, 1], ["say 1"]), ([1, 0, None], ["say 0", "say 2"]), ([0.0, "none"], ["say 1"])):
        _, parts = learned(tokenizer, {kind: turns(*weights)})
        assert [part.replace("<|endoftext|>", "").strip() for part in parts] == said
    for weights, why in (
        ([0, 0], "without an answer to learn"),
        ([0.5], "with a learning mark other than 0, 1"),
    ):
        raw = Columns().row("here", {kind: turns(*weights)})
        assert isinstance(raw, RawRow)
        (skipped,) = Renderer(tokenizer).render(raw)
        assert isinstance(skipped, Skipped) and re.search(why, str(skipped))


def test_turn_of_weight_0_is_not_learned_in_a_template_with_marks(tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}{{ m.content }}{% endgeneration %}]"
        "{% else %}({{ m.content }}){% endif %}{% endfor %}"
    )
    tokenizer = train_tokenizer(["the answer " * 20], 300)
    tokenizer.chat_template = template
    turns = [{**one, "weight": weight} for weight in (1, 0, 1) for one in CHAT]
    assert learned(tokenizer, {"messages": json.dumps(turns)})[1] == ["Four."] * 2
