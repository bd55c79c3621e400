"""Properties of the runtime beside exactness: model families, adapters, faults, precision, memory, optimizers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch

import tawpipe
from cases import WITH_HOST, batches, llama
from model_families import Holder, family_config, packed_batch, real_model
from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import Frame
from tawpipe.runtime.homes.optimizer import adamw, check_elementwise
from tawpipe.runtime.homes.storage import PlaceOfPiece
from tawpipe.runtime.lanes import CpuLane, Failure
from tawpipe.runtime.transport.transport import needed_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import context
from tawpipe.schedule.sizes.footprint import MOST_EARLY
from tawpipe.topology import Topology

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "qwen3_moe", "mistral", "granite", "cohere"]


@pytest.mark.parametrize(
    ("families", "tied"),
    [
        (FAMILIES[::4], True),
        *(pytest.param(FAMILIES[first::4], True, marks=pytest.mark.slow) for first in (1, 2, 3)),
        pytest.param(FAMILIES, False, marks=pytest.mark.slow),
    ],
)
def test_packed_documents_of_every_family_match_the_plain_model(pool, families, tied):
    for family, difference in pool.run("cases:families", 2, 2, names=families, tied=tied)[0].items():
        # transformers computes the router's softmax in fp32, also in an fp64 model.
        assert difference < (1e-6 if family == "qwen3_moe" else 1e-10), family


@pytest.mark.parametrize("number", quick_ones(range(4), [1]))
def test_adapters_train_and_the_frozen_model_is_unchanged(pool, number):
    waiting = {"recompute": "selective:1,none:3,full", "offloaded_layers": 4, "layers": [2, 3, 4]}
    order = {"strategy": "solved", "pipeline_order": WITH_HOST, "recompute": "none", "micro_batch": 2}
    every = ((2, {"recompute": "full"}), (2, {"recompute": "selective:2,none"}), (1, waiting), (1, order))
    local, knobs = every[number]
    worst, changed, _ = pool.run("cases:lora", 2, local, **knobs)[0]
    assert worst < 1e-10
    assert changed and all("lora_" in name for name in changed)


@pytest.mark.parametrize("slow", ["HOST", "COMPUTE"])
def test_offloaded_inputs_do_not_accumulate_on_the_device(pool, slow):
    """Whichever lane is behind: inputs do not pile up on their way out, nor come back before there is a place."""
    for most, said, places, said_places in pool.run("cases:offloaded", 2, 1, slow=slow):
        assert most == said == 4
        assert places == said_places == 5 + 2


def test_nonfinite_number_stops_the_run_before_the_weights_change(pool, tmp_path):
    for message, same, goes_on in pool.run("cases:not_finite", 2, 2, folder=str(tmp_path / "good")):
        assert "not finite" in message
        assert same
        assert goes_on


def test_layer_arguments_draw_no_random_numbers_of_the_caller():
    """PREPARE runs the embedding side, dropout included, for what comes besides the hidden states."""
    holder = Holder(real_model(family_config("gpt2", embd_pdrop=0.5)))
    compute = Compute(holder.chain, holder.chain.spec, chunk_tokens=8)
    transport: Any = None
    frame = Frame({}, transport, StepInput({0: packed_batch(((9, 7),))}, scale=1.0, seed=0, step=0))
    before = torch.get_rng_state()
    compute.prepare(Action(Op.PREPARE, Lane.COMPUTE, writes=(context(0),), micro_batch=0), frame)
    assert torch.equal(torch.get_rng_state(), before)
    assert compute.held.batches[context(0)].calls


def test_strict_mode_names_messages_out_of_order(pool):
    messages = pool.run_once("cases:mismatched", 2, 1)
    assert any("this rank is at message" in message for message in messages), messages


def test_error_in_a_lane_is_raised_with_its_action_while_others_wait(pool, tmp_path):
    """Other lanes of the rank wait for peers that wait for this rank."""
    first, message, *others = pool.run_once("cases:failing_compute", 2, 2, folder=str(tmp_path))
    assert "the user's loss is broken" in message and "BACKWARD" in message
    assert {first, *others} == {"waited until it was out"}


@pytest.mark.slow
def test_bf16_compute_with_fp32_masters_learns(pool):
    losses = pool.run("cases:low_precision", 2, 2)[0]
    assert losses[-1] < losses[0] - 0.1


def _touch(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def test_lane_keeps_no_reference_to_a_finished_action():
    lane, tensor = CpuLane("test", Failure()), torch.zeros(1)
    gone = weakref.ref(tensor)
    event = lane.submit(partial(_touch, tensor), (), "an action")
    del tensor
    event.wait()
    assert gone() is None
    lane.close()


@pytest.mark.slow
def test_memory_is_constant_from_the_third_step(pool):
    sizes = pool.run("cases:memory_of_steps", 2, 1, steps=6)[0]
    # A leak grows with every step, while a single reading may catch an object that a lane is about to let go.
    assert min(sizes[-3:]) <= min(sizes[2:5])


class RowNormalised(torch.optim.Optimizer):
    """Not element-wise: the step depends on the norm of the whole piece."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (lambda parameters: torch.optim.Adafactor(parameters), "Adafactor"),
        (lambda parameters: torch.optim.Muon(parameters), "2D"),
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS"),
        (lambda parameters: RowNormalised(parameters), "RowNormalised"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_by_name(factory, name):
    with pytest.raises(UserError, match=name):
        check_elementwise(factory)


@pytest.mark.parametrize(
    "factory",
    [
        adamw(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda parameters: torch.optim.NAdam(parameters),
    ],
)
def test_elementwise_optimizers_are_accepted(factory):
    assert check_elementwise(factory)[1] >= 1


def by_dimensions(parameters: Any):
    matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return torch.optim.SGD([{"params": matrices}, {"params": vectors, "weight_decay": 0.5}], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (by_dimensions, r"tawpipe.piece_of\(p\).shape"),
        (lambda parameters: torch.optim.SGD([p for p in parameters if p.ndim >= 2]), r"tawpipe.piece_of\(p\).shape"),
        (lambda parameters: torch.optim.SGD([p.value for p in parameters]), "list of nn.Parameter"),
        (
            lambda parameters: torch.optim.SGD([{"params": parameters, "lr": tawpipe.piece_of(torch.ones(2))}]),
            "piece_of",
        ),
        (lambda parameters: torch.optim.SGD(parameters[:1]), "leaves out lm_head.weight"),
        (lambda parameters: torch.optim.SGD([*parameters, torch.zeros(2)]), "no others"),
        (lambda parameters: parameters, "torch.optim.Optimizer"),
        (torch.optim.SGD([torch.zeros(2)]), "a factory"),
    ],
)
def test_optimizer_factory_that_misreads_its_pieces_is_refused(factory, words):
    pieces = [PlaceOfPiece("model.norm.weight", (1000,), 0), PlaceOfPiece("lm_head.weight", (1000, 3000), 0)]
    with pytest.raises(UserError, match=words):
        check_elementwise(factory, pieces)


def test_optimizer_factory_may_use_whole_parameter_shapes():
    """As a plain loop with the same groups does."""

    def make(parameters, shape):
        decayed, others = [p for p in parameters if len(shape(p)) > 1], [p for p in parameters if len(shape(p)) < 2]
        return torch.optim.SGD(
            [g for g in ({"params": decayed, "weight_decay": 0.5}, {"params": others}) if g["params"]]
        )

    batch = batches(2, 1)[0]
    world = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    for factory, shape in (
        (lambda parameters: torch.optim.SGD(parameters, lr=1.0), None),
        (lambda parameters: make(parameters, lambda p: tawpipe.piece_of(p).shape), lambda p: p.shape),
    ):
        plain = llama(torch.float64)
        pipeline = tawpipe.Pipeline(
            llama(torch.float64),
            optimizer=factory,
            dtype=torch.float64,
            world=world,
            training=tawpipe.TrainingSettings(clip_norm=None),
        )
        pipeline.step(batch)
        optimizer = make(list(plain.parameters()), shape) if shape else torch.optim.SGD(plain.parameters(), lr=1.0)
        logits = plain(batch["input_ids"]).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        optimizer.step()
        pipeline.drain()
        for name, expected in plain.named_parameters():
            assert torch.allclose(pipeline.parameter(name), expected, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]
        pipeline.close()


def test_every_lane_has_its_own_groups():
    from schedules import llama, make

    for strategy in ("tawpipe-spread", "tawpipe-striped", "tawpipe-whole"):
        groups = needed_groups([make(llama(3), 2, 2, 4, strategy=strategy)])
        assert {lane for lane, _ in groups} == {Lane.INTER_W, Lane.GATHER, Lane.REDUCE, Lane.INTER_G}
        assert len(set(groups)) == len(groups)


def test_groups_are_made_and_used_before_the_first_step(pool):
    assert all(pool.run("cases:groups_of_lanes", 2, 2))


@pytest.mark.parametrize("knobs", [{"strategy": "tawpipe-spread"}, {"strategy": "1f1b", "stages": "nodes"}], ids=str)
def test_slow_lane_begins_few_actions_ahead(pool, knobs):
    assert 1 < max(pool.run("cases:begun_ahead", 2, 1, slow="INTER_W", **knobs)) <= MOST_EARLY


def test_lane_inside_a_node_begins_no_action_ahead(pool):
    """Nothing there is begun before what its lane does before it has ended."""
    assert pool.run("cases:begun_ahead", 1, 2, slow="GATHER", strategy="tawpipe-spread") == [1, 1]


def test_ranks_read_weights_concurrently(pool, tmp_path):
    assert all(pool.run("cases:weights_read_together", 2, 1, folder=str(tmp_path)))
