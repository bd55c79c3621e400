"""The border to the user's script: whatever it does with the model, a batch or a loss ends in the numbers of a plain
process, or in an error that names what is wrong and what would work.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen2MoeConfig, RobertaConfig

from borders import (
    LENGTH,
    ROWS,
    assert_same,
    llama,
    opt,
    packed,
    piped,
    piped_numbers,
    plain_numbers,
    right_or_refused,
    rows_of,
    slow,
    spans_of,
    token_sum,
    weights,
)
from model_families import VOCABULARY, family_config, keep_fp64, real_model
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.pipeline import Pipeline

KEYS = ["input_ids", "labels", "position_ids", "attention_mask"]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def gpt2() -> Any:
    return real_model(family_config("gpt2"))


# What the helper says of a model without any fault


@pytest.mark.parametrize("make", [llama(), gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_plain_model_matches_plain_training(make, recompute):
    assert right_or_refused(make, rows_of(), recompute=recompute) == "right"
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    assert right_or_refused(make, batch, documents=documents, recompute=recompute) == "right"


# Weights read without `drain`


@pytest.mark.parametrize("delay", [None, slow], ids=["quick", "slow"])
def test_parameters_read_right_after_the_loss_are_the_updated_values(delay):
    """In 30 steps, each time of other parameters, beside a pipeline that waits for everything."""
    reading, waiting = (piped(llama(), delay=d, optimizer=None, loss_chunk_tokens=64) for d in (delay, None))
    names, stale = reading.parameter_names, []
    for step in range(30 if delay is None else 8):
        batch, name, what = rows_of(step, rows=1), names[5 * step % len(names)], ("parameter", "gradient")[step % 2]
        loss = reading.step(batch).loss
        read = getattr(reading, what)(name)
        assert loss == waiting.step(batch).loss
        waiting.drain()
        if not torch.equal(read, getattr(waiting, what)(name)):
            stale.append((step, what, name))
    reading.close()
    waiting.close()
    assert not stale


def value_of(pipeline: Pipeline, name: str) -> torch.Tensor:
    value = pipeline.parameter(name)
    assert value is not None
    return value.clone()


def test_parameter_read_early_is_read_again_later(tmp_path):
    """It is read again after ``drain``, after more steps and after ``load``."""
    pipeline, name = piped(llama(), delay=slow), "model.norm.weight"
    pipeline.save(tmp_path / "state")
    seen = [value_of(pipeline, name)]
    for step in range(2):
        assert pipeline.step(rows_of(step)).finite
        pipeline.parameter(name)
        pipeline.drain()
        seen.append(value_of(pipeline, name))
        assert torch.equal(seen[-1], weights(pipeline)[name])
        unit, slot = pipeline._state.parameters._slots[name]
        fresh = pipeline.storage.collect(unit, None)
        assert fresh is not None
        assert torch.equal(seen[-1].flatten(), fresh[slot.offset : slot.offset + slot.numel])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    pipeline.step(rows_of(2))
    pipeline.parameter(name)
    pipeline.load(tmp_path / "state")
    assert torch.equal(value_of(pipeline, name), seen[0])
    pipeline.close()


# The user's model after a pipeline took its weights


def _torch_save(model: Any, folder: Any) -> None:
    torch.save(model.state_dict(), folder / "weights.pt")


AFTERWARDS = {
    "call": lambda model, _: model(torch.zeros(1, 4, dtype=torch.long)),
    "call of the inner model": lambda model, _: model.model(torch.zeros(1, 4, dtype=torch.long)),
    "generate": lambda model, _: model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "state_dict": lambda model, _: model.state_dict(),
    "state_dict of the inner model": lambda model, _: model.model.state_dict(),
    "torch.save": _torch_save,
    "load_state_dict": lambda model, _: model.load_state_dict(
        {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    ),
    "deepcopy": lambda model, _: copy.deepcopy(model).state_dict(),
    "another pipeline": lambda model, _: Pipeline(model),
}
"""What scripts do with a model; some of it is what they did before they had a pipeline."""


def test_model_without_weights_names_export_on_every_use(tmp_path):
    model = llama()()
    pipeline = piped(model)
    pipeline.step(rows_of())
    pipeline.drain()
    for what, use in AFTERWARDS.items():
        try:
            use(model, tmp_path)
        except (RuntimeError, UserError) as error:
            assert "export" in str(error), what
        else:
            pytest.fail(what)
    assert_same_as_two_steps(pipeline)
    pipeline.export(tmp_path / "out")
    pipeline.close()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert all(value.isfinite().all() for value in exported.state_dict().values())


def assert_same_as_two_steps(pipeline: Pipeline) -> None:
    undisturbed = piped(llama())
    undisturbed.step(rows_of())
    assert pipeline.step(rows_of(4)).loss == undisturbed.step(rows_of(4)).loss
    undisturbed.close()


@pytest.mark.parametrize(
    "use", [lambda m: m.eval(), lambda m: m.train(), lambda m: m.zero_grad()], ids=["eval", "train", "zero_grad"]
)
def test_eval_train_and_zero_grad_between_steps_change_nothing(use):
    """Dropout goes on although the script says ``eval`` for a while."""
    losses = []
    for disturbed in (False, True):
        pipeline = piped(model := llama(attention_dropout=0.3)())
        pipeline.step(rows_of())
        pipeline.drain()
        if disturbed:
            use(model)
        losses.append(pipeline.step(rows_of()).loss)
        pipeline.close()
    assert losses[0] == losses[1]


def test_peft_model_without_weights_names_export_on_every_use(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama()(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    pipeline = piped(model.double())
    for use in (
        lambda: model(input_ids=torch.zeros(1, 4, dtype=torch.long)),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.merge_and_unload(),
        lambda: model.state_dict(),
    ):
        with pytest.raises((RuntimeError, UserError), match="export"):
            use()
    pipeline.close()


# A batch that the caller overwrites


def _overwrite(tensors: Any) -> None:
    for name, tensor in tensors.items():
        tensor.fill_({"input_ids": 5, "labels": -100, "position_ids": 0, "attention_mask": 0}[name])


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("delay", [pytest.param(None, marks=pytest.mark.slow), slow], ids=["quick", "slow"])
def test_batch_tensors_may_be_overwritten_after_step_returns(name, delay):
    def batch():
        return packed([0], [[5, 9, 2], [16], [8, 8]])[0] | {"attention_mask": mask}

    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    given = {key: tensor.clone() for key, tensor in batch().items()}
    mine = piped_numbers(llama(), given, delay=delay, after=lambda: _overwrite({name: given[name]}))
    assert_same(mine, piped_numbers(llama(), batch()), 0.0)


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids"])
def test_local_batch_tensors_may_be_overwritten_after_step_returns(name):
    def local():
        batch = rows_of()
        parts = [MicroBatch.from_rows(batch["input_ids"][i : i + 1], batch["labels"][i : i + 1]) for i in range(ROWS)]
        return LocalBatch(ROWS, LENGTH, [replace(p, input_ids=p.input_ids.clone()) for p in parts])

    given = local()
    mine = piped_numbers(
        llama(), given, delay=slow, after=lambda: [_overwrite({name: getattr(p, name)}) for p in given.micro_batches]
    )
    assert_same(mine, piped_numbers(llama(), local()), 0.0)


def test_single_batch_buffer_may_be_refilled_for_every_step():
    """As loaders with pinned buffers do."""
    pipeline, waiting = piped(llama(), delay=slow), piped(llama())
    place, losses = rows_of(0), []
    for step in range(4):
        for name, tensor in rows_of(step).items():
            place[name].copy_(tensor)
        losses.append(pipeline.step(place))
    expected = [waiting.step(rows_of(step)) for step in range(4)]
    assert [result.loss for result in losses] == [result.loss for result in expected]
    pipeline.close()
    waiting.close()


# Positions and masks


def base_config(make: Any) -> dict[str, Any]:
    return make().config.to_dict()


def roberta(**config: Any) -> Any:
    """Positions count from the padding token's number plus one, and padding tokens have none."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return real_model(
        RobertaConfig(
            **sizes, **off, num_attention_heads=4, is_decoder=True, pad_token_id=1, max_position_embeddings=64, **config
        )
    )


def test_roberta_positions_behind_the_padding_id_are_right_or_refused():
    right_or_refused(roberta, rows_of(), refused="position")


def test_roberta_positions_in_packed_rows_are_right_or_refused():
    """Without position_ids of the user the documents come from an attention mask."""
    lengths = [[5, 9, 2], [16], [8, 8]]
    right_or_refused(
        roberta, rows_of() | {"attention_mask": numbered(lengths)}, documents=spans_of(lengths), refused="position|mask"
    )


@pytest.mark.parametrize("make", [roberta, opt, llama(), gpt2], ids=["roberta", "opt", "llama", "gpt2"])
@pytest.mark.parametrize("padding", [0, 1])
def test_padding_token_within_a_text_is_right_or_refused(make, padding):
    batch = rows_of()
    batch["input_ids"][:, 3::5] = padding
    right_or_refused(make, batch, refused="position|pad")


def test_opt_position_offset_is_right():
    assert right_or_refused(opt, rows_of()) == "right"


@pytest.mark.parametrize("make", [gpt2, llama(), opt], ids=["gpt2", "llama", "opt"])
@pytest.mark.parametrize("first", [7, 1])
def test_positions_with_another_start_are_right_or_refused(make, first):
    batch, documents = packed([first], [[LENGTH]] * ROWS)
    # Rotations are computed in fp32, so that a distance between larger positions is another number.
    limit = 1e-5 if first and "rope" in str(base_config(make)) else 1e-9
    right_or_refused(make, batch, documents=documents, refused="position_ids", limit=limit)


@pytest.mark.parametrize("firsts", [[1], [2, 5, 0], [7]], ids=str)
def test_positions_with_another_start_per_document_are_right_or_refused(firsts):
    batch, documents = packed(firsts, [[5, 9, 2], [16], [8, 8]])
    right_or_refused(gpt2, batch, documents=documents, refused="position_ids")


@pytest.mark.parametrize("make", [gpt2, llama()], ids=["gpt2", "llama"])
def test_positions_with_gaps_or_repeats_are_refused_or_right(make):
    """Gaps do not begin a document, and there is no telling what the same position twice means."""
    batch, documents = packed([0], [[LENGTH]] * ROWS)
    batch["position_ids"] = batch["position_ids"] * 2
    right_or_refused(make, batch, documents=documents, refused="position_ids")
    batch["position_ids"] = batch["position_ids"] // 4
    with pytest.raises(UserError, match="position_ids"):
        piped_numbers(make, batch)


def numbered(lengths: Any, padding: tuple[int, ...] = ()) -> torch.Tensor:
    """A mask that says 1, 2, 3, ... for the documents of a row, and 0 for its last ones where ``padding`` says so."""
    mask = torch.stack([torch.cat([torch.full((n,), i + 1) for i, n in enumerate(row)]) for row in lengths])
    for row, length in enumerate(padding):
        mask[row, mask.shape[1] - length :] = 0
    return mask


@pytest.mark.parametrize("make", [gpt2, llama()], ids=["gpt2", "llama"])
def test_attention_mask_of_document_numbers_is_right_or_refused(make):
    lengths = [[5, 8, 3], [16], [8, 8]]
    batch = rows_of() | {"attention_mask": numbered(lengths, padding=(3, 0, 0))}
    right_or_refused(make, batch, documents=spans_of([[5, 8], [16], [8, 8]]), refused="attention_mask")


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32, torch.int32])
def test_right_padding_masks_of_any_dtype_are_right_or_refused(kind):
    mask = numbered([[16]] * ROWS, padding=(3, 0, 5)).to(kind)
    documents = [(0, 0, 13), (1, 0, 16), (2, 0, 11)]
    right_or_refused(llama(), rows_of() | {"attention_mask": mask}, documents=documents, refused="attention_mask")


@pytest.mark.parametrize("where", ["left", "middle"])
@pytest.mark.parametrize("make", [gpt2, llama()], ids=["gpt2", "llama"])
def test_left_or_middle_padding_is_refused(make, where):
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    if where == "middle":
        mask[1] = mask[1].roll(6)
    with pytest.raises(UserError, match="attention_mask"):
        piped_numbers(make, rows_of() | {"attention_mask": mask})


def test_attention_mask_with_four_dimensions_is_refused():
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH).tril()
    with pytest.raises(UserError, match="attention_mask"):
        piped_numbers(llama(), rows_of() | {"attention_mask": mask})


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(UserError, match=r"position|sequence"):
        piped_numbers(lambda: real_model(family_config("gpt2", max_position_embeddings=8)), rows_of())


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.float32])
@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_ids_and_labels_of_other_dtypes_are_right_or_refused(name, kind):
    batch = rows_of()
    right_or_refused(llama(), batch | {name: batch[name].to(kind)}, refused=name)


@pytest.mark.parametrize(("name", "value"), [("input_ids", VOCABULARY), ("labels", VOCABULARY), ("labels", -1)])
def test_ids_and_labels_outside_the_vocabulary_are_refused(name, value):
    batch = rows_of()
    batch[name][0, 5] = value
    with pytest.raises(UserError, match=name):
        piped_numbers(llama(), batch)


@pytest.mark.parametrize("convert", [np.asarray, torch.Tensor.tolist], ids=["array", "list"])
def test_batches_that_are_not_tensors_are_refused(convert):
    with pytest.raises(UserError, match=r"batch.*tensor"):
        piped_numbers(llama(), {name: convert(tensor) for name, tensor in rows_of().items()})


# A loss of the user's own


def narrow(kind: torch.dtype) -> Any:
    return lambda logits, labels: token_sum(logits, labels).to(kind)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_loss_keeps_gradients_or_is_refused(kind):
    """What it returns is rounded; the scale by which its gradient is multiplied must not be."""
    right_or_refused(
        llama(), rows_of(), loss=narrow(kind), plain_loss=token_sum, loss_limit=1e-2, refused="loss.*(float|fp)32"
    )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_low_precision_loss_of_many_tokens_is_right_or_refused(kind):
    """A scale of 1 / tokens is below the normal numbers of fp16, and a sum may be above the largest."""
    batch = rows_of(rows=2, length=120)
    right_or_refused(
        llama(),
        batch,
        loss=lambda logits, labels: (300 * token_sum(logits, labels)).to(kind),
        plain_loss=lambda logits, labels: 300 * token_sum(logits, labels),
        loss_limit=1e-2,
        loss_chunk_tokens=1024,
        refused="loss.*(float|fp)32",
    )


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def hugging_face(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    count = (labels != -100).sum().clamp(min=1)
    return token_sum(logits, labels) / count


@pytest.mark.parametrize("loss", [mean, hugging_face])
@pytest.mark.parametrize("chunk", [6, 1024])
def test_a_loss_that_returns_the_mean_is_refused(loss, chunk):
    with pytest.raises(UserError, match=r"loss.*(sum|mean)"):
        piped_numbers(llama(), rows_of(), loss=loss, loss_chunk_tokens=chunk)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"),
        lambda logits, labels: token_sum(logits, labels)[None],
        lambda logits, labels: (token_sum(logits, labels), logits),
        lambda logits, labels: float(token_sum(logits, labels)),
        lambda logits, labels: token_sum(logits, labels).detach(),
        lambda logits, labels: None,
    ],
    ids=["vector", "one in a vector", "tuple", "float", "detached", "nothing"],
)
def test_loss_that_returns_no_single_number_is_refused(loss):
    with pytest.raises(UserError, match="loss"):
        piped_numbers(llama(), rows_of(), loss=loss)


def test_loss_that_is_nan_without_labels_is_right_or_refused():
    """A mean times a count, as one writes it for a whole row."""
    right_or_refused(
        llama(),
        rows_of(),
        loss=lambda logits, labels: mean(logits, labels) * (labels != -100).sum(),
        plain_loss=token_sum,
        refused="loss.*(nan|finite|label)",
    )


def test_loss_with_parameters_is_refused():
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, logits, labels):
            return token_sum(logits / self.temperature, labels)

    with pytest.raises(UserError, match=r"loss.*parameter"):
        piped_numbers(llama(), rows_of(), loss=Tempered())


def test_loss_that_changes_logits_in_place_is_right_or_refused():
    def loss(logits, labels):
        return token_sum(logits.mul_(0.5), labels)

    right_or_refused(llama(), rows_of(), loss=loss, refused="loss")
    right_or_refused(llama(), rows_of(), loss=loss, refused="loss", loss_chunk_tokens=1024)


def test_loss_that_changes_labels_in_place_is_right_or_refused():
    """Then labels that do not count count as 0, and must not in a second pass over them."""

    def loss(logits, labels):
        counts = labels != -100
        labels[~counts] = 0
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * counts.flatten()).sum()

    batch = rows_of()
    if right_or_refused(llama(), batch, loss=loss, plain_loss=token_sum, refused="loss") == "refused":
        return
    assert all(torch.equal(batch[name], tensor) for name, tensor in rows_of().items())
    parts = [MicroBatch.from_rows(**{key: t[i : i + 1] for key, t in batch.items()}) for i in range(ROWS)]
    pipeline, local = piped(llama(), loss=loss), LocalBatch(ROWS, LENGTH, parts)
    losses = [pipeline.step(local, rate=0.0).loss for _ in range(2)]  # the same objects again
    assert pipeline.evaluate(local).loss == losses[0] == losses[1]
    pipeline.close()


def test_assert_same_detects_a_wrong_gradient():
    with pytest.raises(AssertionError, match="changes are wrong"):
        assert_same(plain_numbers(llama(), rows_of()), plain_numbers(llama(), rows_of(4)), loss_limit=1.0)


# What a script does around a step


def test_a_parameter_frozen_after_the_pipeline_is_made_is_refused():
    model = llama()()
    pipeline = piped(model)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(UserError, match="before the Pipeline is made"):
        pipeline.step(rows_of())


def test_step_works_without_grad_mode_and_refuses_autocast():
    expected = piped_numbers(llama(), rows_of())
    with torch.no_grad():
        assert_same(piped_numbers(llama(), rows_of()), expected)
    pipeline = piped(llama())
    with torch.inference_mode():
        pipeline.evaluate(rows_of())
        assert pipeline.step(rows_of()).loss == expected.loss
    assert pipeline.step(rows_of()).finite
    with torch.autocast("cpu"), pytest.raises(UserError, match="autocast"):
        pipeline.step(rows_of())


def test_default_device_of_the_caller_changes_nothing():
    expected = piped_numbers(llama(), rows_of())
    batch, model = rows_of(), llama()()
    with torch.device("meta"):
        pipeline = piped(model)
        pipeline.evaluate(batch)
        assert pipeline.gradient(pipeline.parameter_names[0]) is not None
        assert pipeline.step(batch).loss == expected.loss


def test_layers_in_evaluation_mode_drop_nothing():
    """Dropout of a layer that the caller has put into evaluation mode stays off."""

    def make():
        model = llama(attention_dropout=0.5)()
        for layer in model.model.layers:
            layer.eval()
        return model

    assert_same(piped_numbers(make, rows_of()), piped_numbers(llama(), rows_of()))


@pytest.mark.slow
def test_ranks_with_different_batches_are_refused(pool):
    """As a script for DDP gives them, of whose batches only a part would be used."""
    messages = pool.run("borders:different_batches", 2, 1)
    assert all("the same global batch" in message for message in messages)


def test_qwen2_moe_with_some_window_layers_matches_plain_training():
    """Its mask function is a sliding window that is made of two functions."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_experts_per_tok": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **experts, **window,
    )  # fmt: skip
    assert set(config.layer_types or ()) == {"sliding_attention", "full_attention"}
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    assert right_or_refused(lambda: real_model(config), batch, documents=documents) == "right"


_TABLES = {
    "gpt2": lambda: real_model(family_config("gpt2", n_positions=16, max_position_embeddings=16)),
    "opt": lambda: opt(max_position_embeddings=16),
}


@pytest.mark.parametrize("family", _TABLES)
def test_rows_beyond_the_position_table_may_hold_shorter_documents(family):
    """Positions are looked up anew for every document."""
    batch, documents = packed([0], [[14, 16, 10], [16, 15, 9]])
    right_or_refused(_TABLES[family], batch, documents=documents)
    with pytest.raises(UserError, match="batch: got 'position 39'; below 16"):
        piped_numbers(_TABLES[family], rows_of(length=40))


def _longrope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config = Phi3Config(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors},
    )  # fmt: skip
    return real_model(config)


@pytest.mark.parametrize(("lengths", "right"), [((12, 6), True), ((24, 24), True), ((24, 12), False)])
def test_longrope_refuses_micro_batches_of_short_and_long_documents(lengths, right):
    batch, documents = packed([0], [lengths])
    if right:
        right_or_refused(_longrope, batch, documents=documents)
    else:
        with pytest.raises(UserError, match="longrope"):
            piped_numbers(_longrope, batch)


@pytest.mark.parametrize("make", [_longrope, lambda: real_model(family_config("gemma3"))])
def test_rotary_angles_are_computed_once_per_micro_batch(make):
    """Not for every chunk of the head again, which does not read them."""
    model = make()
    pipeline, calls = piped(model, loss_chunk_tokens=3), []
    angles = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    for module in angles:
        module.register_forward_hook(lambda *_: calls.append(1))
    for step in range(3):  # the first also tries every block twice
        calls.clear()
        pipeline.step(rows_of(step))
        pipeline.drain()
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["all"])
    assert len(calls) == 3 * len(kinds)
    pipeline.close()
