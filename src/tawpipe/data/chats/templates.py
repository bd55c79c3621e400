"""Chat templates that are built in, for tokenizers that have none."""

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
"""Chat template for any tokenizer: ``<|role|>``, a line break, the content, the end-of-text token after the
assistant's, a line break. The headers are plain text, so that any vocabulary can spell them."""

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
"""The template that many models use, with tools as Hermes and Qwen have them."""

NAMED = {"chatml": CHATML, "plain": PLAIN}
HASHED = {name: text.replace("\n' }}" + _CONTENT, "\n' + message['content'] }}") for name, text in NAMED.items()}
"""The templates as hashes of tokenizers have them: as they were at first, or a run on text would not know its data."""

PRINTS_DATE = "strftime_now"
"""The function by which a template prints a date."""


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
