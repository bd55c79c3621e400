"""Builds models on the meta device from a name: a preset, a folder or a model on the Hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tawpipe.errors import UserError
from tawpipe.model.attention.indexers import freeze_indexers, frozen_words
from tawpipe.model.bits.published import quantization_of
from tawpipe.model.bits.quantized import NONE, PUBLISHED
from tawpipe.model.buffers import wide_parameters, wide_words
from tawpipe.model.chain import PUBLISHED_FORMS, Chain, inner_model
from tawpipe.model.files.adapters import adapter_facts, adapter_words, freeze, other_base_words, with_adapter
from tawpipe.model.files.carried import GENERATION, read_settings, stop_tokens
from tawpipe.model.files.pretrained import (
    SafetensorsSource,
    check_weights,
    commit_of,
    conversion,
    count_files,
    files_to_fetch,
    has_weights,
    published_forms,
    published_words,
    stored_dtype,
    unread_files,
)
from tawpipe.model.refuse import unsupported
from tawpipe.model.rope import apply_rope, check_rope
from tawpipe.model.settings import LoraSettings, RopeSettings
from tawpipe.model.weights import InitSource, WeightSource

_LLAMA_3 = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, key_value_heads: int) -> dict[str, Any]:
    """Return the config of a Llama of this shape, with tied embeddings."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "tie_word_embeddings": True,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _shape(8192, 256, 704, 8, 8, 4),
    "small-125m": _shape(32768, 768, 2048, 14, 12, 12),
    "llama-1b": _shape(128256, 2048, 8192, 16, 32, 8) | _LLAMA_3,
    "llama-8b": _shape(128256, 4096, 14336, 32, 32, 8) | _LLAMA_3 | {"tie_word_embeddings": False},
}
"""Llama shapes with random weights: 8, 124, 1236 and 8030 million parameters with their own vocabularies."""

OWN_ROPE = RopeSettings()
NO_ADAPTER = LoraSettings()
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
"""Pattern for a name on the Hub, and after a @ its branch, tag or commit."""
_SMALL_FILES = [
    "*.json",
    "*.jinja",
    "*.py",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "vocab*",
    "tokenizer*",
    "*.codes",
]
"""Patterns for a model's files on the Hub other than weights: configs, code, tokenizers and chat templates."""
_OTHER_FORMS = ["original/*", "consolidated*", "onnx/*", "*.safetensors", "*.bin"]
"""Patterns for files on the Hub with weights in a form that is not read."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device, and the origin of its values."""

    model: Any
    """A transformers PreTrainedModel, or a PeftModel around one."""
    spec: str
    folder: Path | None
    """The folder with its weights; None for a model that starts with random values."""
    adapter: Path | None = None
    """The folder with its adapter's values; None for a new adapter, or without one."""
    indexers: int = 0
    """Number of parameters in indexers of sparse attention, which were frozen."""

    def source(self, chain: Chain, *, seed: int) -> WeightSource:
        """Return the source of initial values for ``chain``, which was made from this model.

        Args:
            chain: the model as a chain.
            seed: seed of values that are drawn.
        """
        if self.folder is None:
            return InitSource(chain, seed)
        return SafetensorsSource(chain, self.folder, seed=seed, adapter=self.adapter)

    @property
    def commit(self) -> str:
        """Commit of a model from the Hub, or ``""``."""
        return "" if self.folder is None else commit_of(self.folder)

    def origin(self, *, seed: int) -> str:
        """Return a line about the origin of the model's values: random with ``seed``, or a folder with its files."""
        if self.folder is None:
            return f"random (seed {seed})"
        files = count_files(self.folder)
        name = f"{self.spec.partition('@')[0]} at commit {self.commit}" if self.commit else self.folder
        words = f"{name}, {files} safetensors file{'s' if files > 1 else ''}"
        if unread := unread_files(self.folder):
            words += f"; not read: {', '.join(unread)}"
        return words if self.adapter is None else f"{words}; adapter: {self.adapter}"

    def published_words(self, form: str) -> str:
        """Return a line about the form of quantised weights and their use in training, or ``""`` for dense weights.

        Args:
            form: form in which frozen matrices are stored and sent.
        """
        kept = form == PUBLISHED
        words = "" if self.folder is None else published_words(self.folder, kept=kept)
        use = (
            "frozen layers; others start from the widened values" if kept else "training starts from the widened values"
        )
        use = "frozen base" if self.adapter_settings else use
        more = " (--quantize)" if kept else f", rounded again to {form} (--quantize)" if form != NONE else ""
        return f"weights: {words}; {use}{more}" if words else ""

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """Settings of its adapter, by name; empty without an adapter."""
        return adapter_facts(self.model)

    @property
    def frozen_words(self) -> str:
        """Sentence about parameters that are frozen automatically, or ``""`` if there are none."""
        return frozen_words(self.indexers)

    @property
    def adapter_words(self) -> str:
        """Sentence about the modules that its adapter covers, or ``""`` without an adapter."""
        return adapter_words(self.model)

    def wide_words(self, chain: Chain, dtype: torch.dtype) -> str:
        """Return a line about parameters that the model keeps in 32 bits but computes in ``dtype``, or ``""``."""
        wide = set(wide_parameters(chain.model))
        if self.folder is not None:
            stored = SafetensorsSource(chain, self.folder, adapter=self.adapter).wide_parameters
            wide |= {name for name, _ in chain.model.named_parameters()} & set(stored)
        return wide_words(sorted(wide), dtype)

    @property
    def other_base_words(self) -> str:
        """Line about an adapter that was made on another base model, or ``""``."""
        return "" if self.adapter is None else other_base_words(self.adapter, self.spec.partition("@")[0])

    def dtype_on_disk(self, *, merge: bool) -> torch.dtype:
        """Return the dtype in which the model is exported by default: the dtype of the weights that it was loaded from.

        It is fp32 for a model with random values, and for an adapter alone, which is small and which ``peft`` keeps in
        fp32.

        Args:
            merge: True if an adapter is merged into the weights.
        """
        alone = bool(self.adapter_settings) and not merge
        return torch.float32 if self.folder is None or alone else stored_dtype(self.folder)


def build_model(
    spec: str,
    *,
    vocab_size: int | None = None,
    max_positions: int,
    longest: int | None = None,
    rope: RopeSettings = OWN_ROPE,
    lora: LoraSettings = NO_ADAPTER,
    frozen: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> BuiltModel:
    """Build the model that ``spec`` names on the meta device, without memory for its weights.

    Args:
        spec: a preset, a folder with config.json (and safetensors; without them values are random), or ``owner/name``
            on the Hub.
        vocab_size: number of tokens in the tokenizer. A preset takes it as its vocabulary. Any other model must have at
            least this number.
        max_positions: tokens in a row, for which a preset is made.
        longest: tokens of the longest document in a row; a row's tokens by default. Any other model must have positions
            for it.
        rope: rotary positions that replace the model's own.
        lora: settings of an adapter on the model.
        frozen: patterns for names of parameters that are not trained; see ``adapters.freeze``.
        trust_remote_code: run model code from the folder or the Hub.

    Raises:
        UserError: ``spec`` is unknown, the model is no causal LM, the tokenizer or the length does not fit the model,
            or an adapter or a pattern fits nothing.
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_model(spec)
    config = config_of(spec, folder, vocab_size, max_positions, longest, rope, trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise unsupported(spec, f"transformers cannot build it ({_first_line(error)})") from error
        raise unsupported(
            spec, f"expected a decoder-only causal language model; a {config.model_type} model is none"
        ) from error
    if folder is not None and (stops := stop_tokens(read_settings(folder, GENERATION))):
        model.generation_config.eos_token_id = stops  # as ``from_pretrained`` does
    check_rope(spec, model, rope)
    if folder is not None and (forms := published_forms(model, folder)):
        setattr(model, PUBLISHED_FORMS, forms)
    if lora.active:
        local = Path(spec).expanduser()
        base = str(local.resolve()) if local.is_dir() else spec.partition("@")[0]
        model = with_adapter(spec, model, lora, base, commit_of(folder) if folder is not None else "")
    freeze(inner_model(model), frozen)
    indexers = freeze_indexers(inner_model(model))
    adapter = Path(lora.adapter).expanduser() if lora.adapter else None
    return BuiltModel(model, spec, folder if folder is not None and has_weights(folder) else None, adapter, indexers)


def config_of(
    spec: str,
    folder: Path | None,
    vocab_size: int | None,
    max_positions: int,
    longest: int | None,
    rope: RopeSettings,
    trust_remote_code: bool,
) -> Any:
    """Return the config from which ``build_model`` makes a model, with the user's rotary positions.

    Args:
        folder: result of ``resolve_model`` for ``spec``; None for a preset.
        spec, vocab_size, max_positions, longest, rope, trust_remote_code: as in ``build_model``.

    Raises:
        UserError: the config cannot be read, or does not fit the tokenizer, the length or the rotary positions.
    """
    from transformers import AutoConfig, LlamaConfig

    longest = max_positions if longest is None else longest
    if folder is None:
        shape = PRESETS[spec] if vocab_size is None else {**PRESETS[spec], "vocab_size": vocab_size}
        config: Any = LlamaConfig(
            **shape, max_position_embeddings=max_positions, bos_token_id=None, eos_token_id=None, pad_token_id=None
        )
        apply_rope(spec, config, rope, row=max_positions, longest=longest)
        return config
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise unsupported(spec, f"its config.json cannot be used ({_first_line(error)})") from error
    apply_rope(spec, config, rope, row=max_positions, longest=longest)
    _check_fit(spec, config, vocab_size, max_positions, longest)
    return config


def text_config_of(spec: str, trust_remote_code: bool) -> Any:
    """Return the text part of a model's config, with the errors of ``build_model``."""
    return config_of(spec, resolve_model(spec), None, 1, 1, OWN_ROPE, trust_remote_code).get_text_config()


def resolve_model(spec: str) -> Path | None:
    """Return the local folder of a model, or None for a preset.

    Files on the Hub are downloaded into its cache.

    Raises:
        UserError: ``spec`` is no preset, no folder with a config.json, and no model that can be downloaded from the
            Hub; or its weights are in an unsupported form.
    """
    if spec in PRESETS:
        return None
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise unsupported(spec, "the folder must hold a config.json")
        check_weights(path)
        _ = quantization_of(path)
        return path
    expected = "expected a folder with config.json, owner/model or owner/model@revision on the Hub, or one of "
    expected += ", ".join(PRESETS)
    named = _HUB_NAME.fullmatch(spec)
    if path.exists() or named is None:
        raise unsupported(spec, expected)
    from huggingface_hub import snapshot_download

    name, revision = named.groups()
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_OTHER_FORMS)
        )
        _ = quantization_of(folder, name)  # refuses other forms before their weights are downloaded
        commit = commit_of(folder) or revision  # the branch may have a newer commit by now
        snapshot_download(name, revision=commit, allow_patterns=files_to_fetch(folder))
    except UserError:
        raise
    except Exception as error:  # its exceptions have no common base class
        raise unsupported(spec, f"{expected}; the Hub answered: {_first_line(error)}") from error
    if not has_weights(folder):
        target = name.rpartition("/")[2]
        way = f"if it has them in another form, {conversion(name, target)} writes them to {target}"
        raise unsupported(spec, f"a model on the Hub with safetensors, which this has not; {way}")
    return folder


def _check_fit(spec: str, config: Any, vocab_size: int | None, row: int, longest: int) -> None:
    """Raise UserError if the tokenizer's tokens or the row's documents do not fit the model."""
    text = config.get_text_config()
    if vocab_size is not None and vocab_size > text.vocab_size:
        raise UserError(
            "vocab_size",
            f"{vocab_size} tokens",
            f"the model {spec} has a vocabulary of {text.vocab_size}; use the tokenizer that belongs to it",
        )
    check_longest(spec, config, row, longest)


def longest_allowed(config: Any) -> int:
    """Return the largest document length in tokens that a model of this config has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def check_longest(spec: str, config: Any, row: int, longest: int) -> None:
    """Raise UserError if a row has documents longer than the model has positions for.

    Beyond this length a table would be read behind its end, and other models would compute on untrained positions.

    Args:
        spec: the model's name, for messages.
        config: the model's config.
        row: tokens in a row.
        longest: tokens of the longest document in a row.
    """
    if longest > (limit := longest_allowed(config)):
        rotary = getattr(config.get_text_config(), "rope_parameters", None)
        raise UserError(
            "sequence_length",
            row,
            f"at most {limit} for {spec} (max_position_embeddings in its config.json), as the longest document in a "
            f"row has {longest} tokens; or shorter documents"
            + (", or --rope.scaling and --rope.factor" if rotary else ""),
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
