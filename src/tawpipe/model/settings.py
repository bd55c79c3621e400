"""The settings of a model, rotary positions and adapters, as dataclasses that the command line shows as options without
loading torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tawpipe.errors import UserError
from tawpipe.options import bounded

PRESET_NAMES = ("tiny", "small-125m", "llama-1b", "llama-8b")
"""Models with random values, by their names; see ``build.PRESETS``."""
TAKES: dict[str, tuple[str, ...]] = {
    "none": ("theta",),
    "linear": ("theta", "factor", "original_length"),
    "yarn": ("theta", "factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("theta", "factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "longrope": ("theta", "factor", "original_length", "short_factor", "long_factor", "attention_factor"),
}
"""Scaling -> the settings that it takes."""


@dataclass(frozen=True)
class RopeSettings:
    """Rotary positions other than in the model's config, to extend its context. A setting that is null or empty stays
    as the model's config has it, if that is scaled in the same way."""

    theta: float | None = bounded(None, above=1)
    """Base of the wavelengths."""
    scaling: Literal["none", "linear", "yarn", "llama3", "longrope"] = "none"
    """Scaling of the frequencies: none leaves the model's own. The others are those of transformers."""
    factor: float | None = bounded(None, minimum=1)
    """The context times so much. max_position_embeddings becomes factor x original_length."""
    original_length: int | None = bounded(None, minimum=2)
    """Tokens of the context before it was scaled. null takes what the model's config says."""
    low_freq_factor: float | None = bounded(None, above=0)
    """llama3: wavelengths above original_length / low_freq_factor are scaled (1 in Llama 3.1)."""
    high_freq_factor: float | None = bounded(None, above=0)
    """llama3: wavelengths below original_length / high_freq_factor are not scaled (4 in Llama 3.1)."""
    beta_fast: float | None = bounded(None, above=0)
    """yarn: what turns more often than this in original_length is not scaled. null keeps the
    model's own, else 32."""
    beta_slow: float | None = bounded(None, above=0)
    """yarn: what turns less often than this in original_length is scaled by the whole factor. null keeps
    the model's own, else 1."""
    attention_factor: float | None = bounded(None, above=0)
    """yarn, longrope: multiplies cosines and sines. null keeps the number that the model's config gives under the same
    scaling, whatever the new factor is; without such a number it follows from the factor."""
    short_factor: list[float] = field(default_factory=list)
    """longrope: divisor of every frequency in documents up to original_length."""
    long_factor: list[float] = field(default_factory=list)
    """longrope: divisor of every frequency in longer documents."""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that say something, besides ``scaling``."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "scaling"}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @property
    def changes(self) -> bool:
        """True if anything is to be other than in the model's config."""
        return self != RopeSettings()

    def check(self) -> None:
        """Raise UserError for values that cannot work with any model."""
        for name, value in self.given.items():
            if name not in TAKES[self.scaling]:
                kinds = " or ".join(kind for kind, names in TAKES.items() if name in names)
                raise UserError(key_of(name), value, f"unset under --rope.scaling {self.scaling}; it is for {kinds}")
            if isinstance(value, list) and not all(math.isfinite(number) and number > 0 for number in value):
                raise UserError(key_of(name), value, "numbers above 0")


def key_of(name: str) -> str:
    """A field of ``RopeSettings`` as a setting."""
    return f"rope.{name}"


ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA adapter (peft) on weights that are frozen, so that it alone is trained."""

    rank: int | None = bounded(None, minimum=1)
    """Rank of the adapter's matrices. null for no adapter, or for that of lora.adapter."""
    alpha: int | None = bounded(None, minimum=1)
    """What the adapter adds is scaled by alpha / rank. null for twice the rank, or for that of lora.adapter."""
    dropout: float | None = bounded(None, minimum=0, below=1)
    """Share of the adapter's inputs that is dropped in training. null for 0, or for that of lora.adapter."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Modules that get an adapter, by the ends of their names (target_modules of peft): q_proj v_proj. all-linear means
    all linear layers but the head, or those of lora.adapter; experts that are one tensor are no linear layers."""
    dora: bool = False
    """DoRA: the norms of the adapted weights are trained besides."""
    rslora: bool = False
    """rsLoRA: scale by alpha / sqrt(rank)."""
    adapter: str = ""
    """A folder with a LoRA adapter of peft to go on from, with its values and its settings. Empty for a new one."""

    @property
    def active(self) -> bool:
        """True if there is an adapter."""
        return self.rank is not None or bool(self.adapter)

    def check(self) -> None:
        """Raise UserError for values that cannot work with any model."""
        if not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1):
            raise UserError("lora.targets", self.targets, f"names of modules, or {ALL_LINEAR} alone")
        if self.active:
            return
        for setting in fields(self):
            if (value := getattr(self, setting.name)) != getattr(LoraSettings(), setting.name):
                raise UserError(f"lora.{setting.name}", value, "unset without --lora.rank or --lora.adapter")
