"""Text to tokens to rows of S tokens: deterministic, resumable by one integer, the same on every rank.

``prepare_data`` is the door. Imports numpy, transformers, tokenizers and datasets, torch only to make micro-batches;
nothing of the schedule or the runtime.
"""

from tawpipe.data.collate import collate, micro_batches
from tawpipe.data.packing import Segment
from tawpipe.data.prefetch import Prefetcher, prefetch
from tawpipe.data.prepare import PreparedData, changed_parts, prepare_data
from tawpipe.data.report import DataReport
from tawpipe.data.rows import PackedDataset, Row, RowSource
from tawpipe.data.settings import DataSettings
from tawpipe.data.stream import StreamedDataset
from tawpipe.data.tokenizer import check_vocabulary

__all__ = [
    "DataReport",
    "DataSettings",
    "PackedDataset",
    "Prefetcher",
    "PreparedData",
    "Row",
    "RowSource",
    "Segment",
    "StreamedDataset",
    "changed_parts",
    "check_vocabulary",
    "collate",
    "micro_batches",
    "prefetch",
    "prepare_data",
]
