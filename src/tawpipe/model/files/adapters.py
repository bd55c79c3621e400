"""LoRA adapters and frozen parameters as settings ask for them, put on a model on the meta device before it becomes a
chain; and the values of adapters in folders of peft.
"""

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
from tawpipe.model.refuse import unsupported
from tawpipe.model.settings import ALL_LINEAR, LoraSettings
from tawpipe.model.weights import base_name, canonical_names, is_adapter

if TYPE_CHECKING:
    from tawpipe.model.chain import Chain

CONFIG, VALUES = "adapter_config.json", "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights with which the base weights stay as they are."""
_MORE_THAN_LORA = (
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
)


def with_adapter(spec: str, model: nn.Module, lora: LoraSettings, base: str, commit: str = "") -> Any:
    """The model with the adapter that the settings ask for, all else frozen, as ``peft`` makes it.

    Args:
        spec: the model as the user named it.
        base: where others find it, for the adapter's config.
        commit: of the base on the Hub.

    Raises:
        UserError: a target that the model has not, or an adapter folder that does not fit the settings.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError("lora.rank", lora.rank, f"the package peft: {install_hint('peft')}") from error
    if lora.adapter:
        config = _config_of(lora)
    else:
        assert lora.rank is not None
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
            lora_dropout=lora.dropout or 0.0,
            target_modules=_linear_layers(model) if lora.targets == [ALL_LINEAR] else sorted(lora.targets),
            use_dora=lora.dora,
            use_rslora=lora.rslora,
            task_type="CAUSAL_LM",
        )
        _check_targets(spec, model, lora.targets)
    setting = ("lora.adapter", lora.adapter) if lora.adapter else ("lora.targets", lora.targets)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of base models that are renamed, and of tied ones: exports look at these
        try:
            adapted: Any = get_peft_model(model, config)
        except ValueError as error:
            raise UserError(*setting, f"modules of {spec} that peft can adapt ({error})") from error
    config.base_model_name_or_path, config.revision = base, commit or None
    if config.target_parameters:
        raise UserError(*setting, f"other modules: peft takes these for experts, which are one tensor each in {spec}")
    return adapted


def _config_of(lora: LoraSettings) -> Any:
    """The config of the folder that the settings name, to be trained on.

    Raises:
        UserError: it holds no LoRA adapter that can be, or contradicts a setting.
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
    names = config.target_modules
    names = [names] if isinstance(names, str) else sorted(names)
    for setting, said, has in (
        ("rank", lora.rank, config.r),
        ("alpha", lora.alpha, config.lora_alpha),
        ("targets", None if lora.targets == [ALL_LINEAR] else sorted(lora.targets), names),
        ("dora", lora.dora or None, config.use_dora),
        ("rslora", lora.rslora or None, config.use_rslora),
    ):
        if said not in (None, has):
            raise UserError(f"lora.{setting}", said, f"{has} as in {lora.adapter}, or unset")
    if lora.dropout is not None:
        config.lora_dropout = lora.dropout
    config.inference_mode, config.init_lora_weights = False, True
    return config


def check_adapter(folder: Path) -> None:
    """Raise UserError for a folder that holds no adapter in a form that is read."""
    if not (folder / CONFIG).is_file():
        raise UserError("lora.adapter", str(folder), f"a folder of peft with {CONFIG} and {VALUES}")
    if not (folder / VALUES).is_file():
        raise UserError(
            "lora.adapter", str(folder), f"{VALUES} in it; save_pretrained of peft writes it, from other forms too"
        )


def _check_targets(spec: str, model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse names of modules that the model has not: peft passes over them if another one is there."""
    from transformers.pytorch_utils import Conv1D

    if list(targets) == [ALL_LINEAR]:
        return
    kinds = (nn.Linear, Conv1D, nn.Embedding)
    known = {name: isinstance(module, kinds) for name, module in model.named_modules() if name}
    ends = sorted({name.rpartition(".")[2] for name, fits in known.items() if fits} - {""})
    for target in targets:
        each_fits = [fits for name, fits in known.items() if name == target or name.endswith(f".{target}")]
        if each_fits and all(each_fits):
            continue
        near = difflib.get_close_matches(target, ends, n=1)
        words = f"the end of a linear layer's name in {spec}: {', '.join(ends)}; or {ALL_LINEAR}"
        if experts := _experts(model, " and "):
            words += f"; {experts} are stored as one tensor each and get no adapters"
        raise UserError("lora.targets", target, words + (f"; did you mean {near[0]}?" if near else ""))


def _linear_layers(model: Any) -> list[str]:
    """The ends of the names of all linear layers but the head, as short as they are clear. Those are left out that
    ``peft`` takes for experts, in a model whose experts are one tensor: of dense layers among the others, for example.
    """
    from transformers.pytorch_utils import Conv1D

    names = [name for name, _ in model.named_modules()]
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    others = set(names) - set(linear)

    def shortest(name: str) -> str:
        ends = [name]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        clear = (end for end in reversed(ends) if not any(path == end or path.endswith(f".{end}") for path in others))
        return next(clear, name)

    return sorted(end for end in {shortest(name) for name in linear} if not _means_experts(model, end))


def _means_experts(model: nn.Module, name: str) -> bool:
    """True if ``peft`` takes the name of a module for that of experts, which were modules in earlier transformers."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an earlier peft renames nothing
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # one of two that became one
        return True
    return bool(config.target_parameters)


def _experts(model: nn.Module, between: str) -> str:
    """Names of matrices of experts that are stored as one tensor, the ends of them."""
    names = {name for name, parameter in model.named_parameters() if parameter.ndim > 2 and "experts" in name}
    return between.join(sorted({name.rpartition(".")[2] for name in names}))


def other_base_words(adapter: Path, spec: str) -> str:
    """Line with both names if the adapter in a folder was made on another base than ``spec``, else ``""``.

    A base on another machine, or in a cache of the Hub, is known by the end of its name.
    """
    made_on = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path") or spec
    if Path(made_on).expanduser().resolve() == Path(spec).expanduser().resolve():
        return ""
    if all(theirs == ours for theirs, ours in zip(_ends(made_on), _ends(spec), strict=False)):
        return ""
    return f"{adapter} was made on {made_on}; this run's base is {spec}"


def _ends(name: str) -> list[str]:
    """The parts of a base's name that tell it from others, the last one first.

    >>> _ends("Org/Name"), _ends("/cache/models--org--name/snapshots/1a"), _ends("/data/Name"), _ends("runs/a/model")
    (['name', 'org'], ['name', 'org'], ['name'], ['model', 'a'])
    """
    path = Path(name)
    hub = next((part for part in path.parts if part.startswith("models--")), "")
    parts = hub.split("--")[1:] or [part.lower() for part in path.parts]
    is_whole = hub or (len(parts) == 2 and not path.is_dir()) or parts[-1:] == ["model"]  # a run's export
    return [part.lower() for part in reversed(parts[-2:] if is_whole else parts[-1:])]


def adapter_words(given: Any) -> str:
    """What an adapter covers, in a sentence; empty for a model without one."""
    if not (facts := adapter_facts(given)):
        return ""
    model = given.get_base_model()
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "reset_lora_parameters")]
    ends = sorted({name.rpartition(".")[2] for name, _ in layers})
    kinds = [word for word, used in (("DoRA", facts["dora"]), ("rsLoRA", facts["rslora"])) if used]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    words = (
        f"{' and '.join(kinds) or 'LoRA'} of rank {facts['rank']}, alpha {facts['alpha']}, on {len(layers)} modules "
        f"({', '.join(ends)}): {trained:,} parameters"
    )
    experts = _experts(model, ", ")
    return words + (f"; the experts ({experts}) are stored as one tensor each and get none" if experts else "")


def adapter_facts(given: Any) -> dict[str, Any]:
    """The settings of a model's LoRA adapter, by their names; empty without one."""
    configs = getattr(given, "peft_config", None)
    if configs is None:
        return {}
    config = configs[given.active_adapter]
    names = config.target_modules
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "targets": [names] if isinstance(names, str) else sorted(names),
        "dora": bool(config.use_dora),
        "rslora": bool(config.use_rslora),
    }


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that a pattern names.

    Args:
        model: without a wrapper of ``peft``.
        patterns: with ``*``, ``?`` and ``[...]``; each stands for the whole name of a parameter or of a module that
            holds it. Names are those without an adapter.

    Raises:
        UserError: a pattern that names nothing, or nothing is left to train.
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
    """Parameters that have the pattern as their name or their module's; if there are none, those that match it."""
    holders = {name: list(_with_holders(base_name(name))) for name in names}
    named = [name for name in holders if pattern in holders[name]]
    return named or [name for name in holders if any(fnmatchcase(holder, pattern) for holder in holders[name])]


def _with_holders(name: str) -> Iterator[str]:
    """A parameter's name and those of the modules that hold it.

    >>> list(_with_holders("model.norm.weight"))
    ['model.norm.weight', 'model.norm', 'model']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Names that were probably meant, those of modules among them: the likest by their whole or by their last part."""
    holders = list(dict.fromkeys(holder for name in names for holder in _with_holders(name)))
    word = re.sub(r"[*?\[\]]", "", pattern).strip(".")
    by_end = {holder: difflib.SequenceMatcher(None, word, holder[-max(len(word), 1) :]).ratio() for holder in holders}
    return sorted(holders, key=lambda holder: (-by_end[holder], len(holder)))[:3]


class AdapterValues:
    """The values of an adapter's parameters, in a folder of ``peft``.

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
                raise UserError("lora.adapter", str(folder), f"an adapter of this model: {sizes}")

    def parameter(self, name: str) -> Tensor:
        """The value of one parameter as it is stored."""
        from safetensors import safe_open

        with safe_open(self._path, framework="pt") as file:
            return file.get_tensor(self._keys[name])


def _keys_on_disk(chain: Chain) -> dict[str, str]:
    """Name of every adapter parameter -> its name in a folder of ``peft``."""
    from peft import get_peft_model_state_dict

    given: Any = chain.given
    prefix = next(name for name, module in given.named_modules() if module is chain.model)
    names = [name for name, _ in chain.model.named_parameters() if is_adapter(chain.model, name)]
    marks = {name: torch.empty(0, device="meta") for name in names}
    state = get_peft_model_state_dict(
        given,
        {f"{prefix}.{name}": mark for name, mark in marks.items()},
        adapter_name=given.active_adapter,
        save_embedding_layers=False,
    )
    keys = {id(mark): key for key, mark in state.items()}
    if lost := [name for name in names if id(marks[name]) not in keys]:
        raise unsupported(lost[0], "peft does not save it")
    return {name: keys[id(mark)] for name, mark in marks.items()}
