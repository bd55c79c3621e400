"""Models that mix the documents of a row: known before anything runs, right where a row holds one document, and
otherwise refused with that advice. Their numbers are compared in test_every_family.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from family_configs import tiny_config
from model_families import family_config, meta_model, real_model
from tawpipe import Pipeline
from tawpipe.errors import UserError
from tawpipe.model.attention import PackedMask, packed_attention
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import Documents
from tawpipe.model.refuse import ApartError
from tawpipe.schedule.settings import ScheduleSettings

WHY = {
    "qwen3_next": (False, "linear_attention carry a state"),
    "mamba": (False, "linear_attention carry a state"),
    "bloom": (True, "does not use transformers' attention interface"),
    "bart": (True, "counts positions along the row by itself"),
    "deepseek_v4": (True, "heavily_compressed_attention carry a state"),
}


@pytest.mark.parametrize("family", WHY)
def test_what_mixes_documents_is_known_without_values(family: str):
    own_code, why = WHY[family]
    chain = Chain(meta_model(tiny_config(family)))
    assert why in chain.alone and chain.own_code == own_code
    with pytest.raises(UserError, match="rows cannot be cut"):
        chain.find_tokens()


def test_what_keeps_documents_apart_has_no_reason_to_be_alone():
    chain = Chain(meta_model(family_config("gemma2")))
    assert not chain.alone and not chain.own_code


def conv() -> Any:
    return real_model(tiny_config("lfm2"), torch.float32)


def rows() -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def test_a_batch_of_several_documents_in_a_row_is_refused_and_padding_is_none():
    pipeline = Pipeline(conv(), check="never")
    pipeline.step(rows())
    places = torch.arange(12).remainder(6).expand(2, 12)
    with pytest.raises(UserError, match="one document in each row, with padding behind it: layers of type conv"):
        pipeline.step(rows() | {"position_ids": places})
    with pytest.raises(UserError, match="rows that begin at position 0"):
        pipeline.step(rows() | {"position_ids": torch.arange(1, 13).expand(2, 12)})
    pipeline.close()
    with pytest.raises(UserError, match=r"sequence_chunk: got 4; unset: rows of Lfm2ForCausalLM cannot be cut"):
        Pipeline(conv(), check="never", schedule=ScheduleSettings(sequence_chunk=4))


def test_rows_longer_than_a_table_of_positions_are_refused_although_the_model_counts_by_itself():
    pipeline = Pipeline(real_model(tiny_config("bart"), torch.float32), check="never")
    ids = torch.full((1, 129), 7)
    with pytest.raises(UserError, match="position 128'; below 128"):
        pipeline.step({"input_ids": ids, "labels": ids})
    pipeline.close()


@pytest.mark.parametrize("family", ["nemotron_h", "falcon"])
def test_the_check_compares_them_with_their_own_forward_pass(family: str):
    pipeline = Pipeline(real_model(tiny_config(family), torch.float32), check="always")
    assert "layers checked" in pipeline.checked
    pipeline.close()


def test_rows_of_several_lengths_make_a_padded_micro_batch():
    parts = [MicroBatch.of_documents(torch.arange(n)[None], torch.arange(n)[None], [n]) for n in (5, 3, 5)]
    batch = MicroBatch.padded(parts)
    assert batch.input_ids.shape == (3, 5) and batch.lengths == (5, 3, 2, 5) and batch.alone
    assert batch.tokens == sum(part.tokens for part in parts)
    assert torch.equal(batch.labels[1], torch.tensor([1, 2, -100, -100, -100]))
    assert not MicroBatch.of_documents(torch.ones(1, 6, dtype=torch.long), torch.ones(1, 6).long(), [3, 3]).alone


def test_attention_refuses_what_it_would_leave_out():
    """Indices of the keys that count, and keys that stand for several tokens, belong to sparse attention."""
    states = torch.ones(1, 2, 6, 4)
    mask = PackedMask(Documents.of((6,), (1, 6), torch.device("cpu")), None)
    with pytest.raises(ApartError, match="is given indices"):
        packed_attention(torch.nn.Identity(), states, states, states, mask, indices=torch.zeros(1))
    with pytest.raises(ApartError, match="keys that are not those of the row's tokens"):
        packed_attention(torch.nn.Identity(), states, states[:, :, :3], states[:, :, :3], mask)


def test_chunks_of_attention_begin_with_every_document():
    documents = Documents.of((7, 3, 2, 8), (2, 10), torch.device("cpu")).cut(3)
    assert [length for _, _, length in documents.spans] == [3, 3, 1, 3, 2, 3, 3, 2]
    assert documents.max_length == 3 and documents.spans[5] == (1, 2, 3)
    assert documents.cut(3) is documents


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", "num_mtp_layers"), ("mellum", "num_mtp_layers")])
def test_multi_token_prediction_heads_are_refused_or_left_out_of_what_is_exported(family: str, key: str, tmp_path):
    config = tiny_config(family)
    setattr(config, key, 1)
    if hasattr(config, "mtp_layer_types"):
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    with pytest.raises(UserError, match=rf"{key}=1\) are neither trained nor exported; --without-mtp"):
        Pipeline(real_model(config, torch.float32), check="never")
    pipeline = Pipeline(real_model(config, torch.float32), check="never", without_mtp=True)
    folder = pipeline.export(tmp_path / "model")
    pipeline.close()
    assert getattr(AutoConfig.from_pretrained(folder), key) == 0
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == config.num_hidden_layers
