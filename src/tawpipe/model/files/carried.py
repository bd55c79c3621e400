"""Small files of an exported model, copied from the folder that the model was loaded from, with the run's changes.

Files made from scratch would lose config keys, stop tokens, tokenizer files and code that other programs read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.pretrained import commit_of, has_weights, stored_dtype
from tawpipe.model.refuse import unsupported
from tawpipe.model.rope import write_both_forms

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_PARTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "tekken.json"),
    *("*.model", "*.tiktoken", "*.spm", "chat_template.*", "additional_chat_templates/*.jinja"),
)
"""Patterns for the names of a tokenizer's files."""
TEXTS = [
    "Hello World, DON'T  do it.\n\n\tif x_1 == 12345.67: return  HTTPServer()   \r\n",
    "\u00c0 la carte \ufb01ve \u00bd cafe\u0301 \u201cno\u201d \u2026\u00a0",
    "\u6f22\u5b57\u3042\u3002\ud55c\uad6d \u0440\u0443\u0441 \u0e44\u0e17\u0e22",
    *("a", " a", "A\n", "  ", "3.14159 + 2,718 = 5e9", "<s> </s> [INST]", "\U0001f642\u200d\U0001f525 def f(x): pass"),
]
"""Texts whose token ids differ between tokenizers."""
_OF_THE_WRITER = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def base_folder(config: Any) -> Path | None:
    """Return the folder that a config was read from, on disk or in the Hub's cache; None for a config made in code."""
    from huggingface_hub import try_to_load_from_cache

    name, commit = getattr(config, "_name_or_path", "") or "", getattr(config, "_commit_hash", None)
    if name and (folder := Path(name).expanduser()).is_dir():
        return folder if (folder / CONFIG).is_file() else None
    cached = try_to_load_from_cache(name, CONFIG, revision=commit) if name and commit else None
    return Path(cached).parent if isinstance(cached, str) else None


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in a model's folder, unchanged; empty if the file is missing.

    Raises:
        UserError: it cannot be read, or is not an object.
    """
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unsupported(str(folder), f"its {name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise unsupported(str(folder), f"its {name} must be an object")
    return content


def stop_tokens(settings: dict[str, Any]) -> list[int]:
    """Return the tokens at which generation stops, from the content of a config, in their order."""
    named = settings.get("eos_token_id")
    return [token for token in (named if isinstance(named, list) else [named]) if type(token) is int]


@dataclass(frozen=True)
class Carried:
    """Files and dtypes that an exported folder takes over from the model's folder.

    They are read before training.

    Attributes:
        files: small files by name, in the order in which they are written.
        dtype: dtype of most numbers on disk.
        dtypes: tensor name in the exported folder -> its dtype, for tensors with another one.
        twins: tensor name -> further names under which the model's folder stores the tensor.
    """

    files: Mapping[str, bytes]
    dtype: torch.dtype
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    twins: Mapping[str, Set[str]] = field(default_factory=dict)


NOTHING_CARRIED = Carried({}, torch.float32)
"""Value for ranks that do not write."""


def small_files(
    chain: Chain,
    base: Path | None,
    *,
    dtype: torch.dtype,
    adapter: bool,
    tokenizer: Any = None,
    ends: Sequence[int] = (),
) -> dict[str, bytes]:
    """Make the small files of an exported model in a temporary folder, and return their content by name.

    The config is read by transformers once, to test it. If it reads as another config, a plain one is written instead.

    Args:
        chain: the model.
        base: the folder that the model was loaded from; None for a model made in code.
        dtype: dtype of most numbers on disk.
        adapter: True if only a ``peft`` model's adapter is exported.
        tokenizer: a transformers tokenizer, or None to write none.
        ends: tokens that end learned turns. They are added to the tokens at which generation stops.

    Raises:
        UserError: a file of the model's folder cannot be read, or a file cannot be made.
    """
    with TemporaryDirectory() as work:
        folder = Path(work)
        try:
            if adapter:
                _save_adapter_config(chain, folder)
            else:
                _write(folder / CONFIG, _config(chain, base, dtype))
                if not _reads_as(chain.config_as_read, folder):  # the class has its own names for rotary settings
                    _write(folder / CONFIG, _config(chain, None, dtype, both_forms=False))
                if generation := _generation(chain, base, ends):
                    _write(folder / GENERATION, generation)
                _write_code(chain, base, folder)
            if tokenizer is not None:
                _write_tokenizer(tokenizer, base, folder, own_code=has_own_code(chain.model))
        except OSError as error:
            raise UserError("export", str(base or chain.name), f"small files that can be made ({error})") from error
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def has_own_code(model: Any) -> bool:
    """Return True for a model whose code was loaded from its folder."""
    return model._auto_class is not None or type(model).__module__.startswith("transformers_modules")


def _config(chain: Chain, base: Path | None, dtype: torch.dtype, *, both_forms: bool = True) -> dict[str, Any]:
    """Return the content of config.json: the base's content, with everything that has changed since it was read.

    Args:
        chain: the model.
        base: the folder that the model was loaded from, or None.
        dtype: dtype of most numbers on disk.
        both_forms: also write rotary settings in the older form; see ``write_both_forms``.
    """
    model, config = chain.model, chain.config_as_read
    now = json.loads(config.to_json_string(use_diff=False))
    content, before = {} if base is None else read_settings(base, CONFIG), now
    if base is not None and content.get("model_type") == config.model_type:
        before = json.loads(type(config).from_pretrained(base).to_json_string(use_diff=False))
        _overlay(content, before, now, set(config.sub_configs))
    else:
        content = json.loads(config.to_json_string(use_diff=True))
    if type(model).__name__ not in (content.get("architectures") or ()):
        content["architectures"] = [type(model).__name__]
    text = config.get_text_config()
    key = next((name for name in config.sub_configs if getattr(config, name, None) is text), "")
    part = content.setdefault(key, {}) if key else content
    if base is None or not has_weights(base) or stored_dtype(base) != dtype:
        content.setdefault("dtype" if "torch_dtype" not in content else "torch_dtype", "")
        for each in (content, part):
            each |= {name: str(dtype).removeprefix("torch.") for name in ("dtype", "torch_dtype") if name in each}
    if base is not None and (commit := commit_of(base)):
        name = base.parents[1].name.removeprefix("models--").replace("--", "/")
        content["base_model"] = {"name": name, "revision": commit}
    ropes = [(each.get(key) or {} if key else each).get("rope_parameters") for each in (now, before)]
    if both_forms:
        write_both_forms(part, ropes[0], changed=ropes[0] != ropes[1])
    for each in (content, part):
        each.pop("quantization_config", None)
    return content


def _reads_as(config: Any, folder: Path) -> bool:
    """Return True if the config in ``folder``, read by transformers, equals ``config``."""
    both = type(config).from_pretrained(folder), config
    read, expected = (json.loads(each.to_json_string(use_diff=False)) for each in both)
    other = {*_OF_THE_WRITER, "quantization_config", "base_model"}
    return all(read.get(key) == value for key, value in expected.items() if key not in other)


def _generation(chain: Chain, base: Path | None, ends: Sequence[int]) -> dict[str, Any]:
    """Return the content of generation_config.json, with ``ends`` added as stop tokens.

    It is empty if the model cannot generate and the base has no such file, unless there are ``ends``."""
    content = {} if base is None else read_settings(base, GENERATION)
    if not content and chain.model.can_generate():
        content = json.loads(chain.model.generation_config.to_json_string(use_diff=True))
    stops = stop_tokens(content)
    if new := [token for token in ends if token not in stops]:
        content["eos_token_id"] = [*stops, *new] if stops or len(new) > 1 else new[0]
    return content


def _write_code(chain: Chain, base: Path | None, folder: Path) -> None:
    """Copy the model's Python files from ``base`` into ``folder``.

    If ``base`` has none and the model's code is not part of transformers, the modules in use are written, and
    ``auto_map`` is added to config.json, so that transformers finds them."""
    model: Any = chain.model
    if sources := sorted(base.glob("*.py")) if base is not None else []:
        for path in sources:
            shutil.copyfile(path, folder / path.name)
    elif has_own_code(model):
        from transformers.dynamic_module_utils import custom_object_save

        config = deepcopy(model.config)
        custom_object_save(model, str(folder), config=config)
        if auto_map := getattr(config, "auto_map", None):
            _write(folder / CONFIG, read_settings(folder, CONFIG) | {"auto_map": auto_map})


def _save_adapter_config(chain: Chain, folder: Path) -> None:
    """Write the config of the active adapter into ``folder``, in inference mode."""
    peft_model: Any = chain.outer_model
    config = deepcopy(peft_model.peft_config[peft_model.active_adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or chain.config.name_or_path or None
    config.save_pretrained(folder)


def _write_tokenizer(tokenizer: Any, base: Path | None, folder: Path, *, own_code: bool) -> None:
    """Write the base's tokenizer files if they are this tokenizer; otherwise write what the tokenizer saves.

    The tokenizer's template and special tokens replace the base's. The base's files are preferred, because a saved
    tokenizer names a class that transformers 4 lacks."""
    paths = [path for part in TOKENIZER_PARTS for path in (base.glob(part) if base else ()) if path.is_file()]
    copies = [folder / path.relative_to(base or path) for path in paths]
    for path, copied in zip(paths, copies, strict=True):
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copied)
    loaded = open_tokenizer(folder, own_code=own_code) if paths else None
    if loaded is not None and not tokenizers_agree(loaded, tokenizer):
        for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
            if settings := read_settings(folder, name):
                special = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
                _write(folder / name, settings | {k: v for k, v in special.items() if k in SPECIAL})
        loaded = open_tokenizer(folder, own_code=own_code)
    if loaded is None or not tokenizers_agree(loaded, tokenizer):
        for path in copies:
            path.unlink(missing_ok=True)
        save_tokenizer(tokenizer, folder)
    elif loaded.chat_template != tokenizer.chat_template:
        _write_template(tokenizer.chat_template, folder)


def open_tokenizer(folder: Path, *, own_code: bool) -> Any:
    """Return the tokenizer of a folder as transformers opens it, or None if it cannot be opened."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)
    except Exception:  # the libraries may raise any exception
        return None


def tokenizers_agree(tokenizer: Any, other: Any) -> bool:
    """Return True if two tokenizers give equal ids for ``TEXTS`` and have equal vocabularies and special tokens."""
    ids = [[each(text)["input_ids"] for text in TEXTS] for each in (tokenizer, other)]
    special = [{name: str(token) for name, token in each.special_tokens_map.items()} for each in (tokenizer, other)]
    return ids[0] == ids[1] and tokenizer.get_vocab() == other.get_vocab() and special[0] == special[1]


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into a folder.

    Raises:
        OSError: it could not be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # its library raises plain Exception for a full disk
        raise OSError(str(error)) from error


def _write_template(template: Any, folder: Path) -> None:
    """Write a tokenizer's chat template, or its named templates, as ``.jinja`` files into ``folder``.

    All templates that were in the folder, also in tokenizer_config.json, are removed first.

    Args:
        template: the template; or template name -> template; or None, which only removes.
        folder: folder with a tokenizer's files.
    """
    settings = read_settings(folder, TOKENIZER_CONFIG)
    if settings.pop("chat_template", None) is not None:
        _write(folder / TOKENIZER_CONFIG, settings)
    for path in (*folder.glob("chat_template.*"), *folder.glob(f"{TEMPLATES}/*")):
        path.unlink()
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    for name, text in templates.items():
        path = folder / (TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _overlay(content: dict[str, Any], before: dict[str, Any], now: dict[str, Any], parts: set[str]) -> None:
    """Write into the content of a config everything that differs between two readings of configs of its class.

    Args:
        content: content of config.json, changed in place.
        before: the config as it was read.
        now: the config at present.
        parts: keys of configs within the config, which are compared key by key.
    """
    for key, value in now.items():
        if key in _OF_THE_WRITER or before.get(key) == value:
            continue
        if key in parts and isinstance(content.get(key), dict) and isinstance(value, dict):
            _overlay(content[key], before.get(key) or {}, value, set())
        else:
            content[key] = value


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path`` as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files by name into a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def with_quantization(config: bytes, settings: Mapping[str, Any]) -> bytes:
    """Return the content of config.json with a ``quantization_config`` added."""
    return (json.dumps(json.loads(config) | {"quantization_config": settings}, indent=2) + "\n").encode()
