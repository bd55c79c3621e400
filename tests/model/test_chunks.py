"""A layer that runs a row chunk by chunk gives the numbers of the plain model on whole documents."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from borders import LENGTH, llama, packed, piped, piped_numbers, right_or_refused, rows_of, slope_error
from cuda_kernels import read_by_address
from model_families import family_config, keep_fp64, real_model
from selected import quick_ones
from tawpipe.errors import RunError, UserError
from tawpipe.model import flash, kernels
from tawpipe.model.attention import chunked

FAMILIES = ["qwen3", "gemma2", "gemma3", "mistral", "granite", "cohere", "gpt_oss", "qwen3_moe", "deepseek_v3", "gpt2"]
DOCUMENTS = [[5, 9, 2], [16], [1, 8, 7]]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    """And what the kernel of a backward pass is given lies in memory as CUDA's expects it."""
    keep_fp64(monkeypatch)
    read_by_address(monkeypatch)


@pytest.mark.parametrize(
    ("size", "past"),
    [
        *((4, 2), (LENGTH, 2), (3, 4096)),
        *(pytest.param(size, past, marks=pytest.mark.slow) for size, past in ((1, 2), (LENGTH - 1, 4096))),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(2 * LENGTH, 4096, marks=pytest.mark.slow),
    ],
)
def test_sequence_chunks_of_any_size_match_plain_training(size, past, monkeypatch):
    """That divides the row or not; the past is looked at at once or in parts."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    assert right_or_refused(llama(), rows_of(), sequence_chunk=size) == "right"


@pytest.mark.parametrize("size", [3, 6])
def test_sequence_chunks_may_cut_packed_documents_anywhere(size):
    """Document borders in the middle of a chunk, at its ends, and several in one; 6 is one more than a document."""
    batch, documents = packed([0], DOCUMENTS)
    assert right_or_refused(llama(), batch, documents=documents, sequence_chunk=size) == "right"


@pytest.mark.parametrize("family", quick_ones(FAMILIES, FAMILIES[::4]))
def test_sequence_chunks_match_plain_training_for_every_kind_of_attention(family):
    """Windows, soft caps, sinks, biases, few heads of keys, experts, values of another width, learned positions."""
    batch, documents = packed([0], DOCUMENTS)
    config = family_config(family)
    if family == "qwen3_moe":
        config.output_router_logits = False
    knobs = {"sequence_chunk": 5, "recompute": "selective"}
    assert right_or_refused(lambda: real_model(config), batch, documents=documents, **knobs) == "right"


@pytest.mark.parametrize(
    ("family", "past"),
    [("mistral", 2), ("gemma3", 4096), ("deepseek_v3", 2), pytest.param("gemma3", 2, marks=pytest.mark.slow)],
)
def test_sequence_chunks_by_the_flash_kernel_match_plain_training(family, past, monkeypatch):
    """In tiles of the past, some queries and some heads at a time."""
    monkeypatch.setattr(kernels, "FLASH_WINDOW", 2)
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    monkeypatch.setattr(flash, "PADDED", past)
    monkeypatch.setattr(chunked, "explicit_scores", None)
    batch, documents = packed([0], DOCUMENTS)
    make = lambda: real_model(family_config(family))  # noqa: E731
    assert right_or_refused(make, batch, documents=documents, sequence_chunk=7) == "right"


@pytest.mark.parametrize(
    "knobs",
    [
        {"offloaded_layers": 2},
        {"offloaded_layers": 1, "recompute": "selective:1,full", "micro_batch": 3},
        {"offloaded_layers": 2, "recompute": "selective", "sequence_chunk": 2 * LENGTH},
        {"micro_batch": 2},
        {"micro_batches_per_visit": 3, "reuse": False},
    ],
    ids=lambda knobs: " ".join(map(str, knobs)),
)
@pytest.mark.parametrize("files", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sequence_chunks_with_offloading_match_plain_training(knobs, files, tmp_path):
    """In files where something is offloaded, and in memory."""
    knobs = {"sequence_chunk": 5, "offload_dir": str(tmp_path) if files else ""} | knobs
    assert right_or_refused(llama(), rows_of(), **knobs) == "right"
    assert not list(tmp_path.iterdir()), "files without names leave nothing behind"


DROPS: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.3},
}


def dropping(family: str) -> Any:
    return real_model(family_config(family, **DROPS[family]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recompute"), [("llama", "selective"), ("llama", "full"), ("gpt2", "selective")])
def test_sequence_chunk_dropout_repeats_in_the_recomputation(family, recompute):
    """In attention and behind it: the gradient is the slope of the loss that the forward pass has drawn."""
    assert slope_error(lambda: dropping(family), rows_of(), sequence_chunk=5, recompute=recompute) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", DROPS)
def test_sequence_chunk_size_changes_the_dropout_draw(family):
    losses = [piped_numbers(lambda: dropping(family), rows_of(), sequence_chunk=size).loss for size in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_in_sequence_chunks_has_an_equal_loss():
    losses = []
    for size in (0, 5):
        pipeline = piped(llama(), sequence_chunk=size)
        losses.append(pipeline.evaluate(rows_of()).loss)
        pipeline.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def _twice(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    first = LlamaDecoderLayer.forward(layer, hidden, **call)
    return LlamaDecoderLayer.forward(layer, first, **call)


def _none(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return hidden + layer.mlp(hidden)


@pytest.mark.parametrize(("layer", "reason"), [(_twice, "attention twice"), (_none, "calls no attention")])
def test_layers_that_cannot_run_in_sequence_chunks_are_refused(layer, reason):
    with pytest.raises(UserError, match=reason):
        piped_numbers(llama(layer), rows_of(), sequence_chunk=5, check="never")


def _looks_back(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    """Right on whole rows: the token before in the same document, which attention's keys know nothing of."""
    first = (call["position_ids"] == 0).unsqueeze(-1)
    return LlamaDecoderLayer.forward(layer, hidden + hidden.roll(1, dims=1).masked_fill(first, 0.0), **call)


def test_layers_that_mix_tokens_outside_attention_fail_the_chunk_check():
    """By the check of the model, before a step: no number would be of the wrong shape, or not finite."""
    batch, documents = packed([0], DOCUMENTS)
    assert right_or_refused(llama(_looks_back), batch, documents=documents) == "right"
    with pytest.raises(UserError, match=r"hidden states|differ"):
        piped(llama(_looks_back), sequence_chunk=5)


def test_settings_incompatible_with_sequence_chunks_are_refused():
    with pytest.raises(UserError, match="compile_layers"):
        piped(llama(), sequence_chunk=5, compile_layers=True)
    with pytest.raises(UserError, match=r"recompute.*full or selective"):
        piped(llama(), sequence_chunk=5, recompute="none:1,full")
    with pytest.raises(UserError, match=r"offload_dir.*sequence_chunk"):
        piped(llama(), offload_dir="/tmp")


def test_unwritable_or_full_offload_folder_is_refused(tmp_path, monkeypatch):
    """Before the first step, and so is a disk without room, with what was missing; and the step before is not lost."""
    with pytest.raises(UserError, match=r"offload_dir: got '.*missing'; a folder that every process can write to"):
        piped(llama(), sequence_chunk=5, offloaded_layers=2, offload_dir=str(tmp_path / "missing"))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pipeline = piped(llama(), sequence_chunk=5, offloaded_layers=2, offload_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"offload_dir: got .*room for [\d,]+ bytes more.*No space"):
        pipeline.step(rows_of())


def test_disk_error_while_offloading_ends_the_run_by_name(tmp_path, monkeypatch):
    """What was written behind is waited for: an error there is no hang and no wrong number."""

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for move in ("pwritev", "preadv"):
        with monkeypatch.context() as failing:
            failing.setattr(os, move, broken)
            pipeline = piped(llama(), sequence_chunk=5, offloaded_layers=2, offload_dir=str(tmp_path))
            with pytest.raises(RunError, match=r"where rows wait in files, cannot be used: .*Input/output error"):
                _ = pipeline.step(rows_of()).loss
