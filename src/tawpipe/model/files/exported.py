"""Opens an exported folder again, and compares it with the model that it must contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.bits.published import tensor_headers
from tawpipe.model.buffers import materialize_buffers
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.files.carried import has_own_code, open_tokenizer, tokenizers_agree
from tawpipe.model.files.pretrained import SafetensorsSource

Written = Mapping[str, tuple[torch.dtype, list[int]]]
"""Tensor name -> its dtype and shape."""


def differences(
    chain: Chain, folder: Path, written: Written, files: Mapping[str, bytes], tokenizer: Any, *, adapter: bool
) -> list[str]:
    """Return the differences between an exported folder and the model, as sentences; empty if there are none.

    JSON and safetensors headers are read. Then transformers opens the folder on the meta device; of an adapter only the
    config of ``peft`` is opened. Values of tensors are not read.

    Args:
        chain: the model.
        folder: the exported folder.
        written: the tensors that were passed to the folder's writer.
        files: content of its small files, by name.
        tokenizer: the tokenizer that the folder must open with; None for a folder without one.
        adapter: True if the folder holds only a ``peft`` adapter.
    """
    lines = list[str]()
    try:
        lines.extend(_differences(chain, folder, written, files, tokenizer, adapter=adapter))
    except UserError as error:  # names or shapes do not fit
        lines.append(error.expected)
    except Exception as error:  # code of other libraries may raise any exception
        lines.append(f"it cannot be opened ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    return lines


def _differences(
    chain: Chain, folder: Path, written: Written, files: Mapping[str, bytes], tokenizer: Any, *, adapter: bool
) -> Iterator[str]:
    """Yield the differences between an exported folder and the model as sentences; arguments as in ``differences``.

    Of an adapter folder, the files, the tensor headers, the tokenizer and the config of ``peft`` are checked. Of a
    whole model also its class, its parameters' names and shapes, and its rotary frequencies.

    Raises:
        UserError: names or shapes of tensors do not fit the model that transformers builds.
        Exception: any error of the libraries that open the folder.
    """
    yield from (f"{name} has another content" for name in files if (folder / name).read_bytes() != files[name])
    headers = tensor_headers(folder.glob("*.safetensors"))
    yield from (
        f"{name} is {headers.get(name, 'missing')} instead of {written.get(name, 'missing')}"
        for name in sorted({*headers, *written})
        if headers.get(name) != written.get(name)
    )
    if tokenizer is not None:
        opened = open_tokenizer(folder, own_code=has_own_code(chain.model))
        if opened is None or not tokenizers_agree(opened, tokenizer):
            yield "transformers opens another tokenizer, which gives other ids"
        elif opened.chat_template != tokenizer.chat_template:
            yield "its chat template is another one"
    if adapter:
        from peft import PeftConfig

        _ = PeftConfig.from_pretrained(str(folder))
        return
    opened = build_model(str(folder), max_positions=1, trust_remote_code=has_own_code(chain.model)).model
    as_chain: Any = SimpleNamespace(model=opened)  # a chain would also check frozen parameters
    _ = SafetensorsSource(as_chain, folder)  # raises if names or shapes do not fit
    if (kinds := (type(opened).__name__, type(chain.model).__name__))[0] != kinds[1]:
        yield f"transformers opens it as {kinds[0]} instead of {kinds[1]}"
        return
    with torch.device("meta"):
        fresh = type(chain.model)._from_config(deepcopy(chain.model.config))
    frequencies = [_frequencies(model) for model in (opened, fresh)]
    names = sorted(frequencies[0].keys() | frequencies[1].keys())
    empty = torch.empty(0)
    for name in names:
        if not frequencies[0].get(name, empty).equal(frequencies[1].get(name, empty)):
            yield f"the rotary frequencies {name} are others"


def _frequencies(model: Any) -> dict[str, Tensor]:
    """Return the rotary frequencies of a model on the meta device, computed on the CPU, by buffer name."""
    materialize_buffers(model, torch.device("cpu"))
    return {name: value for name, value in model.named_buffers() if name.endswith("inv_freq")}
