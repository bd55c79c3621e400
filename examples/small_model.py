"""A small chat model to try fine-tuning with, in a few seconds and without a network:

    python examples/small_model.py small-model
    tawpipe train --model small-model --data examples/chats.jsonl ...

It has learned how a question about a capital is answered, but knows no capital. ``examples/chats.jsonl`` has some
invented ones; docs/fine-tuning.md teaches them.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.data.chats.templates import PLAIN
from tawpipe.data.tokenizer import train_tokenizer

QUESTIONS = ("What is the capital of {}?", "Which town is the capital of {}?", "Name the capital of {}.")


def main(folder: str, *, steps: int = 60) -> None:
    """Write model and tokenizer to a folder, the model in bf16."""
    draw = random.Random(0)
    chats = [_chat(draw) for _ in range(600)]
    tokenizer: Any = train_tokenizer(chats, 300)
    tokenizer.chat_template = PLAIN
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster for so small a model
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        **special,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [torch.tensor(tokenizer(f"{chat}<|endoftext|>", add_special_tokens=False).input_ids) for chat in chats]
    for _ in range(steps):
        batch = torch.nn.utils.rnn.pad_sequence(draw.sample(rows, 16), batch_first=True, padding_value=-100)
        model(input_ids=batch.clamp(min=0), labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _chat(draw: random.Random) -> str:
    return f"<|user|>\n{draw.choice(QUESTIONS).format(_name(draw))}\n<|assistant|>\n{_name(draw)}"


def _name(draw: random.Random) -> str:
    """An invented name of two or three syllables."""
    syllables = range(draw.randint(2, 3))
    return "".join(draw.choice("bcdfgklmnrstv") + draw.choice("aeiou") for _ in syllables).title()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "small-model")
    print(f"{sys.argv[1] if len(sys.argv) > 1 else 'small-model'}: 0.1 M parameters, which know no capital yet")
