"""Defaults that depend on what a run starts from: learning rate, steps, warm-up and weight decay.

A run trains random weights from scratch, fine-tunes a model with weights, or trains an adapter beside a frozen model.
Each start has its own defaults. A value that the user sets always wins, and a resumed run keeps its earlier values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.options import Open
from tawpipe.train.settings.config import TrainConfig

OPEN = ("learning_rate", "steps", "optimizer.warmup_steps", "optimizer.weight_decay")
"""Settings that a user may leave open, by their keys."""
RELATIVE = 100.0
"""Factor from AdamW's default learning rate to Adafactor's, which is relative to the size of a matrix's elements."""


@dataclass(frozen=True)
class Recipe:
    """Default values for one kind of start.

    Args:
        words: description of the run, for the console.
        epochs: passes over the training data; None for the default number of steps.
        warmup_share: share of all steps that belong to the warm-up; None for the default number of warm-up steps.
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
"""Recipe of each kind of start."""
HIGHEST = 1e-2
"""Highest default learning rate for Adafactor, as its authors use it."""
ADDS_TO_GRADIENT = ("adam", "sgd", "rmsprop")
"""Optimizers in which torch adds the weight decay to the gradient. Their default is no decay, as usual values are too
large there."""


def settle(
    config: TrainConfig, start: str, steps_in: Callable[[int], int | None], earlier: Mapping[str, Any] | None = None
) -> tuple[TrainConfig, str]:
    """Replace open settings by values, and return the settings with a line that names the chosen values.

    A value that the user has set wins. An open setting takes its value from ``earlier``, else from the recipe of
    ``start``.

    Args:
        start: one of ``RECIPES``.
        steps_in: returns the number of steps for a number of epochs; None if the length of the data is not known.
        earlier: values of the resumed run (see ``settled``); None for a new run.

    Returns:
        the settings, and the line for the console; the line is ``""`` if nothing was chosen here.

    Raises:
        UserError: ``epochs`` is set, but the number of steps in an epoch is not known.
    """
    recipe, optimizer, earlier = RECIPES[start], config.optimizer, earlier or {}
    choices: list[str] = []
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
        choices.append(f"learning rate {rate:g}".replace("e-0", "e-"))
    if isinstance(config.steps, Open):
        epochs = config.epochs or recipe.epochs
        steps = None if epochs is None else steps_in(epochs)
        if steps is None and config.epochs is not None:
            raise UserError("--epochs", config.epochs, "--steps with streamed data, whose length is unknown")
        if steps is None:
            steps = int(config.steps)
            choices.append(f"{steps} steps" + (" (the length of a stream is unknown)" if epochs else ""))
        else:
            choices.append(f"{epochs} epoch{'s' if epochs != 1 else ''} = {steps} steps")
        config = replace(config, steps=steps, epochs=None)
    if isinstance(config.optimizer.warmup_steps, Open):
        share = optimizer.warmup_ratio if optimizer.warmup_ratio is not None else recipe.warmup_share
        warmup = int(optimizer.warmup_steps) if share is None else min(config.steps, round(share * config.steps))
        if optimizer.warmup_ratio is None and share:
            warmup = max(1, warmup)
        config = _with(config, {"optimizer.warmup_steps": warmup})
        choices.append(f"warm-up {warmup} step{'s' if warmup != 1 else ''}")
    if isinstance(config.optimizer.weight_decay, Open):
        decay = 0.0 if optimizer.name in ADDS_TO_GRADIENT else recipe.weight_decay
        config = _with(config, {"optimizer.weight_decay": decay})
        choices.append(f"weight decay {decay:g}")
    config = replace(config, optimizer=replace(config.optimizer, warmup_ratio=None))
    return config, f"{', '.join(choices)}: {recipe.words}" if choices else ""


def settled(config: TrainConfig) -> dict[str, Any]:
    """Return the values of the settings in ``OPEN``, to be saved in checkpoints."""
    return {name: _get(config, name) for name in OPEN}


def _get(config: TrainConfig, name: str) -> Any:
    group, _, rest = name.rpartition(".")
    return getattr(getattr(config, group) if group else config, rest)


def _with(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    inside = {name.removeprefix("optimizer."): value for name, value in values.items() if "." in name}
    outside = {name: value for name, value in values.items() if "." not in name}
    return replace(config, **outside, optimizer=replace(config.optimizer, **inside))
