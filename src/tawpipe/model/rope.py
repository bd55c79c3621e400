"""Applies the user's rotary positions to a model's config, before the model is built.

So the frequencies are right from the first step, and the exported config contains them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from tawpipe.errors import UserError
from tawpipe.model.refuse import rope_settings
from tawpipe.model.settings import RopeSettings, key_of
from tawpipe.model.shapes import head_size
from tawpipe.options.names import option_of

FULL = "full_attention"
_KEYS = {"theta": "rope_theta", "original_length": "original_max_position_embeddings"}
"""Settings whose name differs in transformers -> that name."""
_OTHER_THETAS = ("rotary_emb_base", "global_rope_theta")
"""Names of ``rope_theta`` in older configs of some families."""
_NEEDS = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
_OF_A_KIND = {
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
}
"""Config keys that belong to one kind of scaling and have no meaning for another kind."""
_REPLACED = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
"""Kinds of scaling that differ only in their frequencies, so that one can replace another."""


def apply_rope(spec: str, config: Any, rope: RopeSettings, *, row: int, longest: int) -> None:
    """Change the rotary positions in a model's config, and its number of positions.

    If kinds of layers have their own rotary positions, only layers with full attention are changed: a sliding window
    does not grow.

    Args:
        spec: the model's name, for messages.
        config: the model's config, changed in place.
        rope: the user's settings. Nothing is changed if all have their defaults.
        row: tokens in a row.
        longest: tokens of the longest document in a row.

    Raises:
        UserError: the model has no rotary positions, or its config contradicts the settings.
    """
    if not rope.changes:
        return
    rope.check()
    text = config.get_text_config()
    before = _own(spec, text, rope)
    positions = getattr(text, "max_position_embeddings", None) or 0
    if rope.scaling == "none":
        after: dict[str, Any] = {**before, "rope_theta": rope.theta}
        if after["rope_type"] == "longrope" and after.get("factor") is None:  # keeps the factor fixed
            after["factor"] = positions / after["original_max_position_embeddings"]
        positions = max(positions, row)
    else:
        after, positions = _scaled(spec, text, before, rope, positions, row, longest)
    nested = FULL in text.rope_parameters
    text.rope_parameters = {**text.rope_parameters, FULL: after} if nested else after
    text.max_position_embeddings = positions
    try:
        text.validate_rope()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("rope.scaling", rope.scaling, f"what {spec} can have ({error})") from error


def check_rope(spec: str, model: nn.Module, rope: RopeSettings) -> None:
    """Raise UserError if a model ignores rotary settings, because it has no rotary frequencies.

    Args:
        spec: the model's name, for messages.
        model: a model built from a config with these settings.
        rope: the user's settings.
    """
    if rope.changes and not any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        raise _without(spec, rope)


def rope_of(config: Any) -> dict[str, Any]:
    """Return a copy of the rotary positions in a model's config, to save in a run's state; empty without any."""
    return deepcopy(dict(getattr(config.get_text_config(), "rope_parameters", None) or {}))


def refuse_other_rope(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raise UserError if a run resumes from a checkpoint whose model had other rotary positions.

    Args:
        before: ``rope_of`` the model in the checkpoint; empty in checkpoints of earlier versions, which are accepted.
        now: ``rope_of`` the present model.
        where: name of the checkpoint, for the message.
    """
    if not before or before == now:
        return
    settings = {key: name for name, key in _KEYS.items()} | {"rope_type": "scaling"}
    for old, new in zip(rope_settings(before), rope_settings(now), strict=False):
        if keys := [key for key in {**new, **old} if old.get(key) != new.get(key)]:
            key = "rope_type" if "rope_type" in keys else keys[0]
            expected = f"{old.get(key)}, as in {where}; --model with an exported folder begins a run with other ones"
            raise UserError(key_of(settings.get(key, key)), new.get(key), expected)
    raise UserError("rope.scaling", now, f"{before}, as in {where}")


def rope_words(config: Any) -> str:
    """Return the rotary positions in a model's config as a line for the console."""
    text = config.get_text_config()
    words = [
        ", ".join(f"{key} {value}" for key, value in settings.items() if not isinstance(value, list | dict | None))
        for settings in rope_settings(text.rope_parameters)
    ]
    return f"{'; '.join(words)}; up to {text.max_position_embeddings} tokens"


def write_both_forms(content: dict[str, Any], rope: dict[str, Any] | None, *, changed: bool) -> None:
    """Write rotary settings into the content of a config in two forms: the present one and the one of transformers 4.

    The present form is ``rope_parameters``. The older form is ``rope_theta`` with ``rope_scaling``. Transformers 4 and
    many other programs read only this.

    Args:
        content: content of config.json, changed in place.
        rope: the settings. If kinds of layers have their own, the older form has no names for them, and only keys that
            already exist are updated.
        changed: True if the settings differ from the content, whose keys then get new values.
    """
    if not rope:
        return
    full = rope.get(FULL) or rope
    older: dict[str, Any] = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    scaling = {key: value for key, value in full.items() if key not in older}
    older["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    nested = not isinstance(rope.get("rope_type"), str)
    if changed:
        older |= {key: older["rope_theta"] for key in _OTHER_THETAS if "rope_theta" in older and key in content}
        content |= {key: value for key, value in older.items() if key in content or not nested}
    elif scaling.get("rope_type") == "longrope":  # transformers 4 accepts only three of its keys
        content.setdefault("rope_parameters", rope)
    elif not nested and "rope_theta" in older:
        for key, value in {"rope_parameters": rope, **older}.items():
            if value is not None:
                content.setdefault(key, value)


def _without(spec: str, rope: RopeSettings) -> UserError:
    """Return the error for rotary settings of a model whose config has no rotary positions."""
    name, value = next(iter(rope.parameters.items())) if rope.scaling == "none" else ("scaling", rope.scaling)
    return UserError(key_of(name), value, f"unset for {spec}, whose config has no rotary positions (rope_parameters)")


def _own(spec: str, text: Any, rope: RopeSettings) -> dict[str, Any]:
    """Return a copy of the rotary positions in a config; if kinds of layers have their own, those for full attention.

    Raises:
        UserError: the config has none.
    """
    parameters = getattr(text, "rope_parameters", None)
    if isinstance(parameters, dict) and FULL in parameters:
        parameters = parameters[FULL]
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_type"), str):
        raise _without(spec, rope)
    return deepcopy(parameters)


def _scaled(
    spec: str, text: Any, before: dict[str, Any], rope: RopeSettings, positions: int, row: int, longest: int
) -> tuple[dict[str, Any], int]:
    """Return the rotary positions with the user's scaling, and the number of positions that they cover.

    Args:
        spec: the model's name, for messages.
        text: the model's text config.
        before: rotary positions in the config.
        rope: the user's settings.
        positions: number of positions in the config.
        row: tokens in a row.
        longest: tokens of the longest document in a row.

    Raises:
        UserError: the model's scaling cannot be replaced, or the factor is missing or too small.
    """
    kind = before["rope_type"]
    if kind not in _REPLACED:
        raise UserError("rope.scaling", rope.scaling, f"none: the frequencies of {spec} are of its own kind, {kind}")
    same = kind == rope.scaling
    after = {key: value for key, value in before.items() if same or key not in _OF_A_KIND}
    after |= {"rope_type": rope.scaling} | {_KEYS.get(name, name): value for name, value in rope.parameters.items()}
    after.pop("type", None)
    original = _original_length(spec, text, before, rope, positions)
    factor = after.get("factor")
    if factor is None:
        wanted = f"at least {max(row / original, 1):g} for rows of {row} tokens, {original} before"
        raise UserError("rope.factor", "nothing", f"a number, which {rope.scaling} needs: {wanted}")
    covered = round(factor * original)
    if covered < positions:
        expected = f"at least {positions / original:g}: {spec} has positions for {positions} tokens already"
        raise UserError("rope.factor", factor, f"{expected}, and {original} before they were scaled")
    if covered < longest:
        expected = f"at least {longest / original:g}, as the longest document in a row has {longest} tokens"
        raise UserError("rope.factor", factor, f"{expected}, and the model had {original} positions before")
    after.pop("original_max_position_embeddings", None)
    if rope.scaling != "linear":
        after["original_max_position_embeddings"] = original
    _check_values(spec, text, rope.scaling, after)
    return after, covered


def _check_values(spec: str, text: Any, scaling: str, parameters: dict[str, Any]) -> None:
    """Raise UserError if a scaling lacks a value, or if values contradict each other or the size of heads."""
    for name in _NEEDS.get(scaling, ()):
        if parameters.get(name) is None:
            raise UserError(key_of(name), "nothing", f"given, as {scaling} needs it")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = (parameters.get(name) or {"beta_slow": 1, "beta_fast": 32}.get(name, 0) for name in (low, high))
        if (low in parameters or high in parameters) and not least < most:
            raise UserError(key_of(high), most, f"above {option_of(key_of(low))}, which is {least}")
    head = head_size(text)
    count = int(head * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != count:
            raise UserError(
                key_of(name), f"{len(parameters[name])} numbers", f"{count}, one for each frequency of {spec}"
            )


def _original_length(spec: str, text: Any, before: dict[str, Any], rope: RopeSettings, positions: int) -> int:
    """Return the context length in tokens before scaling, from the settings or the config.

    Raises:
        UserError: it is unknown, or settings and config contradict each other.
    """
    known = getattr(text, "original_max_position_embeddings", None) or before.get("original_max_position_embeddings")
    length = rope.original_length
    if length is not None:
        if known is not None and length != known:
            raise UserError("rope.original_length", length, f"{known}, as the config of {spec} says; or unset")
        if positions and length > positions:
            raise UserError("rope.original_length", length, f"at most {positions}, the positions that {spec} has")
        return length
    if known is None and (not positions or before["rope_type"] != "default"):
        expected = f"the context of {spec} before it was scaled ({before['rope_type']}), which its config does not say"
        raise UserError("rope.original_length", "nothing", expected)
    return known or positions
