"""Tiny models of the families that the tests cover, and the plain computation that a chain is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.masking_utils import eager_mask

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.weights import ModuleSource

VOCABULARY = 61
LAYERS = 3
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MOE = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (
        Gemma2Config,
        {**_SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (Gemma3TextConfig, {**_SLIDING, "query_pre_attn_scalar": 8}),
    "qwen3_moe": (Qwen3MoeConfig, _MOE),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere": (CohereConfig, {"logit_scale": 0.25, "use_qk_norm": True}),
}
"""The eight families of the promise, each of which may have tied or untied embeddings."""

MORE_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "cohere2": (Cohere2Config, {**_SLIDING, "logit_scale": 0.25}),
    "gpt_oss": (
        GptOssConfig,
        {
            **_SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "num_mtp_layers": 0,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 12,
            "q_lora_rank": 14,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "head_dim": 4,
        },
    ),
    "gpt2": (GPT2Config, {"n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}
"""What else is covered: sinks, latent attention, persistent buffers, learned positions."""


def family_config(family: str, *, tied: bool = False, **overrides: Any) -> PreTrainedConfig:
    kind, own = (FAMILIES | MORE_FAMILIES)[family]
    return kind(**{**_COMMON, **own, "tie_word_embeddings": tied, **overrides})


def real_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A model with values, all parameters random (norms too), that computes densely in ``dtype``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.add_(torch.randn_like(buffer))
    model = model.to(dtype).train()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    register_dense()
    model.set_attn_implementation("dense")
    return model


def meta_model(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _dense_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as the formula has it, in the dtype of its inputs (transformers' eager functions use fp32)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    if kwargs.get("softcap") is not None:
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    scores = scores + attention_mask
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].view(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def keep_fp64(monkeypatch: Any) -> None:
    """Let fp64 tensors stay so when a norm, a router or a softmax asks for fp32: the norms of Gemma and Cohere, for
    one, sum the gradient of their weight in fp32, where the order of the sum shows at 1e-7."""

    def wide(function: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.float64:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
            return function(tensor, *args, **kwargs)

        return call

    softmax = [(owner, "softmax") for owner in (torch, nn.functional, torch.Tensor)]
    for owner, name in [(torch.Tensor, "to"), (torch.Tensor, "type"), (torch, "sum"), *softmax]:
        monkeypatch.setattr(owner, name, wide(getattr(owner, name)))
    full = torch.full
    monkeypatch.setattr(  # a mask of fp64's lowest number, made in the default dtype
        torch,
        "full",
        lambda size, value, **kwargs: full(size, max(value, -3e38) if "dtype" not in kwargs else value, **kwargs),
    )
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(torch.float32))
    matmul = torch.Tensor.__matmul__

    def product(first: Tensor, second: Tensor) -> Tensor:  # of frequencies with positions, in 5.17
        if first.dtype != second.dtype:
            first, second = first.double(), second.double()
        return matmul(first, second)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)


def register_dense() -> None:
    AttentionInterface.register("dense", _dense_attention)
    AttentionMaskInterface.register("dense", eager_mask)


def packed_batch(lengths: tuple[tuple[int, ...], ...], seed: int = 1) -> MicroBatch:
    """Rows of random tokens, one tuple of document lengths per row; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return MicroBatch.from_rows(ids, labels, positions)


def plain_loss_and_gradients(model: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the losses of all documents, each run by itself through the model, and its gradients."""
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    ids, labels = batch.input_ids.flatten().split(batch.lengths), batch.labels.flatten().split(batch.lengths)
    for document, targets in zip(ids, labels, strict=True):
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        if (targets != -100).any():
            loss.backward()
            total += loss.detach()
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


class Holder:
    """All units of a chain in full, the simplest stand-in for homes and visits."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float64, *, loss: Any = None) -> None:
        self.chain = Chain(model, loss=loss)
        source = ModuleSource(self.chain)
        values = [source.unit(unit, dtype=dtype) for unit in self.chain.units]
        self.chain.prepare("cpu", dtype)
        self.values = values
        self.gradients = [torch.full((unit.numel + 3,), 7.0, dtype=dtype) for unit in self.chain.units]
        self.accumulate = [False] * len(values)

    def visit(self, block: int, *, gradients: bool = False) -> None:
        for unit in self.chain.blocks[block].units:
            self.chain.bind(unit, self.values[unit])
            if gradients and self.chain.units[unit].trainable:
                self.chain.collect(unit, self.gradients[unit], self.accumulate[unit])

    def leave(self, block: int) -> None:
        for unit in self.chain.blocks[block].units:
            if unit in self.chain._collections:
                self.chain.finish_collect(unit)
                self.accumulate[unit] = True
            self.chain.release(unit)

    def loss_and_gradients(self, batch: MicroBatch, *, chunk: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward without graphs, then block by block with recomputation, as a runtime does it."""
        chain, count = self.chain, len(self.chain.blocks) - 2
        self.accumulate = [False] * len(self.values)
        inputs = []
        with torch.no_grad():
            self.visit(0)
            hidden, context = chain.embed(batch)
            self.leave(0)
            for block in range(1, count + 1):
                inputs.append(hidden)
                self.visit(block)
                hidden = chain.layer(block, hidden, context)
                self.leave(block)

        hidden = hidden.requires_grad_(any(block.needs_backward for block in chain.blocks[:-1]))
        self.visit(count + 1, gradients=True)
        total = torch.zeros((), dtype=hidden.dtype)
        for start in range(0, hidden.shape[1], chunk):
            loss = chain.head(hidden[:, start : start + chunk], batch.labels[:, start : start + chunk])
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
        self.leave(count + 1)

        gradient = hidden.grad
        for block in range(count, 0, -1):
            if not chain.blocks[block].needs_backward:
                break
            given = inputs[block - 1].requires_grad_(chain.blocks[block - 1].needs_backward)
            self.visit(block, gradients=True)
            chain.layer(block, given, context).backward(gradient)
            self.leave(block)
            gradient = given.grad
        if chain.blocks[0].needs_backward:
            self.visit(0, gradients=True)
            chain.embed(batch)[0].backward(gradient)
            self.leave(0)
        return total, self.named_gradients()

    def named_gradients(self) -> dict[str, Tensor]:
        return {
            slot.name: self.gradients[unit.index][slot.offset : slot.offset + slot.numel].view(slot.shape)
            for unit in self.chain.units
            if unit.trainable
            for slot in unit.slots
        }


def assert_close(mine: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float) -> None:
    """Per tensor ||a - b|| / ||b|| within ``tolerance``."""
    assert mine.keys() == plain.keys()
    for name, expected in plain.items():
        error = (mine[name] - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: {error:.2e}"
