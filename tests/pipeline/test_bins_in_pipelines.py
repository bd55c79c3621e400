"""Bins of documents as micro-batches of pipelines: the numbers of one process, under every order and layout."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from borders import llama, piped
from schedules import llama as sizes
from tawpipe.dealing.balance import PacksForm
from tawpipe.errors import UserError
from tawpipe.model.attention.chunked import KeyStore
from tawpipe.pipeline.schedules import CUT_KEPT, Schedules
from tawpipe.runtime.compute.sliced import HandedOn
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology

SLOW = pytest.mark.slow
UNEVEN = "0/0/0,10/20/10,3/6/3,6/12/6,2/4/2,4/8/4,1/4/0"
"""Times of the blocks of a model of five layers."""
CASES = [
    ("tied", {"strategy": "interleaved-1f1b", "recompute": "none"}),
    ("tied", {"strategy": "generated", "block_times": UNEVEN}),
    ("nemotron_h", {"strategy": "generated"}),
    ("plain", {"strategy": "zero-bubble", "keep_mib": 1}),
    ("lora", {"strategy": "1f1b", "bin_tokens": 400, "keep_mib": 1}),
]
"""Of whole bins; slices have some beside them, under other orders, of other models and with other graphs kept."""


def check(pool, nodes, local, cases):
    for differences in pool.run("piped_documents:compared", nodes, local, cases=cases):
        assert differences == [[]] * len(cases)


@pytest.mark.parametrize("some", [slice(1), pytest.param(slice(1, None), marks=SLOW)], ids=["quick", "others"])
def test_two_pipeline_stages_of_packs_match_one_process(pool, some):
    check(pool, 2, 1, CASES[some])


@pytest.mark.slow
def test_parallel_pipelines_of_packs_match_one_process(pool):
    """With more stages slices are tested, which have whole bins beside them."""
    names = ("1f1b", "generated", "zero-bubble")
    check(pool, 2, 2, [("tied", {"strategy": name, "stages": "nodes", "bin_tokens": 44}) for name in names])


def test_delays_and_kept_graphs_change_no_bit_of_pipelined_packs(pool):
    knobs = {"strategy": "1f1b", "dropout": 0.3}
    first, again = (
        pool.run("piped_documents:trained", 2, 1, **knobs, **more)[0]
        for more in ({}, {"delays": 0.003, "recompute": "none"})
    )
    assert again[0] == first[0] and all(torch.equal(again[1][name], value) for name, value in first[1].items())


@pytest.mark.slow
def test_pipelined_run_resumes_under_other_strategies_and_topologies(pool, tmp_path):
    losses = pool.run("piped_documents:goes_on", 2, 1, folder=str(tmp_path), strategy="1f1b")[0]
    for nodes, local, knobs in ((1, 2, {"strategy": "tawpipe-spread"}), (3, 1, {"strategy": "generated"})):
        again = pool.run("piped_documents:goes_on", nodes, local, folder=str(tmp_path), **knobs)[0]
        assert again == pytest.approx(losses, rel=1e-10)


def test_pipeline_on_one_device_is_refused():
    with pytest.raises(UserError, match="a pipeline needs several devices"):
        piped(llama(), strategy="1f1b", bin_tokens=32)
    with closing(piped(llama(), bin_tokens=32)) as pipeline:
        assert pipeline.deal([3, 4]).stretch == 0


def test_only_latest_schedules_of_sliced_documents_are_cached():
    world = World(Topology.grid(2, 1), 0, torch.device("cpu"), None)
    schedules = Schedules(ScheduleSettings(strategy="1f1b"), sizes(2), world)
    whole = schedules.of(PacksForm(0, 4), training=True)
    forms = [PacksForm(0, 2 + count, ((count,),)) for count in range(2, CUT_KEPT + 3)]
    first, *_, last = [schedules.of(form, training=False) for form in forms]
    assert schedules.of(forms[-1], training=False) is last and schedules.of(PacksForm(0, 4), training=True) is whole
    assert schedules.of(forms[0], training=False) is not first and len(schedules._kept) == CUT_KEPT + 1


SLICED = {"bin_tokens": 11}
"""Documents of up to 40 tokens are cut, and short ones are beside them."""


@pytest.mark.parametrize("first", [1, pytest.param(0, marks=SLOW), pytest.param(2, marks=SLOW)])
@pytest.mark.slow
def test_document_slices_in_pipelines_match_one_process(pool, first):
    """Quick are other cases than those of whole bins."""
    cases = [
        ("plain", {"strategy": "1f1b"}),
        ("tied", {"strategy": "interleaved-1f1b", "recompute": "none"}),
        ("plain", {"strategy": "zero-bubble", "recompute": "selective"}),
        ("lora", {"strategy": "generated", "block_times": UNEVEN, "bin_tokens": 9}),
        ("frozen", {"strategy": "1f1b"}),
        ("qwen3_moe", {"strategy": "generated", "bin_tokens": 7}),
        ("qwen3_next", {"strategy": "zero-bubble"}),
        ("nemotron_h", {"strategy": "generated"}),
    ]
    check(pool, 2, 1, [(name, SLICED | knobs) for name, knobs in cases[(first + 1) % 3 :: 3]])


@SLOW
@pytest.mark.parametrize("stages", ["nodes", "world"])
def test_document_slices_in_parallel_pipelines_match_one_process(pool, stages):
    names = ("1f1b", "generated")
    check(pool, 2, 2, [("tied", {"strategy": name, "stages": stages} | SLICED) for name in names])


OTHERS = [
    (3, 1, {"strategy": "generated", "bin_tokens": 9}),
    (2, 2, {"strategy": "1f1b", "stages": "nodes", **SLICED}),
    (1, 2, {"strategy": "tawpipe-spread"}),
]


@SLOW
@pytest.mark.parametrize("name", ["tied", "qwen3_next", "lora"])
def test_run_with_slices_resumes_under_other_strategies_and_back(pool, tmp_path, name):
    """With momentum, which comes from the step before."""
    first, *others = ("zero-bubble" if name == "tied" else "1f1b"), *(OTHERS[1:] if name == "tied" else OTHERS[:1])
    slices, whole = str(tmp_path / "slices"), str(tmp_path / "whole")
    losses = pool.run("piped_documents:goes_on", 2, 1, folder=slices, name=name, strategy=first, **SLICED)[0]
    again = [pool.run("piped_documents:goes_on", n, p, folder=slices, name=name, **knobs)[0] for n, p, knobs in others]
    assert pool.run("piped_documents:goes_on", 1, 2, folder=whole, name=name)[0] == pytest.approx(losses, rel=1e-10)
    again.append(pool.run("piped_documents:goes_on", 2, 1, folder=whole, name=name, strategy=first, **SLICED)[0])
    assert all(other == pytest.approx(losses, rel=1e-10) for other in again)


@SLOW
@pytest.mark.parametrize("tokens", [SLICED["bin_tokens"], 44])
def test_parallel_pipelines_of_two_speeds_match_one_process(pool, tokens):
    knobs = {"strategy": "1f1b", "stages": "nodes", "device_speeds": "1,0.5,1,0.5"}
    check(pool, 2, 2, [("plain", {**knobs, "bin_tokens": tokens})])


@pytest.mark.slow
def test_documents_sliced_at_any_place_match_one_process(pool):
    check(pool, 2, 1, [("plain", {"strategy": "1f1b", "bin_tokens": tokens}) for tokens in (5, 13, 39)])


@pytest.mark.slow
def test_delays_change_no_bit_of_sliced_documents_with_dropout(pool):
    knobs = {"strategy": "zero-bubble", "dropout": 0.3, **SLICED}
    first, again = (pool.run("piped_documents:trained", 2, 1, delays=delays, **knobs)[0] for delays in (0.0, 0.003))
    assert again[0] == first[0] and all(torch.equal(again[1][name], value) for name, value in first[1].items())


def test_long_document_is_sliced_only_if_the_model_allows_slices(pool):
    """As one whose layers call attention twice does not."""
    assert pool.run("piped_documents:cut", 2, 1)[0] == [True, False, False]


def test_handed_on_states_are_not_shared_between_documents() -> None:
    one, other = HandedOn(KeyStore(1, 8)), HandedOn(KeyStore(1, 8))
    one.arrived[1] = {}
    assert not other.arrived and not other.behind and one != other
