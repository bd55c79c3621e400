"""A small corpus and a small model, for runs of seconds."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

WORDS = ["def", "return", "import", "self", "None", "True", "class", "for", "in", "if", "else", "while", "with", "as"]


def make_small(folder: Path, *, files: int, layers: int, positions: int) -> None:
    """Text files in ``folder/corpus`` and the config of a Llama without weights in ``folder/model``.

    Args:
        positions: the longest row.
    """
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(files):
        lines = [" ".join(WORDS[(i * 7 + j * j + k) % len(WORDS)] for k in range(9)) for j in range(5 + i % 11)]
        (corpus / f"{i}.txt").write_text("\n".join(lines))
    LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    ).save_pretrained(folder / "model")
