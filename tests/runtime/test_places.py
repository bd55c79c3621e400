"""Where rows wait outside of the device: as large as the largest so far, whatever sizes come."""

from __future__ import annotations

import pytest
import torch

from tawpipe.runtime.compute.chunks import spans_of
from tawpipe.runtime.compute.rows import GrowingBuffer, Places
from tawpipe.schedule.buffers import offloaded

CPU = torch.device("cpu")


@pytest.mark.parametrize("in_files", [False, True])
def test_offload_places_hold_rows_of_any_length_without_growing(tmp_path, in_files):
    places = Places(CPU, str(tmp_path) if in_files else "")
    draw = torch.Generator().manual_seed(0)
    for length in [5, 40, 7, 23, 40, 1, 39]:
        rows = torch.rand(1, length, 3, generator=draw)
        place = places.of(offloaded(0, 1), rows.shape, rows.dtype)
        for span in spans_of(length, 8):
            place.write(span, rows[:, span])
        place.settle()
        places.reserve(offloaded(0, 1), (1, 40, 3), rows.dtype, spans_of(40, 8))  # for the step that comes
        found = [tokens.clone() for tokens in place.read(spans_of(length, 8))]
        assert torch.equal(torch.cat(found, 1), rows)
    assert len(places._places) == 1
    assert places.file_bytes == (40 * 3 * 4 if in_files else 0)
    places.close()


def test_reserved_buffer_keeps_its_content_until_requested():
    room = GrowingBuffer(torch.float32)
    there = room.of((2, 3)).fill_(7)
    room.reserve((100,))
    assert torch.equal(room.of((2, 3)), there) and room.of((2, 3)).data_ptr() == there.data_ptr()
    large = room.of((100,))
    assert large.data_ptr() != there.data_ptr() and room.of((100,)).data_ptr() == large.data_ptr()
