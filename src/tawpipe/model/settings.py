"""Settings of a model, its rotary positions and its adapter, as dataclasses.

The command line shows them as options without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tawpipe.errors import UserError
from tawpipe.options import bounded

PRESET_NAMES = ("tiny", "small-125m", "llama-1b", "llama-8b")
"""Names of the models that start with random values; ``build.PRESETS`` has their sizes."""
TAKES: dict[str, tuple[str, ...]] = {
    "none": ("theta",),
    "linear": ("theta", "factor", "original_length"),
    "yarn": ("theta", "factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("theta", "factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "longrope": ("theta", "factor", "original_length", "short_factor", "long_factor", "attention_factor"),
}
"""Scaling of the rotary positions -> names of the settings that can be set with it."""


@dataclass(frozen=True)
class RopeSettings:
    """Rotary positions that replace those in the model's config, for example to extend its context.

    A setting that is null or empty keeps the value of the model's config, if the config uses the same scaling."""

    theta: float | None = bounded(None, above=1)
    """Base of the wavelengths (rope_theta)."""
    scaling: Literal["none", "linear", "yarn", "llama3", "longrope"] = "none"
    """Scaling of the frequencies: none keeps the scaling of the model's config. linear, yarn, llama3 and longrope are
    the kinds of transformers."""
    factor: float | None = bounded(None, minimum=1)
    """Factor by which the context grows. max_position_embeddings becomes factor x original_length."""
    original_length: int | None = bounded(None, minimum=2)
    """Context length in tokens before scaling. null takes the length in the model's config."""
    low_freq_factor: float | None = bounded(None, above=0)
    """llama3: wavelengths above original_length / low_freq_factor are scaled (1 in Llama 3.1)."""
    high_freq_factor: float | None = bounded(None, above=0)
    """llama3: wavelengths below original_length / high_freq_factor are not scaled (4 in Llama 3.1)."""
    beta_fast: float | None = bounded(None, above=0)
    """yarn: frequencies with more turns than this in original_length tokens are not scaled. null keeps the value of the
    model's config, or takes 32 if there is none."""
    beta_slow: float | None = bounded(None, above=0)
    """yarn: frequencies with fewer turns than this in original_length tokens are scaled by the whole factor. null keeps
    the value of the model's config, or takes 1 if there is none."""
    attention_factor: float | None = bounded(None, above=0)
    """yarn, longrope: factor on cosines and sines. null keeps the number in the model's config if the scaling is the
    same, also with a new factor. Without such a number it is computed from the factor."""
    short_factor: list[float] = field(default_factory=list)
    """longrope: one divisor for each frequency, in documents of up to original_length tokens."""
    long_factor: list[float] = field(default_factory=list)
    """longrope: one divisor for each frequency, in documents longer than original_length tokens."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings that have a value (neither None nor empty), by name, without ``scaling``."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "scaling"}
        return {name: value for name, value in values.items() if value not in (None, [])}

    @property
    def changes(self) -> bool:
        """True if any setting differs from its default, so that the model's config must be changed."""
        return self != RopeSettings()

    def check(self) -> None:
        """Raise UserError for settings that cannot work with any model.

        A setting must belong to the chosen ``scaling`` (see ``TAKES``), and numbers in lists must be finite and above
        0."""
        for name, value in self.parameters.items():
            if name not in TAKES[self.scaling]:
                kinds = " or ".join(kind for kind, names in TAKES.items() if name in names)
                raise UserError(key_of(name), value, f"unset under --rope.scaling {self.scaling}; it is for {kinds}")
            if isinstance(value, list) and not all(math.isfinite(number) and number > 0 for number in value):
                raise UserError(key_of(name), value, "numbers above 0")


def key_of(name: str) -> str:
    """Return the full setting name of the field ``name`` of ``RopeSettings``, for example ``rope.factor``."""
    return f"rope.{name}"


@dataclass(frozen=True)
class ExpertSettings:
    """Mixtures of experts."""

    balance: Literal["none", "auto"] | float | None = bounded(None, minimum=0)
    """Coefficient of a loss that spreads tokens evenly over experts, layer by layer. auto takes the coefficient in the
    model's config (router_aux_loss_coef). null means auto if output_router_logits is true in the config, else none.
    metrics.jsonl gets balance_loss and busiest_expert; with 0 they are measured, and nothing else changes."""


ALL_LINEAR, EXPERTS = "all-linear", "experts"


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA adapter (peft): the model's own weights are frozen, and only the adapter is trained."""

    rank: int | None = bounded(None, minimum=1)
    """Rank of the adapter's matrices. null trains without an adapter, or keeps the rank of lora.adapter."""
    alpha: int | None = bounded(None, minimum=1)
    """Scale of the adapter: its output is multiplied by alpha / rank. null takes twice the rank, or keeps the alpha of
    lora.adapter."""
    dropout: float | None = bounded(None, minimum=0, below=1)
    """Dropout probability of the adapter's inputs in training. null takes 0, or keeps the dropout of lora.adapter."""
    expert_rank: int | None = bounded(None, minimum=1)
    """Rank of each expert's adapter, for targets that are experts. null takes rank."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Modules that get an adapter, by the ends of their names (target_modules of peft), for example q_proj v_proj.
    all-linear means all linear layers except the head, or the targets of lora.adapter. experts means the experts of a
    mixture that are stacked in one tensor, also beside others (all-linear experts). The end of such a tensor's name,
    for example experts.down_proj, names only that tensor (target_parameters of peft)."""
    dora: bool = False
    """Use DoRA: also train the norms of the adapted weights."""
    rslora: bool = False
    """Use rsLoRA: scale the adapter's output by alpha / sqrt(rank)."""
    adapter: str = ""
    """Folder with a LoRA adapter of peft whose training is continued, with its values and its settings. Empty starts a
    new adapter."""

    @property
    def active(self) -> bool:
        """True if an adapter is trained: ``rank`` or ``adapter`` is set."""
        return self.rank is not None or bool(self.adapter)

    def check(self) -> None:
        """Raise UserError for settings that cannot work with any model.

        ``targets`` must not be empty. Other settings need ``rank`` or ``adapter``."""
        if not self.targets:
            raise UserError("lora.targets", self.targets, f"names of modules, or {ALL_LINEAR}, or {EXPERTS}")
        if self.active:
            return
        for setting in fields(self):
            if (value := getattr(self, setting.name)) != getattr(LoraSettings(), setting.name):
                raise UserError(f"lora.{setting.name}", value, "unset without --lora.rank or --lora.adapter")
