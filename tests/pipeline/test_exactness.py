"""The same numbers as one process: losses, gradients and weights against a plain PyTorch loop."""

from __future__ import annotations

import pytest
import torch

from cases import WITH_HOST, weights_after
from states import ALONE, stepped
from tawpipe.errors import RunError, UserError
from tawpipe.schedule.pipelines.work import Order

STRATEGIES = ["tawpipe-spread", "tawpipe-striped", "tawpipe-whole", "flat", "hsdp"]
LIMIT = {"float64": 1e-10, "float32": 1e-5}


def setting(nodes, local, strategy, rounds, per_visit, tied, dtype):
    """Rows such that the step has the rounds and the last ranks have fewer micro-batches than the first."""
    world = nodes * local
    rows = world * per_visit * rounds - (1 if world > 1 else 0)
    return {
        "dtype": dtype,
        "tied": tied,
        "rows": rows,
        "strategy": strategy,
        "micro_batches_per_visit": per_visit,
    }


def check(pool, nodes, local, settings):
    for rank_result in pool.run("cases:exact", nodes, local, settings=settings):
        for difference, chosen in zip(rank_result, settings, strict=True):
            assert difference < LIMIT[chosen["dtype"]], chosen


def test_strategies_match_one_process(pool):
    covering = [
        ("tawpipe-spread", 3, 1, True, "float64"),
        ("tawpipe-spread", 1, 2, False, "float32"),
        ("tawpipe-striped", 1, 2, False, "float64"),
        ("tawpipe-whole", 2, 2, True, "float64"),
        ("flat", 1, 2, True, "float64"),
    ]
    check(pool, 2, 2, [setting(2, 2, *row) | {"steps": 2 + (row == covering[0])} for row in covering])


SCOPES = [
    ("tawpipe-spread", "visit", "all"),
    ("tawpipe-step", None, None),
    ("tawpipe-whole", "step", "all"),
    ("tawpipe-striped", "step", 1),
    ("tawpipe-striped", "step", "all"),
    ("hsdp", "visit", 0),
    ("tawpipe-spread", "visit", 2),
]


@pytest.mark.parametrize(
    ("nodes", "local", "scopes"),
    [(2, 2, SCOPES[:3]), pytest.param(3, 2, SCOPES[3:], marks=pytest.mark.slow)],
    ids=["2-2", "3-2"],
)
def test_gradient_scopes_and_step_cache_match_one_process(pool, nodes, local, scopes):
    settings = [
        setting(nodes, local, strategy, nodes, 1, True, "float64")
        | {"gradients_scope": gradients, "step_cache": cached, "steps": 3}
        for strategy, gradients, cached in scopes
    ]
    check(pool, nodes, local, settings)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sequence_chunks_match_one_process(pool, first):
    settings = [
        setting(2, 2, strategy, rounds, per_visit, tied, "float64") | {"sequence_chunk": size} | more
        for strategy, rounds, per_visit, tied, size, more in [
            ("tawpipe-spread", 2, 1, True, 7, {}),
            ("tawpipe-whole", 1, 1, False, 5, {"offloaded_layers": 3}),
            ("tawpipe-striped", 1, 2, False, 6, {"offloaded_layers": 5, "recompute": "selective"}),
            ("hsdp", 2, 1, True, 19, {"offloaded_layers": 2, "recompute": "selective:2,full", "offload_dir": "/tmp"}),
        ]
    ]
    check(pool, 2, 2, settings[first::2])


@pytest.mark.parametrize(
    ("nodes", "local", "every"),
    [
        (2, 2, ("1/1/1", "1/4/4", "2/1/2", "4/2/4")),
        pytest.param(4, 1, ("2/2/4", "1/2/2", "1/1/2", "2/4/4"), marks=pytest.mark.slow),
    ],
)
def test_groups_strategy_matches_one_process(pool, nodes, local, every):
    """Weights kept, gradients summed and state cut over part of a node, a node, several nodes; copies of all sizes."""
    settings = [
        setting(nodes, local, "tawpipe-groups", rounds, 1, rounds == 2, "float64") | {"groups": groups}
        for rounds, groups in zip((1, 2, 2, 1), every, strict=True)
    ]
    settings[0] |= {"sequence_chunk": 7, "evaluate_first": True}
    settings[1] |= {"gradients_scope": "visit", "recompute": "none"}
    check(pool, nodes, local, settings)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dealing_by_speed_matches_one_process(pool, first):
    """Ranks with more and with fewer rows than others, in every round, or in their stages; some with none."""
    settings = [
        setting(2, 2, strategy, rounds, per_visit, rounds == 2, "float64") | {"device_speeds": speeds} | more
        for strategy, rounds, per_visit, speeds, more in [
            ("tawpipe-spread", 2, 2, "2x1,2x0.5", {"evaluate_first": True}),
            ("tawpipe-step", 3, 1, "1,0.5,1,0.2", {"offloaded_layers": 2}),
            ("tawpipe-whole", 1, 2, "1,0.05,1,1", {}),
            ("hsdp", 2, 1, "0.5,1,1,1", {"delays": 0.002}),
            ("1f1b", 2, 1, "2,1,1,1", {"stages": "nodes"}),
            ("zero-bubble", 2, 1, "2x1,2x0.5", {"stages": "locals", "evaluate_first": True}),
        ]
    ]
    check(pool, 2, 2, settings[first::2])


@pytest.mark.slow
def test_homes_on_any_node_match_one_process(pool):
    """Of an embedding, layers, a norm and a head: neighbours on one node, and a node, and processes, with nothing."""
    settings = [
        setting(3, 2, strategy, rounds, 1, False, "float64") | {"homes": homes}
        for strategy, rounds, homes in [
            ("tawpipe-striped", 2, "1,1,0,1,0,0,1"),
            ("tawpipe-whole", 3, "5,5,0,2,5,0,4"),
        ]
    ]
    check(pool, 3, 2, settings)


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)], ids=lambda n: str(n))
def test_weipipe_ring_matches_one_process(pool, nodes, local):
    """WeiPipe needs a layer for every process."""
    check(
        pool, nodes, local, [setting(nodes, local, "weipipe", *row, "float64") for row in [(1, 2, True), (3, 1, False)]]
    )


@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_recompute_and_offloading_settings_match_one_process(pool, first):
    settings = [
        setting(2, 2, strategy, rounds, 2, True, "float64") | {"recompute": recompute, "offloaded_layers": offloaded}
        for strategy, rounds, recompute, offloaded in [
            ("tawpipe-spread", 1, "selective", 0),
            ("tawpipe-spread", 2, "none:1,selective:2,none:1,full", 4),
            ("tawpipe-striped", 1, "full", 5),
            ("tawpipe-whole", 1, "none:2,selective:1,full", 2),
        ]
    ]
    check(pool, 2, 2, settings[first::2])


def test_kept_graphs_change_no_bit(pool):
    """With dropout, too: what is not computed again has drawn the same random numbers."""
    knobs = {"dropout": 0.3, "rows": 5, "strategy": "tawpipe-spread"}
    plain, (losses, weights) = (
        pool.run("cases:weights_after", 2, 2, recompute=recompute, **knobs)[0] for recompute in ("full", "none")
    )
    assert losses == plain[0]
    assert all(torch.equal(weights[name], value) for name, value in plain[1].items())
    with pytest.raises(UserError, match="selective'; full or none: LlamaForCausalLM computes attention by no kernel"):
        weights_after(ALONE, recompute="selective", **knobs)


_LAYERS = "0/0/0,5x10/20/10,0/9/0"
REORDERED = {"reorder": WITH_HOST, "steps": 3}
PIPELINES = [
    {"strategy": "1f1b", "rows": 7, "stages": "world"},
    {"strategy": "1f1b", "rows": 5, "stages": "nodes", "evaluate_first": True},
    {"strategy": "1f1b", "rows": 1, "stages": "nodes"},
    {"strategy": "1f1b", "rows": 6, "stages": "world:0,1,4,6@0,1,2,3", "recompute": "none", "tied": False},
    {"strategy": "1f1b", "rows": 6, "recompute": "selective:2,full", "clip_norm": None, "early_updates": True},
    {"strategy": "interleaved-1f1b", "rows": 8, "stages": "nodes:0,2,4,5@0,1,0,1", "delays": 0.003},
    {"strategy": "1f1b", "rows": 8, "stages": "locals", "delays": 0.003, "dtype": "float32"},
    {"strategy": "zero-bubble", "rows": 6, "stages": "nodes", "delays": 0.003},
    {"strategy": "zero-bubble", "rows": 5, "stages": "locals", "recompute": "none", "tied": False},
    {"strategy": "solved", "rows": 5, "stages": "world", "block_times": f"{_LAYERS};memory=8;host=3", "delays": 0.003},
    {"strategy": "generated", "rows": 6, "stages": "world:0,2,3,4,6@0,1,2,3,0", "evaluate_first": True},
    {
        "strategy": "solved",
        "rows": 6,
        "stages": "nodes",
        "pipeline_order": WITH_HOST,
        "recompute": "none:1,selective",
        "evaluate_first": True,
    },
    {"strategy": "solved", "rows": 6, "stages": "nodes", **REORDERED, "recompute": "none", "delays": 0.003},
]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1, 2, 3))])
def test_activation_pipelines_match_one_process(pool, first):
    """Side by side with uneven shares or none, uneven stages, tied ends, kept graphs, evaluations in between."""
    check(pool, 2, 2, [{"dtype": "float64", "tied": True} | case for case in PIPELINES[first::4]])


def test_offloaded_kept_graphs_change_no_bit_where_weights_travel(pool):
    knobs = {
        "strategy": "tawpipe-spread",
        "rows": 4,
        "micro_batches_per_visit": 2,
        "recompute": "none:3,selective:1,full",
    }
    plain, (losses, weights) = (
        pool.run("cases:weights_after", 2, 1, **knobs, **more)[0]
        for more in ({}, {"offloaded_layers": 5, "delays": 0.003})
    )
    assert losses == plain[0]
    assert all(torch.equal(weights[name], value) for name, value in plain[1].items())


def test_host_memory_in_a_solved_order_changes_no_bit(pool):
    """Kept graphs, attention's results and inputs, in one order without them, and with them and delays."""
    knobs = {"strategy": "solved", "stages": "nodes", "rows": 3, "block_times": f"{_LAYERS};host=1"}
    order = Order.parse(WITH_HOST)
    on_device = str(Order(order.compute))
    knobs |= {"recompute": "selective:1,none:1,full"}
    plain, (losses, weights) = (
        pool.run("cases:weights_after", 2, 1, reorder=text, delays=delays, **knobs)[0]
        for text, delays in ((on_device, 0.0), (WITH_HOST, 0.003))
    )
    assert losses == plain[0]
    assert all(torch.equal(weights[name], value) for name, value in plain[1].items())


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.slow)], ids=lambda n: str(n))
def test_early_updates_match_one_process(pool, nodes, local):
    settings = [
        setting(nodes, local, strategy, rounds, 1, tied, "float64")
        | {"clip_norm": None, "early_updates": True, "gradients_scope": scope}
        for strategy, rounds, tied, scope in [
            ("tawpipe-spread", 3, True, "visit"),
            ("tawpipe-whole", 1, True, "visit"),
            ("hsdp", 2, False, "step"),
            ("tawpipe-spread", 2, False, "step"),
            ("tawpipe-striped", 2, False, "visit"),
        ]
    ]
    check(pool, nodes, local, settings[:3] if nodes == 2 else settings[2:])


@pytest.mark.slow
def test_compiled_layers_match_one_process(pool):
    """Of one process first, in whose cache two then find what both would compile."""
    for nodes in (1, 2):
        chosen = setting(nodes, 1, "tawpipe-spread", 2, 2, True, "float64")
        check(pool, nodes, 1, [chosen | {"recompute": "selective:2,full", "compile_layers": True}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "local", "strategy"),
    [
        *((*shape, strategy) for shape in ((1, 1), (2, 2), (3, 2)) for strategy in STRATEGIES),
        *((1, 4, strategy) for strategy in ("tawpipe-spread", "hsdp")),
        *((4, 1, strategy) for strategy in ("tawpipe-striped", "tawpipe-whole", "flat")),
    ],
    ids=lambda value: str(value),
)
def test_grid_of_strategies_and_topologies_matches_one_process(pool, nodes, local, strategy):
    """In fp64, which shows what fp32 hides: at one topology every strategy with every choice, and every pair of choices
    with some strategy; at the others one of them. In fp32 at that one those that are not tested in it elsewhere.
    """
    pairs = [[(3, 1, True), (1, 2, False)], [(1, 2, True), (3, 1, False)], [(3, 2, True), (1, 1, False)]]
    number = STRATEGIES.index(strategy)
    chosen, full = pairs[number % len(pairs)], (nodes, local) == (2, 2)
    grid = [(*row, "float64") for row in (chosen if full else [chosen[number % 2]])]
    grid += [(3, 1, True, "float32")] if full and strategy in ("tawpipe-striped", "tawpipe-whole", "flat") else []
    settings = [setting(nodes, local, strategy, rounds, k, tied, dtype) for rounds, k, tied, dtype in grid]
    check(pool, nodes, local, settings)


def test_evaluation_between_steps_changes_no_result(pool):
    waiting = setting(2, 2, "tawpipe-spread", 2, 1, True, "float64") | {"evaluate_first": True}
    waiting |= {"offloaded_layers": 4, "micro_batches_per_visit": 2}
    others = [
        waiting | {"strategy": "tawpipe-whole", "recompute": "none:2,selective:1,full"},
        waiting | {"strategy": "hsdp", "recompute": "selective", "sequence_chunk": 6},
    ]
    check(pool, 2, 2, others)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"strategy": "hsdp"}, marks=pytest.mark.slow),
        pytest.param(
            {"strategy": "tawpipe-striped", "offloaded_layers": 3, "recompute": "none:1,selective:1,full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "strategy": "tawpipe-spread",
                "offloaded_layers": 5,
                "micro_batches_per_visit": 1,
                "clip_norm": None,
                "early_updates": True,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "strategy": "tawpipe-whole",
                "sequence_ranks": 2,
                "sequence_chunk": 5,
                "rows": 5,
                "clip_norm": None,
                "early_updates": True,
            },
            marks=pytest.mark.slow,
        ),
        {"strategy": "tawpipe-spread", "sequence_chunk": 6, "offloaded_layers": 5, "recompute": "selective"},
        {"strategy": "1f1b", "stages": "nodes"},
        pytest.param({"strategy": "tawpipe-groups", "groups": "1/2/2"}, marks=pytest.mark.slow),
    ],
    ids=lambda knobs: " ".join(map(str, knobs.values())),
)
def test_delays_in_every_lane_change_no_bit(pool, knobs):
    knobs = {"micro_batches_per_visit": 2, "rows": 11} | knobs
    plain = pool.run("cases:weights_after", 2, 2, **knobs)[0]
    delayed = pool.run("cases:weights_after", 2, 2, delays=0.004, **knobs)[0]
    assert plain[0] == delayed[0]
    assert all(torch.equal(plain[1][name], delayed[1][name]) for name in plain[1])


@pytest.mark.slow
def test_dropout_is_independent_of_the_topology(pool):
    results = [
        pool.run("cases:weights_after", nodes, local, dropout=0.3, rows=5, strategy=strategy)[0]
        for nodes, local, strategy in [
            (1, 1, "tawpipe-spread"),
            (3, 2, "tawpipe-whole"),
            (4, 1, "1f1b"),
        ]
    ]
    for losses, weights in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-10)
        for name, value in weights.items():
            assert torch.dist(value, results[0][1][name]) <= 1e-10 * results[0][1][name].norm()


def test_ranks_without_rows_take_part_and_match_one_process(pool):
    assert max(pool.run("cases:rank_without_rows", 2, 2)) < LIMIT["float64"]


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (3, 1), (2, 3)])
def test_every_row_is_computed_once(pool, nodes, local):
    shares = pool.run("cases:packed_rows", nodes, local)
    assert [row for own in shares for row in own] == list(range(7))


def test_batches_that_differ_between_ranks_are_reported_in_their_step(pool):
    told = {words for rank in pool.run("cases:batches_that_differ", 1, 2) for words in rank}
    assert len(told) == 1 and "different ones on different ranks" in told.pop()


def test_differing_copies_of_a_unit_are_named():
    pipeline = stepped()
    pipeline.check_copies()
    unit = next(iter(pipeline.storage.master))
    pipeline.storage.compute_copy[unit] = pipeline.storage.compute_copy[unit].clone() + 1
    with pytest.raises(RunError, match=f"unit {unit}"):
        pipeline.check_copies()
    pipeline.close()
