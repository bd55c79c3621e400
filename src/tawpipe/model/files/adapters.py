"""LoRA adapters and frozen parameters, as settings ask for them, and the values of adapters in ``peft`` folders.

Adapters are put on a model on the meta device, before it becomes a chain."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.model.experts.adapted import stacked_experts
from tawpipe.model.refuse import unsupported
from tawpipe.model.settings import ALL_LINEAR, EXPERTS, LoraSettings
from tawpipe.model.units import base_name
from tawpipe.model.weights import canonical_names, is_adapter

if TYPE_CHECKING:
    from tawpipe.model.chain import Chain

CONFIG, VALUES = "adapter_config.json", "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base weights unchanged."""
_MORE_THAN_LORA = (
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)


def with_adapter(spec: str, model: nn.Module, lora: LoraSettings, base: str, commit: str = "") -> Any:
    """Put a LoRA adapter on ``model`` with ``peft``, and return the wrapped model. Only the adapter is trained.

    The adapter is new, or has the config of the folder ``lora.adapter``. It has no values yet. ``model`` is changed in
    place.

    Args:
        spec: the model as the user named it.
        model: the model, on the meta device.
        lora: settings of the adapter.
        base: path or Hub name of the base model, for the adapter's config.
        commit: commit of the base model on the Hub.

    Raises:
        UserError: ``peft`` is not installed, the model lacks a target, or an adapter folder contradicts the settings.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError("lora.rank", lora.rank, f"the package peft: {install_hint('peft')}") from error
    if lora.adapter:
        config = _config_of(lora)
    else:
        assert lora.rank is not None
        modules, experts = _split_targets(spec, model, lora.targets)
        for name, value in (("dropout", lora.dropout), ("dora", lora.dora), ("expert_rank", lora.expert_rank)):
            if value and bool(experts) != (name == "expert_rank"):
                expected = f"unset {'with' if experts else 'without'} experts among the targets (lora.targets)"
                raise UserError(f"lora.{name}", value, expected)
        rank = lora.expert_rank or lora.rank
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
            lora_dropout=lora.dropout or 0.0,
            target_modules=modules,
            target_parameters=experts or None,
            rank_pattern=dict.fromkeys(experts, rank) if rank != lora.rank else {},
            alpha_pattern=dict.fromkeys(experts, 2 * rank) if rank != lora.rank and lora.alpha is None else {},
            use_dora=lora.dora,
            use_rslora=lora.rslora,
            task_type="CAUSAL_LM",
        )
    named = set(config.target_parameters or ())
    setting = ("lora.adapter", lora.adapter) if lora.adapter else ("lora.targets", lora.targets)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about renamed and tied base models, which exports check
        try:
            adapted: Any = get_peft_model(model, config)
        except ValueError as error:
            raise UserError(*setting, f"modules of {spec} that peft can adapt ({error})") from error
    config.base_model_name_or_path, config.revision = base, commit or None
    if more := set(config.target_parameters or ()) - named:
        expected = f"other modules: peft takes these for experts, which are one tensor each in {spec} ({min(more)})"
        raise UserError(*setting, f"{expected}; {EXPERTS} adapts them")
    return adapted


def _config_of(lora: LoraSettings) -> Any:
    """Return the config of the adapter folder ``lora.adapter``, prepared to continue its training.

    Raises:
        UserError: the folder contains no LoRA adapter that can be trained, or contradicts a setting.
    """
    from peft import PeftConfig

    folder = Path(lora.adapter).expanduser()
    check_adapter(folder)
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("lora.adapter", lora.adapter, f"a readable {CONFIG} ({error})") from error
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise UserError("lora.adapter", lora.adapter, f"a LoRA adapter; this one is {kind}")
    if more := [name for name in _MORE_THAN_LORA if getattr(config, name, None)]:
        raise UserError("lora.adapter", lora.adapter, f"LoRA alone; this one has {', '.join(more)}")
    if config.init_lora_weights not in _PLAIN_STARTS:
        how = "save_pretrained(..., path_initial_model_for_weight_conversion=...) of peft converts it"
        changed = f"its start ({config.init_lora_weights}) changed the base model's weights"
        raise UserError("lora.adapter", lora.adapter, f"an adapter of the plain base model; {changed}; {how}")
    for setting, value, has in (
        ("rank", lora.rank, config.r),
        ("expert_rank", lora.expert_rank, _expert_rank(config)),
        ("alpha", lora.alpha, config.lora_alpha),
        ("targets", None if {*lora.targets} <= {ALL_LINEAR, EXPERTS} else sorted(lora.targets), _targets(config)),
        ("dora", lora.dora or None, config.use_dora),
        ("rslora", lora.rslora or None, config.use_rslora),
    ):
        if value not in (None, has):
            raise UserError(f"lora.{setting}", value, f"{has} as in {lora.adapter}, or unset")
    if lora.dropout is not None:
        config.lora_dropout = lora.dropout
    config.inference_mode, config.init_lora_weights = False, True
    return config


def check_adapter(folder: Path) -> None:
    """Raise UserError if a folder contains no adapter in a supported form."""
    if not (folder / CONFIG).is_file():
        raise UserError("lora.adapter", str(folder), f"a folder of peft with {CONFIG} and {VALUES}")
    if not (folder / VALUES).is_file():
        raise UserError(
            "lora.adapter", str(folder), f"{VALUES} in it; save_pretrained of peft writes it, from other forms too"
        )


def _targets(config: Any) -> list[str]:
    """Return the names of the modules and of the parameters that a config of ``peft`` adapts."""
    names = config.target_modules or []
    return sorted({*([names] if isinstance(names, str) else names), *(config.target_parameters or ())})


def _expert_rank(config: Any) -> int | None:
    """Return the largest rank of each expert's adapters in a config of ``peft``, or None without such adapters."""
    from peft.utils.other import get_pattern_key

    ranks = config.rank_pattern
    return max((ranks.get(get_pattern_key(ranks, n), config.r) for n in config.target_parameters or ()), default=None)


def _split_targets(spec: str, model: nn.Module, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of modules and of stacked experts for ``peft``, from the targets in the settings.

    Raises:
        UserError: the model lacks a target.
    """
    stacked = stacked_experts(model)
    ends = {target: [name for name in stacked if f".{name}".endswith(f".{target}")] for target in targets}
    ends |= {EXPERTS: stacked} if EXPERTS in ends else {}
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    of_experts = {target: names for target, names in ends.items() if names and target not in modules - {EXPERTS}}
    experts = sorted({name for names in of_experts.values() for name in names})
    if EXPERTS in ends and not experts:
        expected = f"names of modules: {spec} has no experts that are stacked in a form that can have adapters"
        raise UserError("lora.targets", EXPERTS, expected)
    others = [target for target in targets if target not in of_experts]
    _check_targets(spec, model, [target for target in others if target != ALL_LINEAR])
    linear = _linear_layers(model) if ALL_LINEAR in others else []
    return sorted({*others, *linear} - {ALL_LINEAR}), experts


def _check_targets(spec: str, model: nn.Module, targets: Sequence[str]) -> None:
    """Raise UserError for target names that the model lacks: ``peft`` ignores them if another target exists."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D, nn.Embedding)
    known = {name: isinstance(module, kinds) for name, module in model.named_modules() if name}
    ends = sorted({name.rpartition(".")[2] for name, fits in known.items() if fits} - {""})
    for target in targets:
        each_fits = [fits for name, fits in known.items() if name == target or name.endswith(f".{target}")]
        if each_fits and all(each_fits):
            continue
        near = difflib.get_close_matches(target, ends, n=1)
        words = f"the end of a linear layer's name in {spec}: {', '.join(ends)}; or {ALL_LINEAR}"
        if experts := stacked_experts(model):
            words += f"; or {EXPERTS}, or one of them: {', '.join(experts)}"
        raise UserError("lora.targets", target, words + (f"; did you mean {near[0]}?" if near else ""))


def _linear_layers(model: Any) -> list[str]:
    """Return the ends of the names of all linear layers except the head, as short as they are unambiguous.

    Names are left out that ``peft`` would take for experts, in a model that stores experts as one tensor; dense layers
    may have such names."""
    from transformers.pytorch_utils import Conv1D

    names = [name for name, _ in model.named_modules()]
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    others = set(names) - set(linear)

    def shortest(name: str) -> str:
        """Return the shortest end of ``name`` that is not the end of any other kind of module's name."""
        ends = [name]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        clear = (end for end in reversed(ends) if not any(path == end or path.endswith(f".{end}") for path in others))
        return next(clear, name)

    return sorted(end for end in {shortest(name) for name in linear} if not _means_experts(model, end))


def _means_experts(model: nn.Module, name: str) -> bool:
    """Return True if ``peft`` takes a module name for experts, which were modules in earlier transformers."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an earlier peft renames nothing
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # one of two modules that became one
        return True
    return bool(config.target_parameters)


def other_base_words(adapter: Path, spec: str) -> str:
    """Return a line with both names if an adapter was made on another base than ``spec``, or ``""``.

    A base on another machine, or in a cache of the Hub, is recognised by the end of its name."""
    adapter_base = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path") or spec
    if Path(adapter_base).expanduser().resolve() == Path(spec).expanduser().resolve():
        return ""
    if all(theirs == ours for theirs, ours in zip(_ends(adapter_base), _ends(spec), strict=False)):
        return ""
    return f"{adapter} was made on {adapter_base}; this run's base is {spec}"


def _ends(name: str) -> list[str]:
    """Return the parts of a base's name that identify it, the last part first.

    >>> _ends("Org/Name"), _ends("/cache/models--org--name/snapshots/1a"), _ends("/data/Name"), _ends("runs/a/model")
    (['name', 'org'], ['name', 'org'], ['name'], ['model', 'a'])
    """
    path = Path(name)
    hub = next((part for part in path.parts if part.startswith("models--")), "")
    parts = hub.split("--")[1:] or [part.lower() for part in path.parts]
    is_whole = hub or (len(parts) == 2 and not path.is_dir()) or parts[-1:] == ["model"]  # a run's export
    return [part.lower() for part in reversed(parts[-2:] if is_whole else parts[-1:])]


def adapter_words(outer_model: Any) -> str:
    """Return a sentence about the modules that an adapter covers, or ``""`` for a model without adapter."""
    if not (facts := adapter_facts(outer_model)):
        return ""
    model = outer_model.get_base_model()
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "reset_lora_parameters")]
    experts = [module for _, module in layers if hasattr(module, "parameter_name")]
    ends = sorted({name.rpartition(".")[2] for name, module in layers if not hasattr(module, "parameter_name")})
    ends += sorted({f"experts.{module.parameter_name}" for module in experts})
    kinds = [word for word, used in (("DoRA", facts["dora"]), ("rsLoRA", facts["rslora"])) if used]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    alphas = {alpha for module in experts for alpha in module.lora_alpha.values()}
    each = f" (experts: {facts['expert_rank']} each, alpha {max(alphas)})" if experts else ""
    words = (
        f"{' and '.join(kinds) or 'LoRA'} of rank {facts['rank']}, alpha {facts['alpha']}{each}, on {len(layers)} "
        f"modules ({', '.join(ends)}): {trained:,} parameters"
    )
    without = not experts and ", ".join(stacked_experts(model))
    words += f"; the experts ({without}) get none (--lora.targets all-linear experts)" if without else ""
    dense = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear} - set(ends)
    left = ", ".join(sorted(name for name in dense if _means_experts(model, name)))
    return words + (f"; dense layers named {left} get none: peft takes these names for experts" if left else "")


def adapter_facts(model: Any) -> dict[str, Any]:
    """Return the settings of a model's LoRA adapter, by name; empty for a model without adapter."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return {}
    config = configs[model.active_adapter]
    ranks = [rank for module in model.modules() if hasattr(module, "parameter_name") for rank in module.r.values()]
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "targets": _targets(config),
        "dora": bool(config.use_dora),
        "rslora": bool(config.use_rslora),
    } | ({"expert_rank": max(ranks)} if ranks else {})


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern, in place (``requires_grad_(False)``).

    Args:
        model: the model, without a ``peft`` wrapper.
        patterns: patterns with ``*``, ``?`` and ``[...]``. Each must match the whole name of a parameter, or of a
            module that contains it. Names are compared as in the model without an adapter (``q_proj.weight``, not
            ``q_proj.base_layer.weight``).

    Raises:
        UserError: a pattern matches nothing, or no parameter is left to train.
    """
    canonical = canonical_names(model)
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        named = {canonical[name] for name in _named(canonical, pattern)}
        if not named:
            names = sorted({base_name(name) for name in canonical})
            near = _near(pattern, names)
            raise UserError(
                "freeze", pattern, f"a pattern of names of parameters, or of modules, for example {', '.join(near)}"
            )
        for name in named:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("freeze", " ".join(patterns), "patterns that leave a parameter to train")


def _named(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names in ``names`` of parameters that equal ``pattern``, or whose module's name equals it.

    If there are none, return the names that match ``pattern`` with its wildcards. Names are compared without an
    adapter's ``base_layer``."""
    holders = {name: list(_with_holders(base_name(name))) for name in names}
    named = [name for name in holders if pattern in holders[name]]
    return named or [name for name in holders if any(fnmatchcase(holder, pattern) for holder in holders[name])]


def _with_holders(name: str) -> Iterator[str]:
    """Yield a parameter's name, and the names of the modules that contain it.

    >>> list(_with_holders("model.norm.weight"))
    ['model.norm.weight', 'model.norm', 'model']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Return three names of parameters or modules that are most similar to ``pattern``, for messages."""
    holders = list(dict.fromkeys(holder for name in names for holder in _with_holders(name)))
    word = re.sub(r"[*?\[\]]", "", pattern).strip(".")
    by_end = {holder: difflib.SequenceMatcher(None, word, holder[-max(len(word), 1) :]).ratio() for holder in holders}
    return sorted(holders, key=lambda holder: (-by_end[holder], len(holder)))[:3]


class AdapterValues:
    """Values of an adapter's parameters in a ``peft`` folder.

    Args:
        chain: the model with its adapter.
        folder: the ``peft`` folder.

    Raises:
        UserError: the folder's tensors do not fit the chain's adapter.
    """

    def __init__(self, chain: Chain, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = folder / VALUES
        self._keys = _keys_on_disk(chain)
        shapes = {slot.name: slot.shape for unit in chain.units for slot in unit.slots}
        try:
            with safe_open(self._path, framework="pt") as file:
                stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError("lora.adapter", str(folder), f"a readable {VALUES} ({error})") from error
        for what, keys in (
            ("lacks", [key for key in self._keys.values() if key not in stored]),
            ("has besides", sorted(set(stored) - set(self._keys.values()))),
        ):
            if keys:
                more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                raise UserError(
                    "lora.adapter", str(folder), f"an adapter of {chain.name}; this one {what} {keys[0]}{more}"
                )
        for name, key in self._keys.items():
            if stored[key] != shapes[name]:
                sizes = f"{key} is {list(stored[key])} there and {list(shapes[name])} here"
                sizes += " (the number of experts is a factor)" if ".experts." in name else ""
                raise UserError("lora.adapter", str(folder), f"an adapter of this model: {sizes}")

    def parameter(self, name: str) -> Tensor:
        """Return the value of one adapter parameter as stored, by its canonical name in the model."""
        from safetensors import safe_open

        with safe_open(self._path, framework="pt") as file:
            return file.get_tensor(self._keys[name])


def _keys_on_disk(chain: Chain) -> dict[str, str]:
    """Return canonical name of every adapter parameter -> its name in a ``peft`` folder.

    Raises:
        UserError: ``peft`` does not save a parameter.
    """
    from peft import get_peft_model_state_dict

    peft_model: Any = chain.outer_model
    prefix = next(name for name, module in peft_model.named_modules() if module is chain.model)
    names = [name for name, _ in chain.model.named_parameters() if is_adapter(chain.model, name)]
    marks = {name: torch.empty(0, device="meta") for name in names}
    state = get_peft_model_state_dict(
        peft_model,
        {f"{prefix}.{name}": mark for name, mark in marks.items()},
        adapter_name=peft_model.active_adapter,
        save_embedding_layers=False,
    )
    keys = {id(mark): key for key, mark in state.items()}
    if lost := [name for name in names if id(marks[name]) not in keys]:
        raise unsupported(lost[0], "peft does not save it")
    return {name: keys[id(mark)] for name, mark in marks.items()}
