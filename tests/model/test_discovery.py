"""A model is followed once, and called once: what it uses and what it changes is seen, before there are weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from family_configs import tiny_config
from model_families import LAYERS, family_config, meta_model
from tawpipe.errors import UserError
from tawpipe.model.buffers import materialize_buffers, owners, persistent_buffers, poison, poisoned
from tawpipe.model.discovery.discovery import discover, embedding_width, kind_of
from tawpipe.model.discovery.first_call import ValuesBefore, first_call
from tawpipe.model.discovery.watch import Counting, FollowedWeights, Watch, WatchedFeeder, WatchedRecorder
from tawpipe.model.shapes import head_size, num_heads, setting_of
from tawpipe.model.stubs import Feed, LayerCall, LayersReached, Tape

# the whole model


@pytest.mark.parametrize("tied", [False, True])
def test_discover_finds_the_blocks_of_every_parameter(tied: bool) -> None:
    model = meta_model(family_config("llama", tied=tied))
    found = discover(model, alone=True)
    assert (found.path, len(found.layers), found.width) == ("model.layers", LAYERS, embedding_width(model))
    assert set(found.uses) == {name for name, _ in model.named_parameters()}
    ends = (0, LAYERS + 1) if tied else (0,)
    assert found.uses["model.embed_tokens.weight"] == ends and found.uses["model.norm.weight"] == (LAYERS + 1,)
    for index in range(LAYERS):
        assert found.uses[f"model.layers.{index}.mlp.up_proj.weight"] == (index + 1,)
    assert not found.calls_need_weights and not found.embedding_backward_reads_weights


def test_unused_parameter_is_refused_unless_frozen() -> None:
    model = meta_model(family_config("llama"))
    model.model.spare = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match=r"that no block of the chain uses: model\.spare; freeze them"):
        discover(model, alone=True)
    model.model.spare.requires_grad_(False)
    assert discover(model, alone=True).uses["model.spare"] == (LAYERS + 1,)


def test_layers_not_called_in_sequence_are_refused() -> None:
    model = meta_model(family_config("llama"))
    model.config.num_hidden_layers = LAYERS + 1
    with pytest.raises(UserError, match=f"expected {LAYERS + 1} layers that are called one after the other"):
        discover(model, alone=True)


def test_layers_are_of_one_kind_unless_a_module_or_hook_differs() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
    layers[2][1] = nn.GELU()
    assert kind_of(layers[0], 0) == kind_of(layers[1], 1) != kind_of(layers[2], 2)
    layers[1][0].register_forward_hook(lambda *_: None)
    assert kind_of(layers[0], 0) != kind_of(layers[1], 1)
    first, *_, last = meta_model(tiny_config("llama4_text")).model.layers  # of the same modules, without rotation
    assert kind_of(first.self_attn, 0) != kind_of(last.self_attn, 3)


# watching


def test_watch_records_parameter_uses_per_phase_but_no_dtype_reads() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    watch, x = Watch(model), torch.ones(1, 2)
    with watch:
        model["a"](x)  # in no phase
        watch.begin("embedding", {"position_ids": torch.zeros(1, 1)})
        model["a"](x.to(model["b"].weight.dtype))
        watch.phase = "head"
        torch.mm(x, model["b"].weight)
    assert watch.used == {"embedding": {"a.weight", "a.bias"}, "head": {"b.weight"}}


def test_watch_names_what_the_head_reads_from_before_the_layers() -> None:
    watch = Watch(nn.Linear(2, 2))
    inputs = {"input_ids": torch.ones(2), "position_ids": torch.zeros(2)}
    with watch:
        watch.begin("before", inputs)
        doubled = inputs["input_ids"] * 2
        watch.phase = "head"
        torch.add(torch.ones(2), torch.zeros(2))
        assert not watch.read_by_head
        torch.add(doubled, inputs["input_ids"])
    assert watch.read_by_head == {"input_ids", "a result of mul"}


def test_watch_finds_position_tables() -> None:
    table, watch = nn.Embedding(20, 2, padding_idx=1), Watch(nn.Linear(1, 1))
    positions = torch.arange(7)[None]
    with watch:
        watch.begin("embedding", {"position_ids": positions})
        table(positions + 2)
    assert watch.tables == [(20, 1)]


TABLE = torch.ones(20, 2)
PLACES: dict[str, Callable[[Tensor], Any]] = {
    "a factor": lambda x: x * (torch.arange(7) + 1.0).log()[:, None],
    "a sum of ones": lambda x: x * torch.ones_like(x).cumsum(0),
    "a sum of what is no padding": lambda x: x + TABLE[(x[:, 0] != 0).cumsum(0)],
    "a table's beginning": lambda x: x + TABLE[:7],
    "a table's rows": lambda x: x + nn.functional.embedding(torch.arange(7), TABLE),
    "a list": lambda x: x * torch.tensor([*range(7)])[:, None],
    "fractions": lambda x: x.add_(torch.linspace(0, 1, 7)[:, None]),
}
NO_PLACES: dict[str, Callable[[Tensor], Any]] = {
    "an index of tokens": lambda x: x[torch.arange(7)] + x.gather(0, torch.arange(7)[:, None].expand(7, 2)),
    "where tokens go": lambda x: torch.zeros(7, 2).index_add(0, torch.arange(7), x),
    "a state": lambda x: x.cumsum(0),
    "frequencies": lambda x: x * torch.arange(0, 4, 2)[None],
    "another table": lambda x: x + TABLE[:1],
    "a mask": lambda x: (x @ x.T).masked_fill(torch.arange(7)[:, None] < torch.arange(7), -1.0),
    "a table's beginning, by positions that are given": lambda x: x + TABLE[:7][x[:, 0].long()],
    "nothing": lambda x: torch.arange(7) * 1.0,
}


@pytest.mark.parametrize("what", [*PLACES, *NO_PLACES])
def test_counting_tells_row_positions_from_other_counts(what: str) -> None:
    x = torch.rand(7, 2)
    counting = Counting([TABLE])
    counting.give(x)
    with counting:
        (PLACES | NO_PLACES)[what](x)
    assert counting.has_counted is (what in PLACES)


def test_counting_leaves_out_the_given_modules() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(7)[:, None]

    inside, counting, x = Counts(), Counting([]), torch.rand(7, 2)
    counting.give(x)
    with counting.leaving_out([inside]), counting:
        inside(x)
    assert not counting.has_counted
    with counting:
        inside(x)
    assert counting.has_counted


def test_weights_saved_by_autograd_are_found_even_as_a_copy() -> None:
    model = nn.Linear(2, 2)
    for compute, saved in (
        (lambda x: x * model.weight.float(), True),
        (lambda x: x * (model.weight * 1), True),
        (lambda x: x + model.weight, False),
        (lambda x: (x * 3) @ torch.ones(2, 2), False),
    ):
        followed = FollowedWeights(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(followed.pack, lambda tensor: tensor)
        x = torch.ones(2, 2, requires_grad=True)
        with hooks, followed:
            out = compute(x)
        assert followed.weights_saved is saved
        assert followed.is_derived(out) is not (compute(x).equal(x * 3 @ torch.ones(2, 2)) and not saved)


def test_watched_recorders_and_feeders_set_the_phase_of_the_watch() -> None:
    watch, tape, hidden = Watch(nn.Linear(2, 2)), Tape(0), torch.zeros(1, 2)
    recorders = [WatchedRecorder(nn.Identity(), index, 2, tape, watch) for index in range(2)]
    watch.begin("embedding", {"position_ids": torch.zeros(1)})
    given = recorders[0](hidden)
    assert watch.phase == "between" and given is not hidden
    with pytest.raises(AssertionError, match="changes the hidden states between two layers"):
        recorders[1](hidden)
    with pytest.raises(LayersReached):
        recorders[1](given)
    feeders = [WatchedFeeder(nn.Identity(), index, 2, Feed(0, hidden), watch) for index in range(2)]
    feeders[0](hidden)
    assert watch.phase == "between"
    assert feeders[1](hidden) is hidden and watch.phase == "head"


# the first call


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(2)), how
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("angles", torch.zeros(1), persistent=False)

    def forward(self, hidden: Tensor, shared: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "shared":
                shared.add_(1)
            elif self.how == "parameter":
                self.weight.add_(1)
            elif self.how == "buffer":
                self.count += 1
            elif self.how == "replaced":
                self.count = self.count + 1
            elif self.how == "angles":
                self.angles = torch.ones(1)
            elif self.how == "keeps":
                self.last = hidden
            elif self.how == "input":
                hidden.mul_(2)
            elif self.how == "input without a version":
                hidden.data.mul_(2)
        return hidden * self.weight


def call(how: str) -> tuple[Tensor, bool]:
    shared, hidden = torch.zeros(2), torch.ones(1, 3, 2)
    made = first_call(Layer(how), LayerCall((None, shared), {}), hidden, "layer 0")
    assert torch.equal(hidden, torch.ones(1, 3, 2))  # nobody else's was changed
    return made


def test_in_place_input_changes_are_reported_and_others_refused() -> None:
    assert [call(how)[1] for how in ("", "angles", "input", "input without a version")] == [False, False, True, True]
    for how, words in (
        ("shared", "a tensor in place that other layers are given too"),
        ("parameter", "changes the parameter weight in place"),
        ("buffer", "changes the buffer count"),
        ("replaced", "changes the buffer count"),
        ("keeps", "leaves a tensor in its attribute last"),
    ):
        with pytest.raises(UserError, match=f"layer 0.*{words}"):
            call(how)


def test_held_buffer_values_may_be_checked_repeatedly() -> None:
    layer = Layer("")
    held = ValuesBefore(layer)
    layer(torch.ones(2), torch.zeros(2))
    held.check("layer 0")
    layer.count += 1
    with pytest.raises(UserError, match="count"):
        held.check("layer 0")


# buffers and sizes


def test_poison_is_found_in_every_dtype_except_bool() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8):
        tensor = torch.zeros(3, dtype=dtype)
        assert not poisoned(tensor) and poisoned(poison(tensor.clone()))
        half = poison(tensor.clone())
        half[:2] = 1
        assert poisoned(half)
    assert not poisoned(poison(torch.zeros(2, dtype=torch.bool)))


def test_meta_model_buffers_get_the_values_of_a_real_model() -> None:
    model, real = meta_model(family_config("llama")), None
    assert persistent_buffers(Layer("")) == {"count"} and not persistent_buffers(model)
    assert set(map(type, owners(model).values())) == {type(model), type(model.model)}
    materialize_buffers(model, torch.device("cpu"))
    real = type(model)(model.config)
    found = dict(model.named_buffers())
    assert found and all(torch.equal(found[name], value) for name, value in real.named_buffers())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_meta_buffer_that_the_model_never_sets_is_named() -> None:
    model = meta_model(family_config("llama"))
    model.model.register_buffer("scale", torch.empty(2, device="meta"))
    with pytest.raises(UserError, match=r"buffer model\.scale has no value on the meta device"):
        materialize_buffers(model, torch.device("cpu"))


class Varied:
    """transformers' answer where layers differ."""

    per_layer_config = (SimpleNamespace(num_attention_heads=4), SimpleNamespace(num_attention_heads=6))
    hidden_size = 48

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("differs")


def test_head_count_and_size_default_if_a_config_lacks_them() -> None:
    plain: Any = SimpleNamespace(num_attention_heads=4, hidden_size=32, head_dim=None)
    assert (num_heads(plain), head_size(plain)) == (4, 8)
    plain.head_dim = 16
    assert head_size(plain) == 16
    none: Any = SimpleNamespace(hidden_size=32)
    assert (num_heads(none), head_size(none), setting_of(none, "window")) == (0, 32, None)
    assert (num_heads(Varied()), head_size(Varied())) == (6, 8)
