"""The dtype that ``auto`` stands for, on devices that are stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from borders import llama, sgd
from tawpipe import CheckSettings, Pipeline
from tawpipe.errors import UserError
from tawpipe.runtime.dtype import chosen_dtype, computes_in_bfloat16


class Devices:
    """A world as far as the choice looks at it: this rank's device, and what the others say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int] | None) -> None:
        self.device = torch.device("cpu") if capabilities[0] is None else torch.device("cuda", 0)
        others = [float(one is not None and one >= (8, 0)) for one in capabilities[1:]]
        self.gather_numbers = lambda mine: [mine, *others]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[0])


def choose(monkeypatch: pytest.MonkeyPatch, asked: str, *capabilities: Any, earlier: str = "") -> tuple[str, str]:
    world: Any = Devices(monkeypatch, *capabilities)
    return chosen_dtype(asked, world, earlier)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        (((9, 0), (9, 0)), "bfloat16"),
        (((8, 0),), "bfloat16"),
        (((7, 5), (9, 0)), "float32"),
        (((9, 0), (7, 0)), "float32"),  # one of them is older: all compute alike
        ((None, None), "float32"),
    ],
)
def test_dtype_auto_is_bfloat16_if_every_device_supports_it(monkeypatch, capabilities, dtype):
    chosen, why = choose(monkeypatch, "auto", *capabilities)
    assert chosen == dtype and why.startswith("auto: ")
    assert choose(monkeypatch, "float64", *capabilities) == ("float64", "as --dtype says")


@pytest.mark.parametrize(
    ("earlier", "capability", "dtype", "words"),
    [
        ("float32", (9, 0), "float32", "as in the checkpoint"),
        ("bfloat16", (9, 0), "bfloat16", "as in the checkpoint"),
        ("bfloat16", None, "float32", "bfloat16 in the checkpoint"),
        ("bfloat16", (7, 0), "float32", "bfloat16 in the checkpoint"),
        ("float64", None, "float64", "as in the checkpoint"),
        ("", (9, 0), "bfloat16", "compute in it"),
    ],
)
def test_resumed_run_keeps_its_dtype_if_devices_support_it(monkeypatch, earlier, capability, dtype, words):
    chosen, why = choose(monkeypatch, "auto", capability, earlier=earlier)
    assert chosen == dtype and words in why
    assert choose(monkeypatch, "bfloat16", capability, earlier=earlier)[0] == "bfloat16", "what is asked for counts"


def test_library_accepts_dtype_auto_or_a_torch_dtype():
    pipeline = Pipeline(llama()(), optimizer=sgd, checks=CheckSettings(check="never"))
    assert pipeline.dtype == torch.float32 and not computes_in_bfloat16(pipeline.world.device)
    pipeline.close()
    with pytest.raises(UserError, match=r"dtype: got 'bf16'; torch.float32, torch.bfloat16, torch.float64 or 'auto'"):
        Pipeline(llama()(), dtype="bf16")
    with pytest.raises(UserError, match=r"dtype: got torch\.float16"):
        Pipeline(llama()(), dtype=torch.float16)
