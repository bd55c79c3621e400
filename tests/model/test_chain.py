"""A chain of blocks computes what the model computes, on packed documents as on each document by itself."""

from __future__ import annotations

from copy import deepcopy as copy_of

import pytest
import torch
from transformers import (
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from model_families import (
    FAMILIES,
    LAYERS,
    MORE_FAMILIES,
    Holder,
    assert_close,
    family_config,
    keep_fp64,
    meta_model,
    packed_batch,
    plain_loss_and_gradients,
    real_model,
)
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.export import export_hugging_face
from tawpipe.model.files.pretrained import SafetensorsSource

LENGTHS = ((7, 1, 12), (20,), (3, 9, 8))


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


@pytest.mark.parametrize(
    ("family", "tied"),
    [(family, number % 2 == 1) for number, family in enumerate((*FAMILIES, *MORE_FAMILIES))],
)
def test_chain_equals_the_model_on_each_document(family: str, tied: bool):
    """Loss and all gradients in fp64, with recomputation, chunks of the loss and gradients added up over blocks."""
    config = family_config(family, tied=tied)
    batch = packed_batch(LENGTHS)
    loss, gradients = plain_loss_and_gradients(real_model(config), batch)
    mine, own = Holder(real_model(config)).loss_and_gradients(batch)
    assert abs(mine - loss) <= 1e-10 * abs(loss)
    assert_close(own, gradients, 1e-10)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_frozen_parameters_get_no_gradient_and_others_are_unchanged(family: str):
    """A frozen embedding and first layer: their units are frozen, and no backward pass has to reach them."""
    config = family_config(family)
    batch = packed_batch(LENGTHS)
    _, gradients = plain_loss_and_gradients(real_model(config), batch)
    model = real_model(config)
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    holder = Holder(model)
    assert [block.needs_backward for block in holder.chain.blocks] == [False, False, True, True, True]
    assert [unit.name for unit in holder.chain.units if not unit.trainable] == [
        "embedding.frozen",
        "layer.0.frozen",
        "layer.1.frozen",
    ]
    _, own = holder.loss_and_gradients(batch)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert_close(own, {name: gradients[name] for name in trainable}, 1e-10)


@pytest.mark.parametrize("on_meta", [False, True], ids=["real", "meta"])
def test_lora_trains_only_its_adapters(on_meta: bool, tmp_path):
    """The same gradients as peft by itself; base weights come from a folder without adapters, and stay frozen."""
    peft = pytest.importorskip("peft")
    config = family_config("llama", tied=True)
    wish = peft.LoraConfig(
        r=3, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    batch = packed_batch(LENGTHS)
    plain = peft.get_peft_model(real_model(config), wish)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    if on_meta:
        base = real_model(config, torch.float32)
        base.save_pretrained(tmp_path)
        model = peft.get_peft_model(meta_model(family_config("llama", tied=True)), wish)
        chain = Chain(model)
        drawn = SafetensorsSource(chain, tmp_path, seed=2)
        inner = plain.get_base_model()
        for unit in chain.units:
            flat = drawn.unit(unit, dtype=torch.float64)
            for slot in unit.slots:
                value = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                if "lora_B" in slot.name:
                    assert not value.any()
                    value.fill_(0.01)
                inner.get_parameter(slot.name).data.copy_(value)
                if "lora_A" in slot.name:
                    bound = (3 / inner.get_parameter(slot.name).shape[1]) ** 0.5 * (1 / 3) ** 0.5
                    assert 0.5 * bound < value.abs().max() <= bound
    holder = Holder(copy_of(plain))
    assert {unit.name for unit in holder.chain.units if unit.trainable} == {f"layer.{i}" for i in range(LAYERS)}
    loss, gradients = plain_loss_and_gradients(plain.get_base_model(), batch)
    mine, own = holder.loss_and_gradients(batch)
    assert abs(mine - loss) <= 1e-10 * abs(loss)
    assert own and all("lora_" in name for name in own)
    assert_close(own, {name: gradients[name] for name in own}, 1e-10)


def test_lora_export_is_an_adapter_that_peft_opens(tmp_path):
    peft = pytest.importorskip("peft")
    config = family_config("llama")
    wish = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = peft.get_peft_model(real_model(config, torch.float32), wish).eval()
    ids = torch.randint(3, 60, (1, 9))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    values = {name: p.detach().clone() for name, p in model.get_base_model().named_parameters()}
    chain = Chain(model)
    chain.prepare("cpu", torch.float32)
    folder = export_hugging_face(chain, tmp_path / "out", values.__getitem__, dtype=torch.float32, is_writer=True)
    opened = peft.PeftModel.from_pretrained(real_model(config, torch.float32), folder).eval()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_units_hold_every_parameter_once_and_blocks_name_their_units(family: str, tied: bool):
    model = meta_model(family_config(family, tied=tied))
    names = [name for name, _ in model.named_parameters()]
    chain = Chain(model)
    assert sorted(slot.name for unit in chain.units for slot in unit.slots) == sorted(names)
    for unit in chain.units:
        offset = 0
        for slot in unit.slots:
            assert slot.offset == offset and slot.shape == tuple(model.get_parameter(slot.name).shape)
            offset += slot.numel
        assert offset == unit.numel
        assert unit.blocks == tuple(index for index, block in enumerate(chain.blocks) if unit.index in block.units)
    assert [block.kind for block in chain.blocks] == ["embedding", *["layer"] * LAYERS, "head"]
    assert not chain.blocks[0].backward_reads_weights
    shared = [unit for unit in chain.units if len(unit.blocks) > 1]
    assert [unit.blocks for unit in shared] == ([(0, LAYERS + 1)] if tied else [])

    chain.prepare("cpu", torch.bfloat16)
    assert [name for name, _ in model.named_parameters()] == names
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) <= 2 * len(names)
    assert all(not buffer.is_meta for buffer in model.buffers())


def test_unreached_gradients_are_zero_or_keep_their_accumulated_value():
    holder = Holder(real_model(family_config("qwen3_moe")))
    chain, batch = holder.chain, packed_batch(((2,),))  # two tokens reach at most four of six experts
    _, first = holder.loss_and_gradients(batch)
    first = {name: gradient.clone() for name, gradient in first.items()}
    for unit in chain.units:
        assert holder.gradients[unit.index][unit.numel :].tolist() == [0.0] * 3, "padding is zeroed"
    assert any(not g[e].any() for n, g in first.items() if n.endswith("experts.down_proj") for e in range(6))

    layer = next(unit for unit in chain.units if unit.name == "layer.0")
    wide = torch.full((layer.numel,), 2.0, dtype=torch.float64)
    chain.collect(layer.index, wide, accumulate=True)
    chain.finish_collect(layer.index)
    assert (wide == 2.0).all(), "nothing arrived, and what was there counts"
    chain.collect(layer.index, wide, accumulate=False)
    chain.finish_collect(layer.index)
    assert not wide.any(), "nothing arrived, and what was there does not count"


def test_gradients_of_bf16_weights_are_added_in_fp32():
    """Added to 4096, where bf16 has steps of 32, they are still all there."""
    holder = Holder(real_model(family_config("llama")), torch.bfloat16)
    holder.gradients = [torch.empty(unit.numel) for unit in holder.chain.units]
    batch = packed_batch(LENGTHS)
    first = {name: gradient.clone() for name, gradient in holder.loss_and_gradients(batch)[1].items()}
    chain, add = holder.chain, holder.chain.collect
    for gradient in holder.gradients:
        gradient.fill_(4096.0)
    chain.collect = lambda unit, flat, accumulate, *, in_chunks=False: add(unit, flat, True, in_chunks=in_chunks)
    for name, gradient in holder.loss_and_gradients(batch)[1].items():
        assert gradient.dtype == torch.float32
        assert (gradient - 4096.0 - first[name]).abs().max() <= 0.02 + 0.01 * first[name].abs().max(), name
    assert all(parameter.grad is None for parameter in chain.model.parameters())


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_chunks_are_added_in_fp32_into_a_bf16_buffer(held: bool):
    """Where gradients travel in bf16: a thousand chunks of a head, each too small for bf16 beside the first."""
    chain = Chain(real_model(family_config("llama")))
    chain.prepare("cpu", torch.bfloat16)
    head = chain.spec.blocks[-1].units[-1]
    unit, flat = chain.units[head], torch.full((chain.units[head].numel + 3,), 2.0, dtype=torch.bfloat16)
    parameter = chain._parameters[head][0]
    chain.collect(head, flat, accumulate=held, in_chunks=True)
    for gradient in (1.0, *[2**-9] * 1024):
        (parameter * gradient).sum().backward()
    chain.finish_collect(head)
    assert (unit.slots[0].view(flat) == (5.0 if held else 3.0)).all()
    assert (flat[unit.numel :] == (2.0 if held else 0.0)).all(), "padding"
    assert all(one.grad is None for one in chain.model.parameters())


def test_parameter_outside_its_visit_is_nan():
    holder = Holder(real_model(family_config("llama")))
    hidden, _ = holder.chain.embed(packed_batch(LENGTHS))
    assert hidden.isnan().all()


def test_custom_loss_gets_logits_and_shifted_labels():
    """The user's loss is called with [b, c, V] and [b, c] and must return one number."""
    config = family_config("cohere", tied=True)
    batch = packed_batch(((6, 4),))

    def z_loss(logits, labels):
        assert logits.shape == (*labels.shape, 61)
        return (logits.logsumexp(-1) ** 2)[labels != -100].sum()

    total, _ = Holder(real_model(config), loss=z_loss).loss_and_gradients(batch, chunk=4)
    model = real_model(config)
    logits = torch.cat([model(d[None], use_cache=False).logits[0] for d in batch.input_ids[0].split(batch.lengths)])
    expected = (logits.logsumexp(-1) ** 2)[batch.labels[0] != -100].sum()
    assert abs(total - expected) <= 1e-10 * expected
    with pytest.raises(UserError, match="must return the sum as one number"):
        Holder(real_model(config), loss=lambda logits, labels: logits.sum(-1))


def test_dropout_repeats_for_a_seed_and_is_off_in_evaluation():
    config = family_config("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    holder = Holder(real_model(config))
    chain, batch = holder.chain, packed_batch(LENGTHS)

    def run() -> torch.Tensor:
        torch.manual_seed(8)
        holder.visit(0)
        hidden, context = chain.embed(batch)
        holder.leave(0)
        torch.manual_seed(9)
        holder.visit(1)
        output = chain.layer(1, hidden, context)
        holder.leave(1)
        return output.detach()

    first = run()
    assert torch.equal(first, run())
    chain.set_training(False)
    evaluated = run()
    assert not torch.equal(first, evaluated) and (evaluated != 0).all()


def test_embedding_whose_backward_reads_weights_is_detected():
    """Found by what autograd saves, not by the kind of the layer: here the weight is scaled by another parameter."""
    model = real_model(family_config("llama"))

    class Scaled(torch.nn.Embedding):
        gain: torch.nn.Parameter

        def forward(self, input):
            return torch.nn.functional.embedding(input, self.weight) * self.gain

    embedding = model.model.embed_tokens
    embedding.gain = torch.nn.Parameter(torch.full((32,), 1.5, dtype=torch.float64))
    embedding.__class__ = Scaled
    batch = packed_batch(LENGTHS)
    holder = Holder(copy_of(model))
    assert holder.chain.blocks[0].backward_reads_weights
    _, gradients = plain_loss_and_gradients(model, batch)
    assert_close(holder.loss_and_gradients(batch)[1], gradients, 1e-10)


REFUSED = {
    "rwkv": (RwkvConfig(num_hidden_layers=2), "given more of the one before it than hidden states"),
    "shared keys": (Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2), "share keys and values"),
    "dynamic": (
        LlamaConfig(num_hidden_layers=2, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "dynamic rotary scaling",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_a_chain_would_compute_wrongly_are_refused(what: str):
    config, message = REFUSED[what]
    with pytest.raises(UserError, match=message) as refusal:
        Chain(meta_model(config))
    assert str(refusal.value).startswith("model: got ")


def test_models_that_are_not_causal_language_models_are_refused():
    with torch.device("meta"):
        with pytest.raises(UserError, match="encoder-decoder"):
            Chain(T5ForConditionalGeneration(T5Config(num_layers=1)))
        with pytest.raises(UserError, match="no language-modelling head"):
            Chain(LlamaForSequenceClassification(LlamaConfig(num_hidden_layers=1)))
        with pytest.raises(UserError, match="expected a transformers model"):
            Chain(torch.nn.Linear(2, 2))


def test_unused_trainable_parameter_is_refused_and_frozen_one_is_kept():
    model = meta_model(family_config("llama"))
    model.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match="no block of the chain uses: extra"):
        Chain(model)
    model.extra.requires_grad_(False)
    assert "extra" in {slot.name for unit in Chain(model).units for slot in unit.slots}
