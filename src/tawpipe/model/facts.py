"""Facts about a model, by which processes notice that their copies differ without reading all of it.

Every process reads the weights of some layers from its own disk. If one disk had other weights, each layer would be
right and the model a mixture. Tensors are compared by name, not by file, so how a model is split into files does not
matter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WHOLE, SAMPLE = 1 << 20, 4096
"""Size in bytes up to which a whole tensor is compared (``WHOLE``), and bytes compared at the beginning, middle and end
of a larger one (``SAMPLE``)."""
OF_THE_WRITER = {"_name_or_path", "transformers_version", "base_model_name_or_path", "peft_version"}
"""Keys of a config that tell its origin and do not change the model's results."""
READERS = 8
"""Number of files read at one time. A network disk answers several reads as fast as one."""


class Fact(NamedTuple):
    """One property of a model, to be compared between processes.

    Attributes:
        file: file that the property was read from, for messages; ``""`` if the property's name tells it.
        shown: short text for messages: a setting's value, or a tensor's dtype and shape.
        digest: hash of content that is too long to be shown.
    """

    file: str
    shown: str
    digest: str = ""


Facts = dict[str, Fact]
"""Property name -> its fact."""


def config_facts(file: str, config: Mapping[str, Any]) -> Facts:
    """Return a fact about every key of ``config``, without the keys in ``OF_THE_WRITER``.

    Args:
        file: name of the config's file, which becomes part of the property names.
        config: content of the config.
    """
    plain = lambda value: sorted(value) if isinstance(value, set) else str(value)  # noqa: E731
    text = json.dumps(config, default=plain, sort_keys=True)
    keys = json.loads(text, object_hook=lambda part: {k: part[k] for k in part if k not in OF_THE_WRITER})
    return {f"{key} in {file}": Fact("", json.dumps(value)) for key, value in keys.items()}


def value_facts(values: Mapping[str, Tensor]) -> Facts:
    """Return a fact about every tensor in ``values``: trained or frozen, dtype, shape and a hash of its bytes.

    Of a large tensor only samples are hashed."""
    facts = Facts()
    for name, value in values.items():
        data = value.detach().reshape(-1).view(torch.uint8)
        parts = (data[begin:end].cpu().numpy().tobytes() for begin, end in _spans(len(data)))
        trained = "trained" if value.requires_grad else "frozen"
        facts[name] = Fact("", f"{trained} {value.dtype} {list(value.shape)}", _digest(parts))
    return facts


def value_digest(value: Tensor) -> str:
    """Return a hash of dtype, shape and all bytes of a CPU tensor, as 32 hexadecimal digits.

    It is the first 128 bits of SHA-256, which processors compute in hardware."""
    digest = sha256(f"{value.dtype} {list(value.shape)}".encode())
    digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def tensor_facts(files: Iterable[Path]) -> Facts:
    """Read safetensors files in parallel and return a fact about each tensor: dtype, shape and a hash of its bytes.

    Of a large tensor only samples are read.

    Raises:
        OSError, ValueError: a file cannot be read, or ends too early.
    """
    with ThreadPoolExecutor(READERS, "comparing weights") as pool:
        return {name: fact for facts in pool.map(_facts_of_file, sorted(set(files))) for name, fact in facts.items()}


def _facts_of_file(path: Path) -> Facts:
    """Return a fact about each tensor of one safetensors file."""
    facts = Facts()
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, path.stat().st_size)))
        header.pop("__metadata__", None)
        if hasattr(os, "posix_fadvise"):  # otherwise the system reads 128 KiB in advance each time
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

        def read(begin: int, end: int) -> bytes:
            """Return bytes ``begin`` to ``end`` of the file's data section."""
            file.seek(8 + length + begin)
            if len(data := file.read(end - begin)) < end - begin:
                raise ValueError(f"{path} ends too early")
            return data

        for name, entry in header.items():
            first, last = entry["data_offsets"]
            parts = (read(first + begin, first + end) for begin, end in _spans(last - first))
            facts[name] = Fact(path.name, f"{entry['dtype']} {entry['shape']}", _digest(parts))
    return facts


def _spans(size: int) -> list[tuple[int, int]]:
    """Return the byte ranges (begin, end) to compare in a tensor of ``size`` bytes.

    A large tensor has three ranges (beginning, middle, end), others have one range with all bytes."""
    places = (0, (size - SAMPLE) // 2, size - SAMPLE)
    return [(0, size)] if size <= WHOLE else [(at, at + SAMPLE) for at in places]


def _digest(parts: Iterable[bytes]) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()
