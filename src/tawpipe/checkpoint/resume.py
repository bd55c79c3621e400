"""The choice of the state that a run goes on from.

The newest sound state of the run's own history is chosen. A run that starts anew, or goes back to an earlier state,
begins another history in its output folder; one that is resumed goes on with that of before. ``history.json`` there
names the history, so that what is left of another one is never gone on with, and which start has chosen what to go on
from: one that died before leaves that to the next start.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from tawpipe.checkpoint.format import SEAL, Manifest, damage, read_manifest
from tawpipe.checkpoint.load import Source
from tawpipe.checkpoint.names import complete_states, step_name
from tawpipe.checkpoint.store import Disk, Memory, Store
from tawpipe.environment import LAUNCH
from tawpipe.errors import RunError, UserError
from tawpipe.files import replace_text
from tawpipe.runtime.homes.optimizer import SHAPES

HISTORY = "history.json"


@dataclass(frozen=True)
class RunState:
    """A run's part of its state, besides the pipeline's.

    Args:
        step: steps done.
        samples: rows consumed, counted over epochs: the position in the data.
        fingerprint: of the data, so that a changed corpus can be named.
        data_state: what the dataset needs besides the position.
        plan: that the run followed, empty for none; it is followed again on the same topology.
        dtype: in which the run computed; empty in states of earlier versions.
        rope: the model's rotary positions; empty without any, and in states of earlier versions.
        best: step, loss and since of the lowest validation loss so far; empty if there is none.
        validation: fingerprint of what validation losses were measured on; empty if nothing was held out, and in states
            of earlier versions.
        lora: the settings of the model's adapter; empty without one.
        freeze: patterns of names of parameters that were not trained.
        settled: settings that the run chose by what it started from; empty in states of earlier versions.
        topology, versions: for the reader.
    """

    step: int
    samples: int
    seed: int
    fingerprint: str = ""
    data_state: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    plan: str = ""
    dtype: str = ""
    rope: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    validation: str = ""
    lora: dict[str, Any] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)
    settled: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, where: str) -> RunState:
        """The run's part of a manifest that was read at ``where``.

        Raises:
            UserError: it was not saved by a run, or is damaged.
        """
        try:
            state = cls(**manifest["run"])
            for name, kind in get_type_hints(cls).items():
                if not isinstance(getattr(state, name), get_origin(kind) or kind):
                    raise TypeError(f"{name} is {getattr(state, name)!r}")
        except (KeyError, TypeError) as error:
            raise UserError("where", where, f"a checkpoint saved by tawpipe train ({error!r})") from error
        return state


def read_run(folder: Path) -> RunState:
    """The run's part of the state in a folder.

    Raises:
        UserError: it was not saved by a run, or is damaged.
    """
    return RunState.of(read_manifest(folder), str(folder))


def refuse_other_trained(state: RunState, lora: Mapping[str, Any], freeze: Sequence[str], where: str) -> None:
    """Refuse to go on with another adapter, or other frozen parameters, than the state was trained with.

    Args:
        lora: the settings of the adapter here; empty without one.
        freeze: the patterns here.

    Raises:
        UserError: they differ; it names the setting.
    """
    if bool(lora) != bool(state.lora):
        expected = f"unset: {where} has no adapter" if lora else f"{state.lora['rank']}, as in {where}"
        raise UserError("lora.rank", lora.get("rank"), expected)
    for name, value in lora.items():
        if value != state.lora.get(name):
            raise UserError(f"lora.{name}", value, f"{state.lora.get(name)}, as in {where}")
    if sorted(freeze) != sorted(state.freeze):
        expected = f"{' '.join(state.freeze) if state.freeze else 'nothing'}, as in {where}"
        raise UserError("freeze", " ".join(freeze) or "nothing", expected)


# choosing


@dataclass(frozen=True)
class Choice:
    """A state to go on from.

    Args:
        source: None to start anew.
        passed_over: newer ones that were not taken, and why, in sentences.
        abandons: those of the run that are newer are no more to be gone on with.
    """

    source: Source | None
    passed_over: tuple[str, ...] = ()
    abandons: bool = False


def newest(store: Store) -> Choice:
    """The newest state in a store that is sound; call on all ranks."""
    here: dict[int, list[Path]] = {}
    steps = {step for seen in store.world.together(lambda: here.update(store.states()) or list(here)) for step in seen}
    passed_over: list[str] = []
    for step in sorted(steps, reverse=True):
        name = step_name(step)
        try:
            return Choice(examine(store, here.get(step, [store.folder / name])), tuple(passed_over))
        except RunError as problem:
            passed_over.append(f"{name}: {problem}")
    return Choice(None, tuple(passed_over))


def examine(store: Store, folders: Sequence[Path]) -> Source:
    """The state in folders that this rank may see, if every file of it is sound; call on all ranks.

    Raises:
        RunError: some file is nowhere sound, or, in a store that is shared, not so everywhere; on all ranks.
    """
    manifests: dict[str, Manifest] = {}

    def look() -> dict[str, str]:
        """The folders that can be read here, each with the seal of its manifest."""
        seals = {}
        for folder in folders:
            try:
                manifest = read_manifest(folder)
                RunState.of(manifest, str(folder))
                manifests[manifest[SEAL]], seals[str(folder)] = manifest, manifest[SEAL]
            except UserError:
                if store.shared:
                    raise
        return seals

    everyone = store.world.together(look)
    seals = sorted({seal for seen in everyone for seal in seen.values()})
    if store.shared and len(seals) > 1:
        raise RunError("not the same checkpoint on all machines")
    where = folders[0] if store.shared else store.folder.parent
    for seal in seals:
        places: dict[tuple[int, str], list[int]] = {}
        for rank, seen in enumerate(everyone):
            machine = 0 if store.shared else store.world.machines.node_of(rank)  # one name, but another folder on each
            for folder in (folder for folder in seen if seen[folder] == seal):
                places.setdefault((machine, folder), []).append(rank)
        seers = [(folder, ranks) for (_, folder), ranks in places.items()]
        if source := _if_sound(store, where, seers, manifests.get(seal)):
            return source
    raise RunError("some of its files are sound on no machine")


def _if_sound(
    store: Store, where: Path, seers: Sequence[tuple[str, list[int]]], manifest: Manifest | None
) -> Source | None:
    """The state with this manifest if it is whole.

    Args:
        seers: of each folder that has this manifest the ranks that see it.
        manifest: None where this rank sees none of them.
    """
    world = store.world
    ranks_of_all = {rank for _, ranks in seers for rank in ranks}
    if len(ranks_of_all) < world.size:
        teller = min(ranks_of_all)
        manifest = world.together(lambda: manifest, acts=world.rank == teller)[teller]
    known: Manifest = manifest or {}

    def check() -> list[tuple[int, int]]:
        """The sound ones of the files that are this rank's turn, each with the index of its folder."""
        sound = []
        for index, (folder, ranks) in enumerate(seers):
            for number in range(len(known["files"])):
                if ranks[number % len(ranks)] == world.rank:
                    problem = damage(Path(folder), known, [number])
                    if problem and store.shared:
                        raise RunError(problem)
                    sound += [] if problem else [(number, index)]
        return sound

    folders: list[dict[int, str]] = [{} for _ in known["files"]]
    for sound in world.together(check):
        for number, index in sound:
            folder, ranks = seers[index]
            for rank in ranks:
                folders[number].setdefault(rank, folder)
    return Source(where, known, tuple(folders)) if all(folders) else None


def find(disk: Disk, resume: str, *, needed: bool = True) -> Choice:
    """The state that ``--resume`` means: none, auto (the newest that is sound, if any) or a path.

    Call on all ranks; all of them must see what is chosen.

    Args:
        needed: whether it is an error if there are states and none of them is sound.

    Raises:
        UserError: the path holds no sound state, or not all machines see it; or see ``needed``.
    """
    world, disk.resumed_step = disk.world, 0
    if resume == "none":
        return Choice(None)
    world.together(disk.clear, acts=disk.leads)
    if resume == "auto":
        choice = newest(disk)
        has_states = any(world.together(lambda: bool(complete_states(disk.folder))))
        if choice.source is None and has_states and needed:
            raise UserError("resume", str(disk.folder), f"a sound checkpoint; {'; '.join(choice.passed_over)}")
    else:
        try:
            ours = Path(resume).parent.resolve() == disk.folder.resolve()
            choice = Choice(examine(disk, [Path(resume)]), abandons=ours)
        except RunError as problem:
            expected = f"a sound checkpoint that every process can read ({problem})"
            raise UserError("resume", resume, expected) from problem
    disk.resumed_step = choice.source.step if choice.source else 0
    return choice


# histories


@dataclass(frozen=True)
class Mark:
    """The content of ``history.json``; empty where there is none.

    Args:
        history: a random name.
        resume: what ``--resume`` said.
        launch: the same for all starts of one launch.
    """

    history: str = ""
    resume: str = ""
    launch: str = ""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Mark:
        """The mark in a file's text; of one that is damaged nothing is known."""
        try:
            values = json.loads(text)
            return cls(*(str(values[member.name]) for member in fields(cls)))
        except (ValueError, KeyError, TypeError):
            return cls()

    def write(self, output: Path) -> None:
        """Write the file.

        Raises:
            RunError: it cannot be written, and without it a restart would not know what this start has chosen.
        """
        try:
            output.mkdir(parents=True, exist_ok=True)
            replace_text(output / HISTORY, self.text)
        except OSError as error:
            raise RunError(f"{output / HISTORY} could not be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run goes on from, and the mark of that choice.

    Args:
        source, state: None to start anew.
        place: the folder, or memory.
        passed_over: newer states that were not taken, and why, in sentences.
        abandons: see ``Choice``.
    """

    source: Source | None
    state: RunState | None
    place: str
    mark: Mark
    passed_over: tuple[str, ...]
    abandons: bool = False

    @property
    def notices(self) -> list[str]:
        """Lines about newer states that were not taken."""
        instead = f"{self.place} is used instead" if self.place else "the run starts at step 0"
        return [f"skipped {words}; {instead}" for words in self.passed_over]

    @property
    def groups(self) -> str:
        """Rule that made the groups of the state's optimizer; ``""`` for a run that starts anew."""
        return self.source.manifest.get("groups", SHAPES) if self.source is not None else ""

    def take(self, output: Path, disk: Disk) -> None:
        """Go on from it and from no other, when nothing is left that could refuse it; call on all ranks.

        Raises:
            RunError: the output folder cannot be written to.
        """
        if self.abandons:
            disk.world.together(disk.set_aside_newer, acts=disk.leads)
        if disk.world.rank == 0:
            self.mark.write(output)


def choose(output: Path, resume: str, disk: Disk, memory: Memory | None, *, restarts: int) -> ResumePoint:
    """The state that a run with this output folder goes on from; after a restart the newest that it has left, on the
    disk or in memory. Call on all ranks.

    Args:
        resume: what ``--resume`` says.
        restarts: how often the run has been started again.

    Raises:
        UserError: see ``find``.
    """
    world, path = disk.world, output / HISTORY
    readable = world.rank == 0 and path.is_file()
    before = Mark.of(world.broadcast_text(path.read_text(encoding="utf-8") if readable else ""))
    launch = world.broadcast_text(os.environ.get(LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", ""))
    # A start that died before it had chosen what to go on from leaves that choice to the next one.
    chosen = restarts > 0 and (before.resume, before.launch) == (resume, launch)
    goes_on = chosen or resume == "auto"
    source, place = None, ""
    if memory is not None and goes_on and before.history:
        memory.history = before.history
        source, place = newest(memory).source, "memory"
    choice = find(disk, "auto" if goes_on else resume, needed=source is None)
    if choice.source is None and source is None and chosen and resume not in ("none", "auto"):
        choice = find(disk, resume)
    if choice.source is not None and (source is None or source.step <= choice.source.step):
        source, place = choice.source, str(choice.source.where)
    state = RunState.of(source.manifest, place) if source else None
    history = before.history if source and goes_on and before.history else world.broadcast_text(secrets.token_hex(8))
    disk.history = history
    if memory is not None:
        memory.history = history
    return ResumePoint(source, state, place, Mark(history, resume, launch), choice.passed_over, choice.abandons)
