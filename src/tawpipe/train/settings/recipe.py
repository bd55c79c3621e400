"""Settings that a run chooses by what it starts from, where the user has left them open.

Random weights are trained from scratch, a model with weights is fine-tuned, an adapter is trained beside a frozen
model: each wants another learning rate, warm-up, weight decay and length. What a user sets always wins, and a resumed
run keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.options import Open
from tawpipe.train.settings.config import TrainConfig

OPEN = ("learning_rate", "steps", "optimizer.warmup_steps", "optimizer.weight_decay")
"""The settings that may be left open."""
RELATIVE = 100.0
"""Adafactor's learning rate is a share of a matrix's usual element, not a step: so many times AdamW's."""


@dataclass(frozen=True)
class Recipe:
    """The choice for one kind of start.

    Args:
        words: what the run does, for the console.
        epochs: None for so many steps as is usual.
        warmup_share: of all steps; None for so many steps as is usual.
    """

    words: str
    learning_rate: float
    weight_decay: float
    epochs: int | None
    warmup_share: float | None


RECIPES = {
    "random": Recipe("training from random weights", 2e-3, 0.1, None, None),
    "weights": Recipe("fine-tuning of a model with weights", 1e-5, 0.0, 2, 0.03),
    "adapter": Recipe("training of an adapter", 2e-4, 0.0, 3, 0.03),
}
"""By what a run starts from."""
HIGHEST = 1e-2
"""Of Adafactor's learning rates, as its authors have it."""
ADDS_TO_GRADIENT = ("adam", "sgd", "rmsprop")
"""Optimizers whose decay torch adds to the gradient, where a usual one is out of proportion."""


def settle(
    config: TrainConfig, start: str, steps_in: Callable[[int], int | None], earlier: Mapping[str, Any] | None = None
) -> tuple[TrainConfig, str]:
    """The settings with nothing left open, and a line that says what was chosen, and why; empty if nothing was.

    Args:
        start: one of ``RECIPES``.
        steps_in: steps in which the data is seen so many times; None where nobody knows.
        earlier: what the run that is gone on with had (``settled``).

    Raises:
        UserError: steps are counted in passes of data whose length nobody knows.
    """
    recipe, optimizer, earlier = RECIPES[start], config.optimizer, earlier or {}
    said: list[str] = []
    known = {name: value for name, value in earlier.items() if name in OPEN and isinstance(_get(config, name), Open)}
    if config.epochs is not None:
        known.pop("steps", None)
    if optimizer.warmup_ratio is not None:
        known.pop("optimizer.warmup_steps", None)
    config = _with(config, known)
    if isinstance(config.learning_rate, Open):
        rate = recipe.learning_rate
        if optimizer.name == "adafactor":
            rate = min(HIGHEST, RELATIVE * rate)
        config = replace(config, learning_rate=rate)
        said.append(f"learning rate {rate:g}".replace("e-0", "e-"))
    if isinstance(config.steps, Open):
        epochs = config.epochs or recipe.epochs
        steps = None if epochs is None else steps_in(epochs)
        if steps is None and config.epochs is not None:
            raise UserError("--epochs", config.epochs, "--steps with streamed data, whose length is unknown")
        if steps is None:
            steps = int(config.steps)
            said.append(f"{steps} steps" + (" (the length of a stream is unknown)" if epochs else ""))
        else:
            said.append(f"{epochs} epoch{'s' if epochs != 1 else ''} = {steps} steps")
        config = replace(config, steps=steps, epochs=None)
    if isinstance(config.optimizer.warmup_steps, Open):
        share = optimizer.warmup_ratio if optimizer.warmup_ratio is not None else recipe.warmup_share
        warmup = int(optimizer.warmup_steps) if share is None else min(config.steps, round(share * config.steps))
        if optimizer.warmup_ratio is None and share:
            warmup = max(1, warmup)
        config = _with(config, {"optimizer.warmup_steps": warmup})
        said.append(f"warm-up {warmup} step{'s' if warmup != 1 else ''}")
    if isinstance(config.optimizer.weight_decay, Open):
        decay = 0.0 if optimizer.name in ADDS_TO_GRADIENT else recipe.weight_decay
        config = _with(config, {"optimizer.weight_decay": decay})
        said.append(f"weight decay {decay:g}")
    config = replace(config, optimizer=replace(config.optimizer, warmup_ratio=None))
    return config, f"{', '.join(said)}: {recipe.words}" if said else ""


def settled(config: TrainConfig) -> dict[str, Any]:
    """What is settled in a run, for its checkpoints."""
    return {name: _get(config, name) for name in OPEN}


def _get(config: TrainConfig, name: str) -> Any:
    group, _, rest = name.rpartition(".")
    return getattr(getattr(config, group) if group else config, rest)


def _with(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    inside = {name.removeprefix("optimizer."): value for name, value in values.items() if "." in name}
    outside = {name: value for name, value in values.items() if "." not in name}
    return replace(config, **outside, optimizer=replace(config.optimizer, **inside))
