"""Chunks and sets compute on CUDA what they compute on the CPU: a stand-in reads memory as CUDA's kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from borders import LENGTH, llama, packed, piped, right_or_refused, rows_of
from model_families import family_config, keep_fp64, real_model
from tawpipe.model import flash
from tawpipe.model.attention import chunked
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.attention.attention_kernel import Offer
from tawpipe.model.attention.chunked import Chunk, ChunkQueries, KeyStore, _parts, attend
from tawpipe.model.kernels import AttentionOptions, Documents, TiledScores
from tawpipe.runtime.compute.attention_results import AttentionResults

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


@pytest.mark.parametrize(
    ("size", "past"), [(6, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((6, 4096), (24, 2)))]
)
def test_cuda_kernel_matches_plain_training_for_chunks_of_documents(size, past, cuda_kernels, monkeypatch):
    """What the backward kernel is given of a chunk is some of its queries, and lies apart in memory."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    batch, documents = packed([0], DOCUMENTS)
    assert right_or_refused(llama(), batch, documents=documents, sequence_chunk=size) == "right"
    assert {what for what, *_ in cuda_kernels.called} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("family", "past"),
    [
        *((family, (2, 4096)[number % 2]) for number, family in enumerate(FLASH)),
        *(pytest.param(one, (4096, 2)[number % 2], marks=pytest.mark.slow) for number, one in enumerate(FLASH)),
    ],
)
def test_cuda_kernel_matches_plain_training_for_windows_and_sinks(family, past, cuda_kernels, monkeypatch):
    """Windows of any size, however little of them is in one tile; fewer heads of keys, and narrower values, too."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    monkeypatch.setattr(chunked, "explicit_scores", None)
    batch, documents = packed([0], DOCUMENTS)
    make = lambda: real_model(family_config(family))  # noqa: E731
    knobs = {"sequence_chunk": 5, "recompute": "selective" if past == 2 else "full"}
    assert right_or_refused(make, batch, documents=documents, **knobs) == "right"


@pytest.mark.parametrize("window", [None, 3])
def test_torch_operators_accept_the_arguments_of_flash_attention_parts(window, monkeypatch):
    """The stand-in takes what it is made for; on meta tensors torch's own do, with the names of their arguments."""
    monkeypatch.setattr(flash, "on_cuda", lambda tensor: True)
    query = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16, device="meta")
    keys, sinks = torch.empty(2, 2, 20, 8, dtype=torch.bfloat16, device="meta"), torch.empty(4, device="meta")
    piece = ChunkQueries(slice(0, 2), slice(0, 6), 0 if window is None else 6, 8, 14)
    parts = _parts(piece, window, 20, True)
    output, sums = flash.attention(query, keys, keys, parts, 0.3, sinks)
    assert (output.shape, output.dtype, sums.shape, sums.dtype) == (query.shape, query.dtype, (2, 4, 6), torch.float32)
    targets = keys.float(), keys.float()
    for past in (20, 3):
        parts = _parts(piece, window, past, True)
        found = flash.gradients(query, query, output, sums, (keys, keys), targets, parts, 0.3)
        assert found.shape == query.shape


def test_soft_caps_do_not_use_the_cuda_kernel(cuda_kernels):
    """Its interface in torch has none; the layers' other attention does."""
    batch, documents = packed([0], DOCUMENTS)
    make = lambda: real_model(family_config("gemma2"))  # noqa: E731
    assert right_or_refused(make, batch, documents=documents, sequence_chunk=5) == "right"
    assert not cuda_kernels.called


@pytest.mark.parametrize("window", [None, 4])
def test_cuda_kernel_matches_explicit_scores_for_sinks_of_whole_rows(window, cuda_kernels, monkeypatch):
    """A row is one chunk then: the numbers of explicit scores."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    documents = Documents.of((4, 5, 9), (2, 9), torch.device("cpu"))
    found = []
    for offer in (Offer(), Offer((9, 0))):
        monkeypatch.setattr(Offer, "of", lambda device, offer=offer: offer)
        output, _ = packed_attention(
            nn.Identity(), query, key, value, PackedMask(documents, window), scaling=0.3, s_aux=sinks
        )
        found.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value, sinks))))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)
    assert len(cuda_kernels.called) == 6, "three documents, forward and backward"


def test_autograd_keeps_keys_and_values_of_a_whole_row_once(cuda_kernels):
    """Counts of what layers keep depend on it."""
    leaf = torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True)
    documents, saved = Documents.of((4, 5), (1, 9), torch.device("cpu")), list[Tensor]()
    store, options = KeyStore(1, 9), AttentionOptions(None, 0.3, 0.0, None)
    with saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        attend(leaf, leaf.sin(), leaf.cos(), None, Chunk(store, 0, 9), documents, options)
    assert all(any(one.equal(kept) for kept in saved) for one in (leaf.sin(), leaf.cos()))
    assert store.keys is store.values is None


def test_attention_with_sinks_is_kept_for_the_recomputation(cuda_kernels, monkeypatch):
    """Its output and log-sum-exp."""
    monkeypatch.setattr(Offer, "of", lambda device: Offer((9, 0)))
    leaf = torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True)
    sinks = torch.linspace(-1, 2, 2, dtype=torch.float64).requires_grad_()
    mask = PackedMask(Documents.of((4, 5), (1, 9), torch.device("cpu")), None)

    def layer() -> Tensor:
        output, _ = packed_attention(nn.Identity(), leaf, leaf.sin(), leaf.cos(), mask, scaling=0.3, s_aux=sinks)
        return output * 2

    results, found = AttentionResults(), []
    first = results.keep(layer)
    assert results.bytes == 9 * 2 * (8 + 1) * 8
    for run in (layer, lambda: results.reuse(layer)):
        cuda_kernels.called.clear()
        output = run()
        assert torch.equal(output, first)
        assert len(cuda_kernels.called) == (2 if run is layer else 0), "one call for each document"
        found.append(torch.autograd.grad(output.square().sum(), (leaf, sinks)))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.slow
def test_cuda_kernel_matches_plain_training_for_context_parallel_rows(pool):
    """Each rank has two pieces of a row, so that what it keeps of one always lies apart."""
    rows = ((5, 9, 3), (17,), (1, 2, 14))
    knobs: dict[str, Any] = {"sequence_ranks": 2, "sequence_chunk": 3, "strategy": "tawpipe-spread"}
    found = pool.run("cuda_kernels:families", 1, 2, names=["qwen3", "gpt_oss"], tied=False, rows=rows, **knobs)[0]
    assert found["qwen3"] < 1e-10 and found["gpt_oss"] < 1e-6, found


@pytest.mark.parametrize("past", [2, 4096])
def test_evaluation_reads_all_past_keys_in_one_kernel_call(past, cuda_kernels, monkeypatch):
    """Tiles are there for the gradients of keys, of which a forward pass has none: one call for every chunk."""
    monkeypatch.setattr(chunked, "PAST_KEYS", past)
    pipeline = piped(llama(), sequence_chunk=4)
    cuda_kernels.called.clear()
    _ = pipeline.evaluate(rows_of(rows=1)).loss
    pipeline.close()
    of_a_layer = [("forward", 4, keys) for keys in range(4, LENGTH + 1, 4)]
    calls = [call[:3] for call in cuda_kernels.called]
    assert calls == of_a_layer * (len(calls) // len(of_a_layer)) and calls


def test_attention_without_dropout_creates_no_generator(monkeypatch):
    """On CUDA it takes longer than a small layer's kernels."""
    monkeypatch.setattr(torch, "Generator", None)
    query, documents = torch.randn(1, 2, 4, 8, requires_grad=True), Documents.of((4,), (1, 4), torch.device("cpu"))
    for softcap in (None, 30.0):
        chunk = Chunk(KeyStore(1, 4), 0, 4)
        attend(query, query, query, None, chunk, documents, AttentionOptions(None, 1.0, 0.0, softcap)).sum().backward()
    output: Any = TiledScores.apply(query, query, query, None, documents, AttentionOptions(None, 1.0, 0.0, 30.0))
    output.sum().backward()
