"""A layer's backward pass in two parts gives what it gives in one, and keeps nothing but what products need."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from every_family import PACKED, families, micro_batches, random_model
from model_families import Holder, assert_close, family_config, keep_fp64, packed_batch, real_model
from tawpipe.errors import UserError
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.compute.recompute import kept_for_weights_per_token, kept_per_token
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import Frame
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, Kind, block_input, context, input_gradient, linear, loss, pooled

BATCHES = packed_batch(((9, 7),)), packed_batch(((16,),), seed=2)
TOKENS = 16


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def model_of(family: str) -> Any:
    """A tiny model; ``lora`` trains adapters with dropout on all products, ``dora`` also sizes of their columns."""
    if family in ("lora", "dora"):
        peft = pytest.importorskip("peft")
        wish = peft.LoraConfig(
            r=3,
            target_modules="all-linear",
            lora_dropout=0.2,
            use_dora=family == "dora",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(3)
        return peft.get_peft_model(real_model(family_config("llama")), wish).double()
    return real_model(family_config(family, tied=family == "gpt2", attention_bias=True))


def step_of(compute: Compute, count: int, kept: Kind | None, second: Sequence[int]) -> Iterator[Action]:
    """Micro-batches forward, then backward; layers in two parts if there is an order for the second ones."""
    spec, last = compute.spec, len(compute.spec.blocks) - 1
    arrived: set[int] = set()

    def action(op: Op, m: int, b: int, reads: Sequence[Buffer], writes: Sequence[Buffer], *, weights: bool = True):
        units = spec.blocks[b].units if weights else ()
        gradients = spec.trainable_units(b) if op is not Op.FORWARD else ()
        added = [pooled(f"G{u}", 0) for u in gradients if u in arrived]
        arrived.update(gradients)
        activations = tuple(one for one in reads if one.kind is not Kind.CONTEXT)
        return Action(
            op,
            Lane.COMPUTE,
            (*[pooled(f"W{u}", 0) for u in units], *reads, *added),
            (*[pooled(f"G{u}", 0) for u in gradients], *writes),
            activations if kept or op is not Op.FORWARD else (),
            block=b,
            micro_batch=m,
        )

    for m in range(count):
        yield action(Op.FORWARD, m, 0, (), (block_input(m, 1), context(m)))
        for b in range(1, last):
            own = [Buffer(kept, (m, b))] if kept else []
            yield action(Op.FORWARD, m, b, (block_input(m, b), context(m)), (block_input(m, b + 1), *own))
    for m in range(count):
        given = (block_input(m, last), context(m))
        yield action(Op.BACKWARD, m, last, given, (input_gradient(m, last), loss(m)))
        for b in range(last - 1, spec.first_backward - 1, -1):
            own = () if b == 0 else (Buffer(kept or Kind.INPUT, (m, b)),)
            to = (input_gradient(m, b),) if b > spec.first_backward else ()
            op = Op.BACKWARD_INPUT if second and b else Op.BACKWARD
            left = (linear(m, b),) if op is Op.BACKWARD_INPUT else ()
            yield action(op, m, b, (input_gradient(m, b + 1), *own, context(m)), (*to, *left))
    for m in second:
        for b in range(last - 1, 0, -1):
            yield action(Op.BACKWARD_WEIGHT, m, b, (linear(m, b),), (), weights=False)


def gradients_of(
    holder: Holder, kept: Kind | None, second: Sequence[int], *, split: bool = False, batches: Any = BATCHES
) -> tuple[dict[str, Tensor], int, list[str]]:
    """A step's gradients, most bytes between the two parts, and the parameters that have no gradient between them."""
    chain, most, missing = holder.chain, 0, list[str]()
    compute = Compute(chain, chain.spec, chunk_tokens=8, split_backward=split or bool(second))
    buffers = {pooled(f"W{u}", 0): flat for u, flat in enumerate(holder.values)}
    buffers |= {pooled(f"G{u}", 0): flat for u, flat in enumerate(holder.gradients)}
    transport: Any = None
    frame = Frame(buffers, transport, StepInput(dict(enumerate(batches)), scale=1.0, seed=0, step=0))
    for action in step_of(compute, len(batches), kept, second):
        if action.op is Op.FORWARD:
            compute.forward(action, frame)
        elif action.op is Op.BACKWARD_WEIGHT:
            if not missing:
                missing = [name for name, one in holder.named_gradients().items() if not one.any()]
            compute.backward_weight(action, frame)
        else:
            compute.backward(action, frame)
        if (done := linear(action.micro_batch, action.block)) in action.writes:
            most = max(most, compute.held.deferred[done].bytes)
    assert not any(compute.held.tables[kind] for kind in (Kind.GRAPH, Kind.INPUT_GRADIENT, Kind.LINEAR))
    return {name: one.clone() for name, one in holder.named_gradients().items()}, most, missing


ORDERS = {
    "llama": [(None, (0, 1)), (None, (1, 0)), (Kind.GRAPH, (1, 0)), (Kind.ATTENTION, (0, 1))],
    "gpt2": [(None, (1, 0))],
    "qwen3_moe": [(None, (0, 1)), (Kind.GRAPH, (1, 0))],
    "gpt_oss": [(None, (1, 0))],
    "lora": [(None, (1, 0)), (Kind.ATTENTION, (0, 1))],
    "dora": [(Kind.GRAPH, (0, 1))],
}
"""Of a family what layers keep, and in which order the micro-batches have their second parts."""


@pytest.mark.parametrize("family", ORDERS)
def test_split_backward_pass_has_the_gradients_of_a_whole_one(family: str):
    holder = Holder(model_of(family))
    whole, _, _ = gradients_of(holder, None, ())
    matrices = [name for name, one in whole.items() if ".layers." in name or ".h." in name if one.ndim > 1]
    for kept, second in ORDERS[family]:
        parts, most, missing = gradients_of(holder, kept, second)
        assert_close(parts, whole, 1e-12)
        assert sorted(missing) == sorted(name for name in matrices if not name.endswith("bias"))
        assert most == kept_for_weights_per_token(holder.chain) * TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("family", families()[::4])
def test_split_backward_pass_has_whole_gradients_in_many_families(family: str):
    try:
        holder, batches = Holder(random_model(family)), micro_batches(PACKED)
        whole, _, _ = gradients_of(holder, None, (), batches=batches)
    except (UserError, ImportError, ValueError) as error:
        pytest.skip(str(error))
    parts, most, _ = gradients_of(holder, None, (1, 0), batches=batches)
    assert_close(parts, whole, 1e-12)
    # Where documents run in turn, those of about one length are copied, and padded to the longest of them.
    counted = kept_for_weights_per_token(holder.chain) * batches[0].input_ids.numel()
    assert counted <= most <= 1.12 * counted


def test_graph_kept_for_a_split_backward_also_runs_whole():
    """What a layer keeps does not say in how many parts its backward pass will be."""
    holder = Holder(model_of("llama"))
    whole, _, _ = gradients_of(holder, None, ())
    assert_close(gradients_of(holder, Kind.GRAPH, (), split=True)[0], whole, 1e-12)


class Odd(nn.Module):
    """Products in ways that models have them, or could."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.scaled, self.drop = nn.Linear(6, 6, bias=False), nn.Dropout(0.5)
        self.stacked = nn.Parameter(torch.randn(2, 6, 6))
        self.first, self.second = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 6))
        self.seen: weakref.ref[Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.frozen(self.drop(self.tied(hidden).relu_())) + self.tied(hidden).add_(1.0)
        hidden = hidden @ (2 * self.scaled.weight) + hidden @ self.stacked[0].mT + hidden[0] @ self.stacked[1:][0]
        hidden = nn.functional.linear(hidden, self.first @ self.second)
        self.seen = weakref.ref(hidden)
        inner = nn.functional.silu(hidden)  # for which autograd saves its input
        return torch.bmm(torch.addmm(self.tied.bias, inner[0], self.tied.weight, beta=0.5)[None], self.stacked[:1])


def test_deferred_products_handle_odd_layers_and_free_their_graph():
    """Weights tied, frozen, scaled, stacked; outputs changed in place, or scaled; products of weights alone."""
    torch.manual_seed(0)
    layer = Odd().double()
    given, arriving = torch.randn(1, 5, 6, dtype=torch.float64), torch.randn(1, 5, 6, dtype=torch.float64)
    deferred, outputs, found = DeferredProducts(layer.parameters()), [], []
    for run in (layer, deferred.around(layer)):
        torch.manual_seed(1)
        layer.zero_grad()
        hidden = given.clone().requires_grad_()
        output = run(hidden)
        assert layer.seen is not None and layer.seen() is not None
        torch.autograd.backward(output, arriving)
        outputs.append(output.detach().clone())
        found.append({"given": hidden.grad, **{name: one.grad for name, one in layer.named_parameters()}})
    del output, run
    gc.collect()
    assert layer.seen() is None
    first = {name: None if one is None else one.clone() for name, one in found[1].items()}
    assert first["second"] is not None and first["scaled.weight"] is not None and first["stacked"] is None
    assert deferred.bytes == (3 + 5) * given.nbytes  # inputs, two of them of two products, and gradients

    sums = {one: torch.zeros_like(one) if one.grad is None else one.grad for one in layer.parameters()}
    deferred.run(sums.__getitem__)
    assert deferred.bytes == 0
    assert torch.equal(*outputs)
    for name, parameter in layer.named_parameters():
        expected = found[0][name]
        torch.testing.assert_close(sums[parameter], torch.zeros_like(parameter) if expected is None else expected)
    torch.testing.assert_close(found[0]["given"], found[1]["given"])


def test_grouped_experts_are_split_and_counted_without_weights():
    model = real_model(family_config("qwen3_moe"), torch.float32)
    model.set_experts_implementation("grouped_mm")
    holder = Holder(model, torch.float32)
    assert kept_per_token(holder.chain)["graph"] > 0
    whole, _, _ = gradients_of(holder, None, ())
    parts, most, missing = gradients_of(holder, None, (1, 0))
    assert_close(parts, whole, 1e-6)
    assert any("experts" in name for name in missing)
    assert most == kept_for_weights_per_token(holder.chain) * TOKENS


def test_trial_of_kept_bytes_leaves_no_graph(monkeypatch: pytest.MonkeyPatch):
    """Nodes of parameters would stay, too, with the stream of the caller: later gradients would wait for that."""
    chain = Holder(real_model(family_config("llama"), torch.float32), torch.float32).chain
    parameters, layer, marked = list(chain.parameters_of(range(len(chain.units)))), chain.layer, []

    def marks() -> list[Any]:
        return [get_gradient_edge(parameter).node.metadata for parameter in parameters]

    def mark(*given: Any, **named: Any) -> Tensor:
        output = layer(*given, **named)
        if torch.is_grad_enabled():
            marked.extend(mark.update(tried=True) for mark in marks())  # while there is a graph
        return output

    monkeypatch.setattr(chain, "layer", mark)
    assert kept_per_token(chain)["graph"] > 0 and marked
    gc.collect()
    assert not any("tried" in mark for mark in marks())
