"""Chats through a template, in pieces of which those that the assistant says are learned."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tawpipe.data.messages import ASSISTANT, KNOWN_ROLES, Malformed
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL_CALLS = (
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{ '\n<tool_call>\n' if message['content'] or not loop.first else '<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{%- endfor -%}"
)
_TOOLS = (
    "{{ 'You may call these functions:\n<tools>' }}"
    "{%- for tool in tools -%}{{ '\n' }}{{ tool | tojson }}{%- endfor -%}"
    "{{ '\n</tools>\nTo call one, answer with its name and arguments as JSON between <tool_call> and </tool_call>.' }}"
)

PLAIN = (
    "{%- if tools -%}{{ '<|tools|>\n' }}" + _TOOLS + "{{ '\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}" + _TOOL_CALLS + ""
    "{{ eos_token if message['role'] == 'assistant' and eos_token else '' }}{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
"""Chat template for any tokenizer: ``<|role|>``, a line break, the content, the end-of-text token after the
assistant's, a line break. The headers are plain text, so that any vocabulary can spell them."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + '\n\n' }}{%- endif -%}"
    + _TOOLS
    + "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}{%- if not (tools and loop.first and message['role'] == 'system') -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}" + _TOOL_CALLS + "{{ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""The template that many models use, with tools as Hermes and Qwen have them."""

NAMED = {"chatml": CHATML, "plain": PLAIN}

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""A mark around what the assistant says, which some templates have."""

MARK = "\ue000"
"""A content that no message has."""

ALIKE = 8
"""Letters by which the place is known at which a model is asked."""


class ChatText(NamedTuple):
    """Some text; its tokens count in the loss, or all of them do not."""

    text: str
    counts: bool


def template_text(name: str) -> str:
    """The template that ``--chat-template`` names.

    Raises:
        UserError: it is none of ours, and no file that holds one.
    """
    if name in NAMED:
        return NAMED[name]
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "--chat-template", name, f"{', '.join(NAMED)}, or a file with a Jinja template ({reason})"
        ) from error


def fallback_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of the template for a tokenizer that has none."""
    return "chatml" if set(CHATML_TOKENS) <= tokenizer.get_vocab().keys() else "plain"


def with_template(tokenizer: PreTrainedTokenizerBase, name: str, setting: str = "") -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that has the template, and under chatml ends a text with what ends a turn.

    Raises:
        UserError: the template of ``setting`` cannot render a chat.
    """
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template_text(name)
    if name == "chatml" and CHATML_TOKENS[1] in tokenizer.get_vocab():
        changed.eos_token = CHATML_TOKENS[1]
    try:
        chat = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        ChatRenderer(changed).pieces(chat)
    except Malformed as error:
        raise UserError(setting, name, f"a Jinja template of a chat ({error.why}: {error.detail})") from error
    return changed


class ChatRenderer:
    """Maker of pieces from messages.

    Args:
        tokenizer: the one whose chat template they go through; its fallback where it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._fallback = None if tokenizer.chat_template else NAMED[fallback_template(tokenizer)]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token; those that end a turn may have no name in the configuration, but in tokenizer.json."""
        added = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        special = sorted({*self._tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or "(?!)")

    def pieces(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, first: int = 0
    ) -> tuple[ChatText, ...]:
        """The chat as a whole, where what the assistant says from message ``first`` on counts, but for weights of 0.

        Raises:
            Malformed: the template refuses it or leaves something out.
        """
        template = self._fallback or self._tokenizer.get_chat_template(None, tools)  # pyright: ignore[reportArgumentType]
        self._check(template, messages, tools)
        said = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        learned = [number for number in said if number >= first and messages[number].get("weight", 1) != 0]
        if GENERATION.search(template):
            whole, turns = self._marked(template, messages, tools)
            if learned != said and len(turns) != len(said):
                raise Malformed("of whose answers not all are learned, and the chat template does not mark each")
            turns = turns if learned == said else [turns[said.index(number)] for number in learned]
        else:
            whole = self._apply(messages, tools)
            turns = self._found(whole, messages, tools, learned)
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in whole:
                raise Malformed("with a turn that the chat template leaves out", f"of the role {message['role']}")
        pieces, done = list[ChatText](), 0
        for begin, end in turns:
            pieces += [ChatText(whole[done:begin], False), ChatText(whole[begin:end], True)]
            done = end
        return tuple(piece for piece in [*pieces, ChatText(whole[done:], False)] if piece.text)

    def question(self, text: str) -> str:
        """What a user says, as a model sees it that shall answer.

        Raises:
            Malformed: the template refuses it.
        """
        return self._apply([{"role": "user", "content": text}], None, add_generation_prompt=True)

    def _check(self, template: str, messages: Sequence[dict[str, Any]], tools: object) -> None:
        for message in messages:
            role = message["role"]
            if role not in KNOWN_ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
                roles = "human, gpt, observation, function_call"
                raise Malformed(f"with a role that is neither {', '.join(KNOWN_ROLES)} nor {roles}", repr(role))
        if tools and "tools" not in template:
            raise Malformed("with tools, which the chat template does not show (--chat-template chatml does)")
        if "tool_calls" not in template and any("tool_calls" in message for message in messages):
            raise Malformed("with tool calls, which the chat template does not show (--chat-template chatml does)")

    def _marked(
        self, template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat, and begin and end of what the template itself says is the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: dict[str, Any] = {**self._tokenizer.special_tokens_map, "conversations": [messages], "tools": tools}
        arguments |= {"chat_template": template, "return_assistant_tokens_mask": True}
        (whole,), (turns,) = _refusals_named(lambda: render_jinja_template(**arguments))
        return whole, turns

    def _found(
        self, whole: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, learned: list[int]
    ) -> list[tuple[int, int]]:
        """Begin and end of what the assistant says in these messages, each between two beginnings of the chat."""
        turns, done = list[tuple[int, int]](), 0
        for number in learned:
            turns.append(self._turn(whole, messages, tools, number, done))
            done = turns[-1][1]
        return turns

    def _turn(
        self, whole: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, number: int, done: int
    ) -> tuple[int, int]:
        """Begin and end in ``whole`` of the assistant's message ``number``, its end-of-turn token included."""
        asked = self._beginning(messages[:number], tools, add_generation_prompt=True)
        said = self._beginning(messages[: number + 1], tools, add_generation_prompt=False)
        is_prefix = bool(asked) and whole.startswith(asked)
        if is_prefix and said and whole.startswith(said) and done <= len(asked) < len(said):
            return len(asked), len(said)
        # Some templates write earlier turns otherwise than the last one (they drop what the model thought), so that
        # the beginning of a chat is no prefix of it. The turn is then what differs if it says something else.
        other = self._apply([*messages[:number], {"role": ASSISTANT, "content": MARK}, *messages[number + 1 :]], tools)
        begin = _alike(whole, other)
        end = len(whole) - _alike(whole[begin:][::-1], other[begin:][::-1])
        if is_prefix:
            begin = len(asked)
        elif asked and whole[:begin].rstrip().endswith(asked.rstrip()[-ALIKE:]):
            # A space that only the template's answers have in front of them is the model's to write.
            begin -= max(0, _space_behind(whole[:begin]) - _space_behind(asked))
        for token in self._special.finditer(whole, done):
            if token.start() < begin < token.end():
                begin = token.start()
            if begin <= token.start() <= end < token.end():  # what ends the turn
                end = token.end()
                break
        if other == whole or not done <= begin < end:
            raise Malformed("in which the chat template does not show what the assistant says")
        return begin, end

    def _beginning(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The messages alone; empty where there are none or the template refuses them."""
        try:
            return self._apply(messages, tools, add_generation_prompt=add_generation_prompt) if messages else ""
        except Malformed:
            return ""

    def _apply(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool = False
    ) -> str:
        return _refusals_named(
            lambda: self._tokenizer.apply_chat_template(
                messages,
                tools=tools,  # pyright: ignore[reportArgumentType]
                chat_template=self._fallback,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )


def _alike(text: str, other: str) -> int:
    """Letters in which both begin alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(text), len(other)))


def _space_behind(text: str) -> int:
    """Letters of white space at the end."""
    return len(text) - len(text.rstrip())


def _refusals_named(render: Callable[[], Any]) -> Any:
    from jinja2.exceptions import TemplateError

    try:
        return render()
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise Malformed("which the chat template refuses", str(error)) from error
