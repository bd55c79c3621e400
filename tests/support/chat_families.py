"""Templates and tokenizers in the way of the families that people train, without a download."""

import copy
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tawpipe.data.tokenizer import train_tokenizer

TURNS = "{%- for m in messages %}{%- set content = m.content | trim %}"
LAST_USER = "{%- set ns = namespace(asked=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}\
{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}"
WITHOUT_THOUGHT = "{%- set said = content.split('</think>')[-1] | trim %}"

QWEN3 = (
    LAST_USER
    + TURNS
    + WITHOUT_THOUGHT
    + "{{- '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' and loop.index0 > ns.asked %}{{- '<think>\n' }}\
{%- if '</think>' in content %}{{- content.split('</think>')[0].split('<think>')[-1] | trim }}{%- endif %}\
{{- '\n</think>\n\n' + said }}{%- elif m.role == 'assistant' %}{{- said }}{%- else %}{{- content }}{%- endif %}\
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Thoughts in the last turn alone, even an empty one."""

R1 = (
    "{{- bos_token }}"
    + TURNS
    + WITHOUT_THOUGHT
    + "{%- if m.role == 'system' %}{{- content }}\
{%- elif m.role == 'user' %}{{- '<｜User｜>' + content }}\
{%- else %}{{- '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"
)
"""No thoughts at all, but the model is asked to begin with one."""

GPT_OSS = (
    "{{- '<|start|>system<|message|>Reasoning: low<|end|>' }}"
    + TURNS
    + "{%- if m.role == 'assistant' %}\
{%- if m.thinking and loop.last %}\
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}\
{{- '<|start|>assistant<|channel|>final<|message|>' + content + ('<|return|>' if loop.last else '<|end|>') }}\
{%- else %}{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + content + '<|end|>' }}\
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""The last turn ends otherwise than earlier ones."""

LLAMA3 = (
    "{{- bos_token }}"
    + TURNS
    + "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + content }}\
{{- '<|eot_id|>' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

GEMMA3 = (
    "{{- bos_token }}{%- set first = '' %}{%- if messages[0].role == 'system' %}\
{%- set first = messages[0].content + '\n\n' %}{%- set messages = messages[1:] %}{%- endif %}"
    + TURNS
    + "\
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + (first if loop.first else '') }}\
{{- content + '<end_of_turn>\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
"""The system's turn in the first user's."""

MISTRAL = (
    "{{- bos_token }}{%- set system = '' %}{%- if messages[0].role == 'system' %}\
{%- set system = messages[0].content + '\n\n' %}{%- endif %}"
    + LAST_USER
    + TURNS
    + "\
{%- if m.role == 'user' %}{{- '[INST] ' + (system if loop.index0 == ns.asked else '') + content + '[/INST]' }}\
{%- elif m.role == 'assistant' %}{{- ' ' + content + eos_token }}{%- endif %}{%- endfor %}"
)
"""The system's turn in the last user's; nothing that asks for an answer but the end of a question."""


def byte_level(template: str, special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with special tokens of which only ``named`` ones have a name in its configuration."""
    trained = copy.deepcopy(TRAINED)
    trained.backend_tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, **named)
    tokenizer.chat_template = template
    return tokenizer


def sentence_piece(template: str, special: list[str], *, before: bool, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them, with tokens for two and four line breaks.

    Args:
        before: it puts a space before a text.
    """
    letters = [chr(one) for one in range(33, 127)]
    spaced = [f"▁{one}" for one in letters]
    breaks = ["\n", "\n\n", "\n\n\n\n"]
    pieces = ["<unk>", *(f"<0x{one:02X}>" for one in range(256)), "▁", *letters, *spaced, *breaks]
    merges = [("▁", one) for one in letters] + [("\n", "\n"), ("\n\n", "\n\n")]
    backend = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if before:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # pyright: ignore
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)  # pyright: ignore
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template
    return tokenizer


TRAINED = train_tokenizer(["the answer to every question is a number of the house " * 20], 300)
FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen3": (
        byte_level(QWEN3, ["<|im_start|>", "<|im_end|>"], eos_token="<|endoftext|>"),
        "<|im_end|>",
    ),
    "r1": (
        byte_level(
            R1,
            ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
            bos_token="<｜begin▁of▁sentence｜>",
            eos_token="<｜end▁of▁sentence｜>",
        ),
        "<｜end▁of▁sentence｜>",
    ),
    "gpt-oss": (
        byte_level(
            GPT_OSS, ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"], eos_token="<|return|>"
        ),
        "<|return|>",
    ),
    "llama3": (
        byte_level(
            LLAMA3,
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            bos_token="<|begin_of_text|>",
            eos_token="<|endoftext|>",
        ),
        "<|eot_id|>",
    ),
    "gemma3": (
        sentence_piece(
            GEMMA3,
            ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
            before=False,
            bos_token="<bos>",
            eos_token="<eos>",
        ),
        "<end_of_turn>",
    ),
    "mistral": (
        sentence_piece(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], before=True, bos_token="<s>", eos_token="</s>"),
        "</s>",
    ),
}
"""Tokenizer, and the token that ends an answer."""
