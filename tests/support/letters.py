"""A tokenizer whose tokens are bytes, so that what becomes of a text can be read off its ids."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def letters(
    *special: str, template: str | None = None, begin: str = "", places: bool = True
) -> PreTrainedTokenizerFast:
    """The tokenizer; texts end with ``END``.

    Args:
        special: further special tokens.
        begin: the begin-of-text token; "" for none.
        places: the tokenizer puts it before a text.
    """
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([END, *special, *([begin] if begin else [])])
    if begin and places:
        number = core.token_to_id(begin)
        core.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, bos_token=begin or None)
    made.chat_template = template
    return made
