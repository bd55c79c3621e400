"""A run on published bits: adapters on the experts of a mixture in MXFP4, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from forked_commands import run_tawpipe
from published_folders import mxfp4, publish
from runs import TIMEOUT_S, environment, rows
from tawpipe.data.tokenizer import train_tokenizer

pytest.importorskip("peft")
TEXTS = [f"Text number {number} about the weather of a day on which nothing happened." for number in range(60)]


@pytest.mark.slow
def test_adapters_on_published_experts_train_within_the_predicted_memory(tmp_path: Path):
    """A gpt-oss of 16 experts on two processes."""
    tokenizer = train_tokenizer(TEXTS, 300)
    config = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    publish(GptOssForCausalLM(config), tmp_path / "gpt", {"quant_method": "mxfp4"}, r"experts\.\w+_proj$", mxfp4)
    tokenizer.save_pretrained(tmp_path / "gpt")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = ("--sequence-length", "256", "--global-batch", "4", "--steps", "2", "--log.every", "1", "--plan", "none")
    settings += ("--sample.tokens", "0", "--validation-fraction", "0", "--log.trackers", "none", "--device", "cpu")
    settings += ("--lora.rank", "8", "--lora.targets", "all-linear", "experts", "--cache-dir", str(tmp_path / "cache"))
    words = ("train", "--model", str(tmp_path / "gpt"), "--data", str(tmp_path / "rows.jsonl"), *settings)
    words += ("--output", str(tmp_path / "out"), "--nproc", "2", "--nodes", "1")
    done = run_tawpipe([*words], environment(), TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "weights: MXFP4, stored and sent as published; frozen base" in done.stdout
    last = rows(tmp_path, "out")[-1]
    assert 0.85 < last["peak_memory_bytes"] / last["predicted_memory_bytes"] < 1.05
