"""Models that would mix the documents of a row: known before anything runs, and given one document after the other.
Their numbers are compared in test_every_family.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from every_family import PACKED, differences, micro_batches, our_step, plain_step
from family_configs import tiny_config
from model_families import family_config, meta_model, real_model
from tawpipe import CheckSettings, Pipeline, TrainingSettings
from tawpipe.errors import UserError
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import Documents
from tawpipe.model.mixers.in_turn import Groups
from tawpipe.model.refuse import ApartError
from tawpipe.plan.cost.profile import measure
from tawpipe.plan.search.plan_file import _block_cost, _cost
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.simulate import BlockCost, Seconds, size_of

WHY = {
    "bloom": (True, "does not use transformers' attention interface"),
    "bart": (True, "counts positions along the row by itself"),
    "deepseek_v4": (True, "its attention has keys that are not those of the row's tokens"),
    "llama4_text": (False, "layer 3 counts positions along the row by itself"),
    "xlstm": (False, "carry a state in a way that is not known"),
}


@pytest.mark.parametrize("family", WHY)
def test_models_that_mix_documents_are_detected_without_weights(family: str):
    own_code, why = WHY[family]
    chain = Chain(meta_model(tiny_config(family)))
    assert why in chain.in_turn and chain.own_code == own_code
    with pytest.raises(UserError, match="rows cannot be cut"):
        chain.find_tokens()


class ByPlace(LlamaAttention):
    """Multiplies by a factor that grows with a token's place."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return super().forward(hidden_states * (1 + places / 4).floor()[:, None], **kwargs)


class Learned(LlamaDecoderLayer):
    """Adds what it has learned of a token's place."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        places: Any = self.mlp.places
        return super().forward(hidden_states + places[: hidden_states.shape[1]], **kwargs)


class Summed(LlamaMLP):
    """Divides by the number of tokens so far."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / torch.ones_like(x[..., :1]).cumsum(1)


class Beyond(LlamaMLP):
    """Doubles what comes after some tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.where(torch.arange(x.shape[1]) >= 3, 2.0, 1.0)[:, None]


class Masked(LlamaMLP):
    """Gives nothing for the first tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill((torch.arange(x.shape[1]) < 2)[:, None], 0.0)


class Kept(LlamaMLP):
    """Keeps factors of places in an attribute that is no buffer."""

    def forward(self, x: Tensor) -> Tensor:
        factors: Any = self.factors
        return super().forward(x) * factors[: x.shape[1], None]


class AfterValues(ByPlace):
    """Looks at values before it counts, which nothing on the meta device can do."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states * (1 + float(hidden_states.detach().abs().sum()) * 0), **kwargs)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ByPlace, LlamaAttention),
        (Learned, LlamaDecoderLayer),
        (Summed, LlamaMLP),
        (Beyond, LlamaMLP),
        (Masked, LlamaMLP),
        (Kept, LlamaMLP),
    ],
)
def test_layers_that_count_positions_compute_documents_in_turn(kind: type[nn.Module], base: type[nn.Module]):
    model = real_model(family_config("llama"))
    model.set_attn_implementation("sdpa")
    for module in list(model.modules()):
        if type(module) is base:
            module.__class__ = kind
    for layer in model.model.layers if kind is Learned else ():
        layer.mlp.places = nn.Parameter(torch.randn(30, 32, dtype=torch.float64))
    for layer in model.model.layers if kind is Kept else ():
        layer.mlp.factors = torch.rand(30, dtype=torch.float64)
    plain = plain_step(model, micro_batches(PACKED))
    ours = our_step(deepcopy(model), PACKED)
    assert not differences(ours, plain, 1e-6)  # norms compute in fp32
    with pytest.raises(UserError, match="because layer 0 counts positions along the row by itself"):
        our_step(model, PACKED, sequence_chunk=12)


def test_layers_that_count_positions_only_by_values_are_refused():
    model = meta_model(family_config("llama"))
    for layer in model.model.layers:
        layer.self_attn.__class__ = AfterValues
    with pytest.raises(UserError, match=r"layer 0 counts positions along the row by itself, as its values show"):
        Pipeline(model)


def test_model_that_separates_documents_does_not_compute_them_in_turn():
    chain = Chain(meta_model(family_config("gemma2")))
    assert not chain.in_turn and not chain.own_code


def test_groups_of_documents_of_one_length_rejoin_in_order():
    rows = torch.arange(2 * 12 * 3).view(2, 12, 3)
    lengths = 4, 6, 2, 6, 2, 4
    groups = Groups.by(lengths, lengths)
    assert groups.numbers == ((0, 5), (1, 3), (2, 4))
    parts = groups.split(rows)
    assert [tuple(part.shape) for part in parts] == [(2, 4, 3), (2, 6, 3), (2, 2, 3)]
    assert torch.equal(parts[1][1], rows[1, :6])
    assert torch.equal(groups.join(parts, rows.shape), rows)


@pytest.mark.parametrize(("lengths", "groups"), [((3, 5, 3), [[0, 2], [1]]), ((1, 9, 2), [[0, 2], [1]])])
def test_groups_of_documents_of_similar_lengths_are_padded(lengths, groups):
    rows = torch.arange(1.0, sum(lengths) + 1)[None]
    similar = Groups.by([length < 5 for length in lengths], lengths)
    assert [list(numbers) for numbers in similar.numbers] == groups
    parts = similar.split(rows)
    assert parts[0].shape == (2, max(lengths[0], lengths[2]))
    assert torch.equal(similar.join(parts, rows.shape), rows)


@pytest.fixture(scope="module")
def bart() -> Iterator[Pipeline]:
    with closing(
        Pipeline(real_model(tiny_config("bart"), torch.float32), checks=CheckSettings(check="never"))
    ) as pipeline:
        yield pipeline


@pytest.mark.parametrize("lengths", [(6, 6), (1, 11), (5, 1, 6), (1,) * 12])
def test_in_turn_layers_are_called_once_per_document_length(bart: Pipeline, lengths: tuple[int, ...], monkeypatch):
    called: list[int] = []
    monkeypatch.setattr(
        bart.chain.layers[0], "forward", lambda hidden, *_, **__: called.append(hidden.shape[1]) or hidden
    )
    ids = torch.randint(3, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch.of_documents(ids, ids, lengths)
    hidden = torch.randn(1, 12, bart.chain.width)
    calls = bart.chain.calls(batch)
    assert torch.equal(calls[0](bart.chain.layers[0], hidden), hidden)
    assert called == list(dict.fromkeys(lengths))


def test_model_that_counts_positions_refuses_documents_not_starting_at_0(bart: Pipeline):
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    places = torch.arange(12).remainder(6).expand(2, 12)
    bart.step({"input_ids": ids, "labels": ids, "position_ids": places})
    with pytest.raises(UserError, match="documents that begin at position 0: the model counts positions"):
        bart.step({"input_ids": ids, "labels": ids, "position_ids": torch.arange(1, 13).expand(2, 12)})
    with pytest.raises(UserError, match=r"sequence_chunk: got 4; unset: rows of BartForCausalLM cannot be cut"):
        Pipeline(
            real_model(tiny_config("bart"), torch.float32),
            checks=CheckSettings(check="never"),
            schedule=ScheduleSettings(sequence_chunk=4),
        )


def test_documents_longer_than_a_hidden_position_table_are_refused(bart: Pipeline):
    ids = torch.full((1, 129), 7)
    with pytest.raises(UserError, match="position 128'; below 128"):
        bart.step({"input_ids": ids, "labels": ids})
    places = torch.arange(129).remainder(128)[None]  # the head runs on more positions than the table has
    assert math.isfinite(bart.step({"input_ids": ids, "labels": ids, "position_ids": places}).loss)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon"])
def test_model_check_passes_for_in_turn_families(family: str):
    pipeline = Pipeline(real_model(tiny_config(family), torch.float32), checks=CheckSettings(check="always"))
    assert "layers checked" in pipeline.checked
    pipeline.close()


def test_padded_micro_batch_takes_rows_of_several_lengths():
    parts = [MicroBatch.of_documents(torch.arange(n)[None], torch.arange(n)[None], [n]) for n in (5, 3, 5)]
    batch = MicroBatch.padded(parts)
    assert batch.input_ids.shape == (3, 5) and batch.lengths == (5, 3, 2, 5)
    assert batch.tokens == sum(part.tokens for part in parts)
    assert torch.equal(batch.labels[1], torch.tensor([1, 2, -100, -100, -100]))


def test_profile_charges_in_turn_layers_per_document_length():
    chain = Chain(meta_model(tiny_config("bloom")))
    profile = measure(chain, dtype=torch.float32, device=torch.device("cpu"), tokens=64, now=count(1.0).__next__)
    embedding, layer, *_ = profile.blocks
    assert layer.forward.in_turn and layer.backward.in_turn and not embedding.forward.in_turn
    layer = Seconds(fixed=2.0, per_token=1.0, in_turn=True)
    assert layer.of(size_of([5, 3, 5])) == 2 * 2 + 13 and replace(layer, in_turn=False).of(size_of([5, 3, 5])) == 15
    cost = BlockCost(layer, layer)
    assert _block_cost(_cost(cost), None, 0.0) == cost  # as a plan's file has it
    work = replace(profile, blocks=(BlockCost(), cost, cost, BlockCost())).work
    assert work.of(7) == 2 * 2 * (2.0 + 7)


def test_packed_attention_refuses_indices_and_foreign_keys():
    """Indices of the keys that count, and keys that stand for several tokens, belong to sparse attention."""
    states = torch.ones(1, 2, 6, 4)
    mask = PackedMask(Documents.of((6,), (1, 6), torch.device("cpu")), None)
    with pytest.raises(ApartError, match="is given indices"):
        packed_attention(torch.nn.Identity(), states, states, states, mask, indices=torch.zeros(1))
    with pytest.raises(ApartError, match="keys that are not those of the row's tokens"):
        packed_attention(torch.nn.Identity(), states, states[:, :, :3], states[:, :, :3], mask)


def test_documents_are_cut_into_attention_chunks_from_their_start():
    documents = Documents.of((7, 3, 2, 8), (2, 10), torch.device("cpu")).cut(3)
    assert [length for _, _, length in documents.spans] == [3, 3, 1, 3, 2, 3, 3, 2]
    assert documents.max_length == 3 and documents.spans[5] == (1, 2, 3)
    assert documents.cut(3) is documents


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", "num_mtp_layers"), ("mellum", "num_mtp_layers")])
def test_multi_token_prediction_heads_are_refused_or_not_exported(family: str, key: str, tmp_path):
    config = tiny_config(family)
    setattr(config, key, 1)
    if hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    with pytest.raises(UserError, match=rf"{key}=1\) are neither trained nor exported; --without-mtp"):
        Pipeline(real_model(config, torch.float32), checks=CheckSettings(check="never"))
    pipeline = Pipeline(
        real_model(config, torch.float32),
        checks=CheckSettings(check="never"),
        training=TrainingSettings(without_mtp=True),
    )
    folder = pipeline.export(tmp_path / "model")
    pipeline.close()
    assert getattr(AutoConfig.from_pretrained(folder), key) == 0
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == config.num_hidden_layers
