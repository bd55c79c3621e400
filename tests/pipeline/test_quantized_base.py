"""A frozen model in 4 or 8 bits under adapters: the numbers of one process that holds what the bits stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import batches, llama
from pipelines import make_pipeline
from states import ALONE, train
from tawpipe import Pipeline, adamw
from tawpipe.errors import UserError

peft = pytest.importorskip("peft")
SETTINGS = [
    {"strategy": "tawpipe-whole", "quantize": "int8", "offloaded_layers": 3, "sequence_chunk": 7},
    {"strategy": "tawpipe-spread", "experts": True, "recompute": "none:1,full"},
    *(
        pytest.param(knobs, marks=pytest.mark.slow)
        for knobs in (
            {"strategy": "tawpipe-spread", "step_cache": 2},
            {"strategy": "hsdp", "dtype": "float32"},
            {"strategy": "tawpipe-spread", "sequence_ranks": 2},
            {"strategy": "tawpipe-striped", "recompute": "none:2,selective:1,full", "offloaded_layers": 4},
            {"strategy": "weipipe"},
            {"strategy": "tawpipe-whole", "experts": True, "quantize": "none", "sequence_ranks": 2},
            {"strategy": "flat", "experts": True, "sequence_chunk": 5},
            {"strategy": "1f1b", "experts": True, "quantize": "none", "recompute": "none"},
            {"strategy": "zero-bubble", "experts": True, "quantize": "none", "recompute": "none"},
        )
    ),
]


@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_quantized_base_with_adapters_matches_one_process(pool, knobs):
    nodes, local = {"weipipe": (4, 1), "1f1b": (2, 1), "zero-bubble": (2, 1)}.get(knobs["strategy"], (2, 2))
    worst, changed, _ = pool.run("cases:lora", nodes, local, **{"quantize": "nf4", **knobs})[0]
    assert worst < (1e-5 if "dtype" in knobs else 1e-10)
    assert changed and all("lora_" in name for name in changed)


@pytest.mark.slow
def test_delays_in_every_lane_change_no_bit_of_a_quantized_base(pool):
    knobs = {"strategy": "tawpipe-striped", "recompute": "none:2,full", "micro_batches_per_visit": 2}
    plain, delayed = (pool.run("cases:lora", 2, 2, quantize="nf4", delays=wait, **knobs)[0] for wait in (0.0, 0.003))
    assert plain[2] == delayed[2] and plain[0] < 1e-10


def adapted(form: str = "nf4", **knobs: Any) -> Pipeline:
    model = llama(torch.float32)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return make_pipeline(model, optimizer=adamw(1e-2), world=ALONE, quantize=form, **knobs)


def values(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    found = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    return {name: value for name, value in found.items() if value is not None}


def test_checkpoint_holds_quantized_bits_and_resumes_exactly(tmp_path):
    one, folder = adapted(), tmp_path / "state"
    train(one, batches(2, 1))
    one.save(folder)
    expected, later = values(one), train(one, batches(2, 2))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    one.close()
    other = adapted()
    with torch.no_grad():  # another base, until the state is there
        for unit in other.storage.master.values():
            unit.view(torch.uint8).zero_()
    train(other, batches(2, 1))
    other.load(folder)
    assert all(torch.equal(value, expected[name]) for name, value in values(other).items())
    assert train(other, batches(2, 2)) == later
    other.close()
    for form in ("none", "int8"):
        wrong = adapted(form)
        with pytest.raises(UserError, match=f"a state of quantize={form}; .* saved with quantize=nf4"):
            wrong.load(folder)
        if form == "none":
            wrong.save(tmp_path / "whole")
        wrong.close()
    assert size < sum(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors")) / 2


def test_quantized_checkpoint_resumes_on_another_number_of_ranks(pool, tmp_path):
    folder = str(tmp_path / "state")
    before = pool.run("packed_states:saved", 2, 1, folder=folder)[0]
    assert pool.run("packed_states:loaded", 3, 1, folder=folder)[0] == pytest.approx(before, rel=1e-10)


def test_predicted_bytes_of_a_quantized_base_equal_the_held_bytes():
    plain, packed = adapted("none"), adapted()
    one, other = (pipeline.costs(2, 20) for pipeline in (plain, packed))
    assert one.parameters == other.parameters and one.trainable == other.trainable
    packed.schedule(2)
    homes = {id(value) for value in (*packed.storage.master.values(), *packed.storage.gradient.values())}
    pools = [value for value in packed.executor._buffers.values() if id(value) not in homes]
    assert other.buffer_bytes == sum(value.nbytes for value in (*pools, packed.chain._unpack_buffer))
    assert other.home_bytes < one.home_bytes
    plain.close()
    packed.close()


def test_exported_base_weights_are_the_dequantized_ones(tmp_path):
    """What an export would merge into is what blocks have computed with."""
    pipeline = adapted()
    frozen = next(name for name in pipeline.parameter_names if name.endswith("k_proj.weight"))
    value, exact = (
        pipeline.parameter(frozen),
        llama(torch.float32).get_parameter(frozen.replace(".base_layer", "")).detach(),
    )
    assert value is not None and not torch.equal(value, exact)
    assert float((value - exact).norm() / exact.norm()) < 0.15
    assert pipeline.export(tmp_path / "adapter") == Path(tmp_path / "adapter")
    pipeline.close()


def test_weights_compression_int8_is_refused_with_quantize():
    with pytest.raises(UserError, match=r"weights_compression.*none or exact with quantize=nf4"):
        adapted(weights_compression="int8")
