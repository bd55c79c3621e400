"""Refuses models that the chain would compute wrongly, before anything is built.

Problems that only a forward pass shows (masks, layers that pass on more than hidden states) are found by ``discovery``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from tawpipe.errors import UserError

SETTING = "model"
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


MTP = "num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Config keys for the number of multi-token-prediction heads."""


NOT_CAUSAL = "a causal language model: in this one a token sees those after it, which it is to predict"


class ApartError(UserError):
    """Raised if a model would mix the documents of a row.

    It may still be right with one document per row."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(SETTING, name, why)


def unsupported(name: str, why: str) -> UserError:
    """Return the error for a model that cannot be trained.

    Args:
        name: the refused model, or the refused part of it.
        why: the reason, or the change that would help.
    """
    return UserError(SETTING, name, why)


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UserError if a model is no decoder-only causal LM, or if its training needs features that a chain lacks."""
    for why in _problems(model):
        raise unsupported(type(model).__name__, why)


def _problems(model: Any) -> Iterator[str]:
    """Yield the reasons why a model is refused.

    The caller stops at the first one, since later checks may fail without it."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        yield "expected a transformers model, as AutoModelForCausalLM makes it"
    config = model.config
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported, only decoder-only causal LMs"
    if model.get_output_embeddings() is None:
        yield "the model has no language-modelling head; use the ...ForCausalLM class"
    if getattr(model, "hf_quantizer", None) is not None or not all(p.is_floating_point() for p in model.parameters()):
        yield "quantized weights cannot be trained; give the unquantized model"
    if shared := getattr(text, "num_kv_shared_layers", 0):
        yield f"layers that share keys and values (num_kv_shared_layers={shared}) are not supported"
    refuse_parameters(model)
    if config.return_dict is False:
        yield "the model must return its outputs by name; set return_dict to true in config.json"
    for owner in (config, text):
        for key in ("layerdrop", "decoder_layerdrop"):
            if share := getattr(owner, key, 0):
                yield f"layers left out at random ({key}={share}) are not supported; set {key} to 0 in config.json"
    if any(rope["rope_type"] == "dynamic" for rope in rope_settings(getattr(text, "rope_parameters", None))):
        yield "dynamic rotary scaling depends on batches seen before; use rope_type yarn, linear or llama3"


def settle_mtp(model: Any, *, without: bool) -> None:
    """Set the number of multi-token-prediction heads in a model's config to 0, if ``without`` is True.

    Transformers then builds none, and the exported model has none.

    Args:
        model: the model, whose config is changed in place.
        without: True if the user has agreed to train without these heads.

    Raises:
        UserError: the model has such heads and ``without`` is False.
    """
    text = model.config.get_text_config()
    for key in MTP:
        if (heads := getattr(text, key, 0)) and not without:
            untrained = f"multi-token-prediction heads ({key}={heads}) are neither trained nor exported"
            raise unsupported(
                type(model).__name__,
                f"{untrained}; --without-mtp (TrainingSettings(without_mtp=True)) trains the model without them",
            )
        if heads:
            setattr(text, key, 0)
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        if without and getattr(text, key, None):
            setattr(text, key, None)


def why_apart(model: Any) -> str:
    """Return the reason why a model would mix the documents of a row, according to its config and code, or ``""``."""
    foreign = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES)
    if foreign or getattr(model, "_is_stateful", False):
        return f"layers of type {', '.join(foreign) or 'state space'} carry a state across the documents of a row"
    if not model._can_set_attn_implementation():
        return "the model does not use transformers' attention interface (older code, or ALiBi)"
    return ""


def refuse_not_causal(model: Any, layers: Sequence[nn.Module]) -> None:
    """Raise UserError for a model whose config asks for attention in both directions, if its layers use it.

    Some configs have such a setting that no code reads."""
    text = model.config.get_text_config()
    parts = [part for layer in layers for part in layer.modules()]
    causal = {"is_decoder": True, "is_causal": True, "use_bidirectional_attention": False}
    for key, value in causal.items():
        if bool(getattr(text, key, value)) == value:
            continue
        flags = {getattr(part, name, None) for part in parts for name in ("is_causal", key)}
        if False in flags and True not in flags:
            subject = f"{type(model).__name__} with {key}={getattr(text, key)}"
            raise unsupported(
                subject, f"{NOT_CAUSAL}; {key}: {str(value).lower()} in config.json makes a decoder of it"
            )


def refuse_adapters(model: nn.Module) -> None:
    """Raise UserError for a ``peft`` wrapper that does more than replace modules inside the model.

    Only the inner model is run. Computations of the wrapper (virtual tokens, its own loss) would be left out."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return
    advice = "use a method that only replaces layers, such as LoRA, DoRA, IA3 or OFT"
    names = ", ".join(sorted({getattr(c.peft_type, "value", str(c.peft_type)) for c in configs.values()}))
    tuner = getattr(model, "base_model", None)
    if not hasattr(model, "get_base_model"):
        raise unsupported(
            f"{type(model).__name__} with an adapter", "wrap it with peft.get_peft_model instead of add_adapter"
        )
    if any(config.is_prompt_learning for config in configs.values()):
        raise unsupported(names, f"virtual tokens in front of a document are not supported; {advice}")
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs.values()):
        raise unsupported(
            "alora_invocation_tokens",
            f"activated LoRA finds where it begins in the wrapper's own forward pass, which is not run: it would train "
            f"nothing; {advice}",
        )
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(tuner, BaseTuner) or type(tuner).forward is not BaseTuner.forward:
        raise unsupported(
            names, f"its own forward pass adds something (a loss, for AdaLoRA) that would be left out; {advice}"
        )


def refuse_parameters(model: nn.Module) -> None:
    """Raise UserError for parameters that are not plain values changed only by an optimizer.

    Refused are embeddings with special options, merged adapters, hooks on parameters, and two parameters that share
    memory."""
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(module, option):
                    raise unsupported(f"{name} of {kind}", f"embeddings with {option} are not supported")
        if getattr(module, "merged_adapters", None):
            raise unsupported(f"{name} of {kind}", "its adapter is merged into the weights; unmerge it to train it")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise unsupported(
                f"{name} of {kind}",
                "hooks of parameters would never be called: gradients are collected elsewhere; put hooks on modules",
            )
    places = sorted(
        (p.data_ptr(), p.nbytes, name) for name, p in model.named_parameters() if not p.is_meta and p.numel()
    )
    for (begin, size, first), (other, _, second) in pairwise(places):
        if other < begin + size:
            raise unsupported(
                f"{first} and {second} of {kind}",
                "two parameters share memory without being one; tie them by using the same Parameter twice",
            )


def rope_settings(parameters: object) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings in a config's ``rope_parameters``: one dictionary, or one for each layer type."""
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters
        for value in parameters.values():
            yield from rope_settings(value)
