"""Chats through templates and tokenizers in the way of the families that people train: all that an assistant says is
learned, the token that ends each turn included, and no other.
"""

import json

import pytest

from chat_families import FAMILIES, byte_level
from chats import learned


def answers(parts: list[str], end: str) -> list[str]:
    """What is learned of each turn, without line breaks that a template may or may not have behind its end."""
    return [part.rstrip("\n") if end.endswith("\n") else part for part in parts]


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("system", [False, True])
def test_every_turn_is_learned_with_the_token_that_ends_it(name, system):
    tokenizer, end, thought, plain = FAMILIES[name]
    chat = [{"role": "system", "content": "Be brief."}] if system else []
    for word in ("One.", "Two."):
        chat += [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": word}]
    thoughts = {"gpt-oss": {"content": "Four.", "thinking": "Sum."}}
    thoughts |= {key: {"content": "<think>\nSum.\n</think>\n\nFour."} for key in ("qwen3", "r1")}
    said = thoughts.get(name, {"content": "Four."})
    for last, expected in ((said, thought), ({"content": "Five."}, plain)):
        whole, parts = learned(
            tokenizer, {"messages": [*chat, {"role": "user", "content": "And?"}, {"role": "assistant", **last}]}
        )
        before = {"gpt-oss": "<|channel|>final<|message|>", "mistral": " "}.get(name, "")
        assert answers(parts, end) == answers([*(before + word + end for word in ("One.", "Two.")), expected], end)
        assert whole.count("Be brief.") == system


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_answer_stands_behind_what_the_model_is_asked_with(name):
    """The tokens before the last answer are those of the same chat as a question, but for a thought that is asked
    for."""
    tokenizer, *_ = FAMILIES[name]
    asked = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "One."}]
    asked.append({"role": "user", "content": "And?"})
    question = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole, parts = learned(tokenizer, {"messages": json.dumps([*asked, {"role": "assistant", "content": "Five."}])})
    assert whole.removesuffix(parts[-1]) == question.removesuffix("<think>\n" if name == "r1" else "")


def test_a_call_may_end_otherwise_than_an_answer():
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
    assert parts == ["now<|call|>", "!Nine.<|end|>"]
    assert tokenizer.convert_tokens_to_ids("<|call|>") in tokenizer(whole)["input_ids"]
