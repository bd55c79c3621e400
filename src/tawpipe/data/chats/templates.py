"""Built-in chat templates for tokenizers that have none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT = (
    "{{ ('<think>\n' + message['reasoning_content'] + '\n</think>\n\n') if message['reasoning_content'] else '' }}"
    "{{ message['content'] or '' }}"
)
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
    "{{ '<|' + message['role'] + '|>\n' }}" + _CONTENT + _TOOL_CALLS + ""
    "{{ eos_token if message['role'] == 'assistant' and eos_token else '' }}{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
"""Chat template for any tokenizer: ``<|role|>``, a line break, the content, the end-of-text token after the assistant's
content, a line break. Headers are plain text, so that every vocabulary can encode them."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + '\n\n' }}{%- endif -%}"
    + _TOOLS
    + "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}{%- if not (tools and loop.first and message['role'] == 'system') -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}" + _CONTENT + _TOOL_CALLS + "{{ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Template that many models use, with tools as in Hermes and Qwen."""

NAMED = {"chatml": CHATML, "plain": PLAIN}
HASHED = {name: text.replace("\n' }}" + _CONTENT, "\n' + message['content'] }}") for name, text in NAMED.items()}
"""First versions of the templates, which hashes of tokenizers use so that older runs on text still recognise their
data."""

PRINTS_DATE = "strftime_now"
"""Name of the function with which a template prints a date."""


def template_text(name: str) -> str:
    """Return the chat template that ``--chat-template`` names: a built-in one or the content of a file.

    Raises:
        UserError: it is neither a built-in name nor a readable file.
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
    """Return the name of the built-in template for ``tokenizer``: chatml if it has its tokens, else plain."""
    return "chatml" if set(CHATML_TOKENS) <= tokenizer.get_vocab().keys() else "plain"
