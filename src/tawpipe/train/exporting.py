"""Export of a run's model as a folder: its form by the settings, and an export from a checkpoint on one process.

The run's folder contains what an export needs besides the checkpoint: the settings, and the tokenizer, which may have
been trained for this run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.frozen import naming_frozen
from tawpipe.checkpoint.names import complete_states, passed_over, step_of
from tawpipe.checkpoint.resume import RunState
from tawpipe.checkpoint.values import SavedParameters
from tawpipe.data.tokenizer import TOKENIZER_FILES, load_tokenizer, vocabulary_size
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import BuiltModel
from tawpipe.model.files.carried import GENERATION, Carried, read_settings, stop_tokens
from tawpipe.model.files.export import carry, export_hugging_face, few_bits_of, is_adapter_alone
from tawpipe.model.files.merged import refuse_unmergeable
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.runtime.dtype import AUTO, DTYPES, master_dtype
from tawpipe.train.lock import running_in
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.checks import check_format, refuse_replacing
from tawpipe.train.settings.config import SETTINGS, TrainConfig, load_config

TOKENIZER = "tokenizer"
"""Folder of the tokenizer, in a run's output folder."""


@dataclass(frozen=True)
class Form:
    """Form of an exported model; see ``ExportConfig``."""

    dtype: torch.dtype
    format: str
    merge: bool
    max_shard_bytes: int

    def carry(self, chain: Chain, base: Path | None, tokenizer: Any, ends: Sequence[int]) -> Carried:
        """Read the files that the exported model takes over from the base model's folder; see ``export.carry``.

        Args:
            chain: the model.
            base: folder of the base model; None without one.
            tokenizer: tokenizer of the run.
            ends: token ids that end a learned answer.
        """
        form: dict[str, Any] = {"dtype": self.dtype, "format": self.format, "merge": self.merge}
        return carry(chain, base, **form, tokenizer=tokenizer, ends=ends)

    def words(self, chain: Chain, base: Path | None, ends: Sequence[int]) -> str:
        """Return a line for the console about the export, else ``""``.

        The line is about matrices in few bits, or about stop tokens that the base of an adapter does not name.

        Args:
            chain: the model.
            base: folder of the base model; None without one.
            ends: token ids that end a learned answer.
        """
        adapter = is_adapter_alone(chain, self.merge)
        if few_bits := few_bits_of(chain, self.format, self.dtype, adapter=adapter):
            return f"export: {few_bits.words}"
        stops = stop_tokens(read_settings(base, GENERATION)) if adapter and base is not None else list(ends)
        if new := sorted(set(ends) - set(stops)):
            return f"export: learned turns end with {new}, which generation_config.json of the base does not name"
        return ""

    @classmethod
    def of(cls, config: TrainConfig, built: BuiltModel) -> Form:
        """Return the form that ``config`` asks for; the type ``auto`` is settled from the model."""
        named, merge = config.export.dtype, config.export.merge
        dtype = built.dtype_on_disk(merge=merge) if named == AUTO else DTYPES[named]
        return cls(dtype, config.export.format, merge, config.export.max_shard_mib * 2**20)


def export_again(
    run: Path, *, step: int | None, merge: bool, folder: Path | None, format: str | None = None, model: str = ""
) -> tuple[Path, str]:
    """Export the model of a run from one of its checkpoints.

    Args:
        run: output folder of the run.
        step: export the checkpoint after this step; None for the best one if the run keeps it, else the newest.
        merge: True to merge the adapter into the weights, whatever the settings of the run say.
        format: see ``ExportConfig.format``; None for the run's setting.
        folder: folder to make or replace; None for ``model`` in the run's folder.
        model: place of the model that the run started from; empty for the place in the run's settings.

    Returns:
        the folder, and words about the checkpoint that was exported.

    Raises:
        UserError: there is no run with checkpoints or no such step, or the base model no longer exists.
        RunError: the model could not be written.
    """
    folder = folder or run / "model"
    if not _is_replaceable(folder):
        raise UserError("--output", str(folder), "a new folder, an empty one, or one with a model, which is replaced")
    if not (run / SETTINGS).is_file():
        raise UserError("RUN", str(run), f"the output folder of a run, which holds {SETTINGS}")
    ours = os.access(run, os.W_OK)
    with running_in(run, setting="RUN") if ours else nullcontext():  # a running run deletes its old checkpoints
        try:
            chosen = _checkpoint(run, step)
            newer = () if step is not None else passed_over(run / "checkpoints", step_of(chosen))
            exported, source = _exported(run, chosen, merge=merge, format=format, folder=folder, model=model)
            return exported, "; skipped ".join([source, *newer])
        except UserError as error:
            if error.setting != "where":
                raise
            raise UserError("RUN", str(run), f"with {error.expected}") from error


def _exported(
    run: Path, checkpoint: Path, *, merge: bool, format: str | None, folder: Path, model: str
) -> tuple[Path, str]:
    """Export one checkpoint into ``folder``, and return the folder and words about the checkpoint."""
    manifest = read_manifest(checkpoint)
    state = RunState.of(manifest, str(checkpoint))
    moved = ["--model", model] if model else []
    config = load_config(["--config", str(run / SETTINGS), "--output", str(run), *moved])
    refuse_replacing(config, folder, "--output")
    if merge:
        config = replace(config, export=replace(config.export, merge=True))
    if format is not None:
        config = replace(config, export=replace(config.export, format=format))
    check_format(config, "--format")
    if config.export.merge and not config.lora.active:
        raise UserError("--merge", True, "ignored: this run has no adapter to merge")
    if (commit := state.settled.get("commit")) and "@" not in config.model and not Path(config.model).is_dir():
        config = replace(config, model=f"{config.model}@{commit}")  # a branch of the Hub may now be at another commit
    with naming_frozen(checkpoint):
        of_run = RunModel(config)
    tokenizer = _tokenizer(run, config, of_run)
    built, chain = of_run.followed(None if of_run.folder is not None else vocabulary_size(tokenizer))
    if config.export.merge:
        refuse_unmergeable(built.model)
    form, computed = Form.of(config, built), DTYPES[state.dtype or "float32"]
    source = built.source(chain, seed=config.seed)
    buffers = source.buffers()
    chain.quantise(manifest.get("quantize", NONE), computed)
    chain.prepare("cpu", computed)
    chain.load_buffers(buffers)
    base = source if isinstance(source, SafetensorsSource) else None
    with SavedParameters(checkpoint, chain.units, master_dtype(computed), base) as saved:
        ends = state.settled.get("ends", ())
        carried = form.carry(chain, of_run.folder, tokenizer, ends)
        exported = export_hugging_face(
            chain, folder, saved.parameter, **vars(form), is_writer=True, tokenizer=tokenizer, carried=carried
        )
    words = form.words(chain, of_run.folder, ends)
    return exported, f"{checkpoint}, step {state.step}" + (f"; {words}" if words else "")


def _is_replaceable(folder: Path) -> bool:
    """Return True if ``folder`` does not exist, is empty, or contains only an exported model that may be replaced."""
    if not folder.exists():
        return bool(folder.name) and folder.name != ".."
    if not folder.is_dir() or folder.resolve() == Path.cwd() or (folder / SETTINGS).exists():
        return False
    models = ("config.json", "adapter_config.json")
    return not any(folder.iterdir()) or any((folder / name).is_file() for name in models)


def _checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint to export.

    Args:
        run: output folder of the run.
        step: step of the checkpoint; None for the best one if the run keeps it, else the newest.

    Raises:
        UserError: there is no such checkpoint.
    """
    if not (states := {step_of(path): path for path in complete_states(run / "checkpoints")}):
        raise UserError("RUN", str(run), "a run with a complete checkpoint under checkpoints/")
    if step is not None:
        if step not in states:
            raise UserError("--step", step, f"one of {', '.join(map(str, states))}, which have checkpoints in {run}")
        return states[step]
    newest = states[max(states)]
    with suppress(UserError, KeyError):  # a damaged file is refused later, by the code that needs it
        config = load_config(["--config", str(run / SETTINGS)])
        best = RunState.of(read_manifest(newest), str(newest)).best
        if config.checkpoint.best and best:
            return states.get(best["step"], newest)
    return newest


def _tokenizer(run: Path, config: TrainConfig, model: RunModel) -> Any:
    """Load the tokenizer from the run's folder, or else the one that the settings or the model name."""
    if any((run / TOKENIZER / name).exists() for name in TOKENIZER_FILES):
        return load_tokenizer(str(run / TOKENIZER), "RUN")
    if name := config.tokenizer or (None if model.folder is None else str(model.folder)):
        return load_tokenizer(name)
    raise UserError("RUN", str(run), f"a run whose folder holds {TOKENIZER}/: nothing else knows its vocabulary")
