"""Chats through templates and tokenizers in the way of the families that people train: all that an assistant says is
learned, the token that ends each turn included, and no other.
"""

import numpy as np
import pytest

from chat_families import FAMILIES, byte_level
from chats import documents_of, encoded, learned
from tawpipe.data.chats.columns import RawRow
from tawpipe.data.chats.render import Renderer
from tawpipe.data.encode import Encoder


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("system", [False, True])
def test_every_answer_is_learned_behind_its_prompt_tokens(name, system):
    """R1's prompts begin a thought, so its answers have one here; gpt-oss has them in a field."""
    tokenizer, end = FAMILIES[name]
    chat = [{"role": "system", "content": "Be brief."}] if system else []
    expected = {}
    for number, word in enumerate(("One.", "Two.", "Four.")):
        chat.append({"role": "user", "content": f"Which, {number}?"})
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        thought = {"r1": f"<think>\nSum {number}.\n</think>\n\n"}.get(name, "")
        said = {"role": "assistant", "content": thought + word}
        expected[tuple(prompt)] = word + end
        chat.append(said | ({"reasoning_content": "Sum."} if name == "gpt-oss" else {}))
    (row,) = [RawRow("here", "chat", {"messages": chat})]
    for tokens in encoded(Encoder(tokenizer), documents_of(Renderer(tokenizer), row)):
        for begin in np.flatnonzero(tokens.counts & ~np.append(False, tokens.counts[:-1])):
            text = expected.pop(tuple(tokens.ids[:begin].tolist()))
            answer = tokens.ids[begin:][: np.argmin(np.append(tokens.counts[begin:], False))]
            assert tokenizer.decode(answer.tolist()).endswith(text)
    assert not expected


def test_tool_call_may_end_with_another_token_than_an_answer():
    """The ends of the two begin and end with the same letters, of which none is a token."""
    tokenizer = byte_level(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ '!' if m.role == 'assistant' and loop.last }}"
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|call|>{% else %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}",
        ["<|start|>", "<|message|>", "<|call|>", "<|end|>"],
    )
    call = {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {}}]}
    chat = [{"role": "user", "content": "When?"}, call, {"role": "tool", "content": "9"}]
    chat.append({"role": "assistant", "content": "Nine."})
    whole, parts = learned(tokenizer, {"messages": chat})
    assert parts == ["!now<|call|>", "!Nine.<|end|>"]
    assert tokenizer.convert_tokens_to_ids("<|call|>") in tokenizer(whole)["input_ids"]
