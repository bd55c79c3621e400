"""The flash kernel on parts of the keys gives what a softmax over all of them gives, and its gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tawpipe.model import flash
from tawpipe.model.attention.chunked import ChunkQueries, _parts
from tawpipe.model.kernels import AttentionOptions, explicit_gradients, explicit_scores

WINDOWS, THREADS = (None, 2, 5, 6, 11, 40), (1, 2, 4, 64, "CUDA")
PLACES = ((0, 0, 13), (0, 20, 30), (3, 20, 30), (24, 25, 26), (7, 19, 37))


@pytest.mark.parametrize(
    ("window", "threads", "place", "dims"),
    [
        (*one, ((8, 8), (8, 5))[number % 2])  # of one width, or narrower values
        for number, one in enumerate(product(WINDOWS, THREADS, PLACES))
    ],
)
def test_flash_attention_over_key_parts_equals_one_softmax(window, threads, place, dims, monkeypatch, request):
    """Whatever is folded, padded for one head at a time, cut into tiles, or left to CUDA's kernel; with sinks or not;
    key-value heads are 2 of 8. What is kept for the backward pass is part of a chunk's.
    """
    if threads == "CUDA":
        request.getfixturevalue("cuda_kernels")
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(flash, "PADDED", 1)
    start, first, last = place
    dim, value_dim = dims
    torch.manual_seed(0)
    rows, length, oldest = 3, 37, start if window is None else max(start, first - window + 1)
    query, gradient = torch.randn(2, rows, 8, last - first, dim, dtype=torch.float64)
    gradient = gradient[..., :value_dim]
    keys, values = torch.randn(2, rows, 2, length, dim, dtype=torch.float64)
    values = values[..., :value_dim].contiguous()
    sinks = None if last - first == 10 else torch.randn(8, dtype=torch.float64)

    seen = keys[:, :, oldest:last], values[:, :, oldest:last]
    given = {"options": AttentionOptions(window, 0.3, 0.0, None), "offset": first - oldest, "generator": None}
    wanted = explicit_scores(query, *seen, sinks, **given)
    of_query, of_keys, of_values, of_sinks = explicit_gradients(gradient, query, *seen, sinks, **given)

    piece = ChunkQueries(slice(0, rows), slice(0, last - first), oldest, first, last)
    for past in (4, last):
        parts = _parts(piece, window, past, threads == "CUDA")
        output, sums = flash.attention(query, keys, values, parts, 0.3, sinks)
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        sums = torch.cat([sums, torch.full_like(sums, 3.0)], dim=2)[..., : last - first]
        key_sums, value_sums = torch.ones_like(keys), torch.ones_like(values)
        targets = key_sums, value_sums
        found = flash.gradients(gradient, query, output, sums, (keys, values), targets, parts, 0.3)
        torch.testing.assert_close(found, of_query, rtol=1e-11, atol=1e-12)
        for total, part in ((key_sums, of_keys), (value_sums, of_values)):
            expected = torch.ones_like(total)
            expected[:, :, oldest:last] += part
            torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-12)
        if sinks is not None:
            torch.testing.assert_close(flash.sink_gradient(gradient, output, sums, sinks), of_sinks)
