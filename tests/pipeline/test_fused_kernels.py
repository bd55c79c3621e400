"""Fused kernels in a pipeline: stand-ins give the numbers of the plain model, and what cannot work is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from cases import batches, llama
from fused_cases import by_stand_ins, put_into_pipelines
from pipelines import make_pipeline
from states import ALONE
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.fused.operations import EAGER, STAND_IN
from tawpipe.model.fused.places import largest_difference
from tawpipe.pipeline import kernels

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    "knobs",
    [
        {"recompute": "full", "names": ["gemma3"]},
        {"recompute": "selective:1,none", "names": ["qwen3_moe"]},
        {"sequence_chunk": 7, "names": ["qwen3"]},
        pytest.param({"recompute": "none:1,full", "names": ["llama", "gemma2", "mistral"]}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective", "sequence_chunk": 5, "names": ["gemma3"]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stand_ins_match_the_plain_model_on_packed_rows(knobs: dict[str, Any]) -> None:
    worst, counts = by_stand_ins(ALONE, case="families", tied=True, **knobs)
    assert all(difference < 1e-10 for difference in worst.values())
    assert counts["rotary"] == 3 * len(worst) and counts.get("gate", 0) >= len(worst)
    assert counts.get("norm", 0) >= 6 * sum(name != "llama" for name in worst)  # tests replace the norm of Llama


@pytest.mark.parametrize(
    "knobs",
    [
        {"case": "lora", "strategy": "zero-bubble", "recompute": "none", "quantize": "nf4"},
        pytest.param({"case": "lora", "strategy": "tawpipe-whole", "sequence_ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"case": "lora", "strategy": "1f1b", "recompute": "selective"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stand_ins_match_one_process_in_pipelines_with_adapters(pool, knobs: dict[str, Any]) -> None:
    nodes = (1, 2) if "sequence_ranks" in knobs else (2, 1)
    (worst, *_), counts = pool.run("fused_cases:by_stand_ins", *nodes, **knobs)[0]
    assert worst < 1e-10 and counts == {"rotary": 5, "gate": 5}


@pytest.mark.slow
def test_compiled_layers_compute_by_the_chosen_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By functions that are wrong on purpose, so that one of the model's own would show."""
    wrong = STAND_IN._replace(
        name="wrong",
        rotary=lambda query, key, cos, sin: (query * cos[:, None], key * 2),
        gate=lambda gate, up, activation: torch.tanh(gate) * up,
        norm=lambda hidden, weight, *_: hidden * weight,
    )
    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=2, **heads)
    losses = []
    for compiled, operations in ((False, wrong), (True, wrong), (True, STAND_IN), (False, EAGER)):
        counts = put_into_pipelines(monkeypatch, operations)
        torch.manual_seed(0)
        knobs = {"dtype": torch.float32, "world": ALONE, "check": "never", "compile_layers": compiled}
        pipeline = make_pipeline(Qwen3ForCausalLM(config), recompute="none", **knobs)
        losses.append([pipeline.step(batch).loss for batch in batches(2, 3)])
        pipeline.close()
        assert counts["norm"] == (8 if operations is not EAGER else 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[3], rel=1e-5)
    assert losses[1] != pytest.approx(losses[2], rel=1e-4)


def test_check_compares_stand_ins_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_pipelines(monkeypatch)
    pipeline = make_pipeline(llama(torch.float32, layers=2), dtype=torch.float32, world=ALONE)
    assert "2 of 2 layers checked against the model's own forward pass" in pipeline.checked
    pipeline.close()
    wrong = STAND_IN._replace(gate=lambda gate, up, activation: gate + up)
    monkeypatch.setattr("tawpipe.pipeline.check.STAND_IN", wrong)
    with pytest.raises(UserError, match="layer 0 of LlamaForCausalLM: hidden states, off by"):
        make_pipeline(llama(torch.float32, layers=2), dtype=torch.float32, world=ALONE)


def test_exported_model_is_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []
    for operations in (EAGER, STAND_IN):
        put_into_pipelines(monkeypatch, operations)
        folder = tmp_path / operations.name
        pipeline = make_pipeline(llama(torch.float32, layers=2), dtype=torch.float32, world=ALONE, check="never")
        pipeline.step(batches(2, 1)[0])
        pipeline.export(folder)
        pipeline.close()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(type(module).__module__.startswith(("transformers.", "torch.")) for module in model.modules())
        exported.append((model.state_dict(), sorted(path.name for path in folder.iterdir())))
    (before, files), (after, others) = exported
    assert files == others and before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# choice and refusals


def choose(chain: Chain, asked: str, device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16) -> str:
    def require(ok: bool, setting: str, value: object, expected: str) -> None:
        if not ok:
            raise UserError(setting, value, expected)

    world: Any = SimpleNamespace(device=device, require=require, gather_numbers=lambda number: [number])
    return kernels.choose_kernels(chain, asked, world, dtype, "full")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU whose kernels are stand-ins on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Slow GPU")
    monkeypatch.setattr(kernels, "missing_package", lambda: "")
    monkeypatch.setattr(kernels, "liger", lambda: STAND_IN)
    on_cpu = lambda place, operations, _, dtype: largest_difference(place, operations, torch.device("cpu"), dtype)  # noqa: E731
    monkeypatch.setattr(kernels, "largest_difference", on_cpu)
    return monkeypatch


def chain() -> Chain:
    return Chain(llama(torch.float32, layers=2))


def test_auto_is_eager_until_a_result_is_committed(gpu: pytest.MonkeyPatch) -> None:
    small = chain()
    expected = "kernels: eager (no committed result shows that fused ones are faster on Slow GPU)"
    assert choose(small, "auto") == expected and small.operations is EAGER
    gpu.setattr(kernels, "FASTER", {"Slow GPU": "2026-12-01"})
    assert choose(small, "auto").startswith("kernels: fused (stand-in: no norms, 2 rotary embeddings, 2 gates; largest")
    assert small.operations is STAND_IN
    assert choose(chain(), "auto", torch.device("cpu")) == choose(chain(), "eager") == ""
    gpu.setattr(kernels, "missing_package", lambda: "liger-kernel is not installed")
    assert choose(chain(), "auto") == "kernels: eager (liger-kernel is not installed)"


def test_fused_is_refused_where_it_cannot_work(gpu: pytest.MonkeyPatch) -> None:
    def refused(words: str, model: Chain, *how: Any) -> None:
        with pytest.raises(UserError, match=words) as error:
            choose(model, "fused", *how)
        assert str(error.value).startswith("kernels: got 'fused'; eager or auto: ")

    refused("fused kernels run on GPUs, in float32 and bfloat16", chain(), torch.device("cpu"))
    refused("fused kernels run on GPUs, in float32 and bfloat16", chain(), GPU, torch.float64)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    refused("layers of GPT2LMHeadModel have no norms, rotary embeddings or gates that stand-in computes", Chain(other))
    gpu.setattr(kernels, "liger", lambda: STAND_IN._replace(gate=lambda gate, up, activation: gate * up))
    refused(r"stand-in differs from the model by \de[-+]\d\d in gates", chain())
    gpu.setattr(kernels, "liger", lambda: STAND_IN._replace(rotary=None))
    refused("liger-kernel fails with TypeError", chain())
    gpu.undo()
    refused(r"liger-kernel is not installed \(pip install liger-kernel\)", chain())
    with pytest.raises(UserError, match="kernels: got 'quick'; eager, fused, auto"):
        make_pipeline(llama(torch.float32), world=ALONE, kernels="quick")
