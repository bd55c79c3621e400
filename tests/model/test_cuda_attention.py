"""Chunks and sets compute on CUDA what they compute on the CPU: a stand-in reads memory as CUDA's kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from borders import LENGTH, llama, packed, piped, right_or_refused, rows_of
from model_families import family_config, keep_fp64, real_model
from tawpipe.model import chunked
from tawpipe.model.chunked import Chunk, KeyStore, Options, attend
from tawpipe.model.kernels import Documents, SlicedScores

DOCUMENTS = [[5, 9, 2], [16], [1, 8, 7]]
FLASH = ["qwen3", "gemma3", "mistral", "gpt_oss", "deepseek_v3"]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And by one thread, as the tensors are small."""
    keep_fp64(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("size", "past"), [(6, 2), (6, 4096), (24, 2)])
def test_a_chunk_of_several_documents(size, past, cuda_kernels, monkeypatch):
    """What the backward kernel is given of a chunk is some of its queries, and lies apart in memory."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    batch, documents = packed([0], DOCUMENTS)
    assert right_or_refused(llama(), batch, documents=documents, sequence_chunk=size) == "right"
    assert {what for what, *_ in cuda_kernels.called} == {"forward", "backward"}


@pytest.mark.parametrize("past", [2, 4096])
@pytest.mark.parametrize("family", FLASH)
def test_windows_and_sinks_go_through_the_kernel(family, past, cuda_kernels, monkeypatch):
    """Windows of any size, however little of them is in one tile; fewer heads of keys, and narrower values, too."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    monkeypatch.setattr(chunked, "explicit_scores", None)
    batch, documents = packed([0], DOCUMENTS)
    make = lambda: real_model(family_config(family))  # noqa: E731
    knobs = {"sequence_chunk": 5, "recompute": "selective" if past == 2 else "full"}
    assert right_or_refused(make, batch, documents=documents, **knobs) == "right"


def test_soft_caps_do_not(cuda_kernels):
    """Its interface in torch has none; the layers' other attention does."""
    batch, documents = packed([0], DOCUMENTS)
    make = lambda: real_model(family_config("gemma2"))  # noqa: E731
    assert right_or_refused(make, batch, documents=documents, sequence_chunk=5) == "right"
    assert not cuda_kernels.called


def test_pieces_of_rows_in_sets(pool):
    """Each rank has two pieces of a row, so that what it keeps of one always lies apart."""
    rows = ((5, 9, 3), (17,), (1, 2, 14))
    knobs: dict[str, Any] = {"sequence_ranks": 2, "sequence_chunk": 3, "strategy": "tawpipe-spread"}
    found = pool.run("cuda_kernels:families", 1, 2, names=["qwen3", "gpt_oss"], tied=False, rows=rows, **knobs)[0]
    assert found["qwen3"] < 1e-10 and found["gpt_oss"] < 1e-6, found


@pytest.mark.parametrize("past", [2, 4096])
def test_the_past_is_one_part_of_a_forward_pass(past, cuda_kernels, monkeypatch):
    """Tiles are there for the gradients of keys, of which a forward pass has none: one call for every chunk."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    pipeline = piped(llama(), sequence_chunk=4)
    cuda_kernels.called.clear()
    _ = pipeline.evaluate(rows_of(rows=1)).loss
    pipeline.close()
    of_a_layer = [("forward", 4, keys) for keys in range(4, LENGTH + 1, 4)]
    calls = [call[:3] for call in cuda_kernels.called]
    assert calls == of_a_layer * (len(calls) // len(of_a_layer)) and calls


def test_a_generator_is_made_only_to_draw_from(monkeypatch):
    """On CUDA it takes longer than a small layer's kernels."""
    monkeypatch.setattr(torch, "Generator", None)
    query, documents = torch.randn(1, 2, 4, 8, requires_grad=True), Documents.of((4,), (1, 4), torch.device("cpu"))
    for softcap in (None, 30.0):
        chunk = Chunk(KeyStore(1, 4), 0, 4)
        attend(query, query, query, None, chunk, documents, Options(None, 1.0, 0.0, softcap)).sum().backward()
    output: Any = SlicedScores.apply(query, query, query, None, documents, None, 1.0, 0.0, 30.0)
    output.sum().backward()
