"""Choice of the state that a run resumes from.

The newest sound state of the run's own history is chosen. A run that starts anew, or goes back to an earlier state,
begins a new history in its output folder. A resumed run continues its history. ``history.json`` there names the
history, so that states of another one are never resumed. It also records which launch has chosen a state: if a start
dies before it has chosen, the next start chooses.
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
    """Values that a run adds to a saved state of its pipeline.

    Args:
        step: number of steps done.
        samples: number of rows consumed, counted over all epochs: the position in the data.
        seed: seed of the run.
        fingerprint: hashes of the data, to detect a changed corpus.
        data_state: what the dataset needs in addition to the position.
        topology: processes and nodes, for information.
        plan: plan that the run followed, ``""`` for none; it is followed again on the same topology.
        dtype: dtype in which the run computed; ``""`` in states of earlier versions.
        rope: the model's rotary positions; empty without any, and in states of earlier versions.
        best: ``step``, ``loss`` and ``since`` of the lowest validation loss so far; empty if there is none.
        validation: fingerprint of the validation data; ``""`` without validation, and in states of earlier versions.
        lora: settings of the model's adapter; empty without one.
        freeze: name patterns of parameters that were not trained.
        settled: settings that the run derived from its starting model; empty in states of earlier versions.
        versions: versions of the software, for information.
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
        """Return the run's values in ``manifest``, which was read at ``where``.

        Raises:
            UserError: the state was not saved by a run, or is damaged.
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
    """Read the run's values of the state in ``folder``.

    Raises:
        UserError: the state was not saved by a run, or is damaged.
    """
    return RunState.of(read_manifest(folder), str(folder))


def refuse_other_trained(state: RunState, lora: Mapping[str, Any], freeze: Sequence[str], where: str) -> None:
    """Raise UserError if the adapter or the frozen parameters differ from the training of the state.

    Args:
        state: the run's values in the state.
        lora: settings of the adapter here; empty without one.
        freeze: name patterns of frozen parameters here.
        where: folder of the state, for the message.

    Raises:
        UserError: they differ; the message names the setting.
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
    """Chosen state to resume from.

    Args:
        source: the state, or None to start anew.
        passed_over: sentences about newer states that were not taken, with reasons.
        abandons: True if newer states of this run must not be resumed any more.
    """

    source: Source | None
    passed_over: tuple[str, ...] = ()
    abandons: bool = False


def newest(store: Store) -> Choice:
    """Find the newest sound state in a store by reading the files of its states, newest first; call on all ranks.

    Returns:
        The choice, with reasons for newer states that were passed over. Its ``source`` is None if no state is sound.
    """
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
    """Return the state in ``folders`` after reading and checking all of its files; call on all ranks.

    Args:
        store: the store.
        folders: folders of one step that this rank may see.

    Raises:
        RunError: no sound copy of some file exists or, in a shared store, one is not sound everywhere; on all ranks.
    """
    manifests: dict[str, Manifest] = {}

    def look() -> dict[str, str]:
        """Return the manifest's checksum of each folder that can be read here."""
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
            machine = 0 if store.shared else store.world.machines.node_of(rank)  # folders differ by machine
            for folder in (folder for folder in seen if seen[folder] == seal):
                places.setdefault((machine, folder), []).append(rank)
        seers = [(folder, ranks) for (_, folder), ranks in places.items()]
        if source := _if_sound(store, where, seers, manifests.get(seal)):
            return source
    raise RunError("some of its files are sound on no machine")


def _if_sound(
    store: Store, where: Path, seers: Sequence[tuple[str, list[int]]], manifest: Manifest | None
) -> Source | None:
    """Return the state with this manifest if a sound copy of every file exists, else None; call on all ranks.

    Args:
        store: the store.
        where: folder for messages.
        seers: folders that have this manifest, each with the ranks that see it.
        manifest: the manifest; None if this rank sees none of the folders.
    """
    world = store.world
    ranks_of_all = {rank for _, ranks in seers for rank in ranks}
    if len(ranks_of_all) < world.size:
        teller = min(ranks_of_all)
        manifest = world.together(lambda: manifest, acts=world.rank == teller)[teller]
    known: Manifest = manifest or {}

    def check() -> list[tuple[int, int]]:
        """Return (file number, folder index) of each sound file among those that this rank has to read."""
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
    """Return the state that ``--resume`` selects; call on all ranks.

    With ``auto`` or a path, partial states in the folder of ``disk`` are removed first. Sets ``disk.resumed_step``.

    Args:
        disk: the store.
        resume: ``none``, ``auto`` (the newest sound state, if there is one) or a path, which all ranks must see.
        needed: with ``auto``, raise an error if there are states and none of them is sound.

    Raises:
        UserError: the path holds no sound state or is not visible to all machines; or see ``needed``.
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
    """Content of ``history.json``; all fields are empty if there is none.

    Args:
        history: random name of the history.
        resume: value of ``--resume``.
        launch: identifier of the launch, equal for all of its restarts.
    """

    history: str = ""
    resume: str = ""
    launch: str = ""

    @property
    def text(self) -> str:
        """JSON text of the mark."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Mark:
        """Parse ``text``, the content of ``history.json``; return a mark with empty fields if it is damaged."""
        try:
            values = json.loads(text)
            return cls(*(str(values[member.name]) for member in fields(cls)))
        except (ValueError, KeyError, TypeError):
            return cls()

    def write(self, output: Path) -> None:
        """Write the mark to ``history.json`` in the folder ``output``, and create the folder if needed.

        Raises:
            RunError: the file cannot be written. Without it a restart would not know the choice of this start.
        """
        try:
            output.mkdir(parents=True, exist_ok=True)
            replace_text(output / HISTORY, self.text)
        except OSError as error:
            raise RunError(f"{output / HISTORY} could not be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class ResumePoint:
    """State that a run resumes from, and the mark that records the choice.

    Args:
        source: the state, or None to start anew.
        state: the run's values in it, or None to start anew.
        place: folder of the state, or ``memory``; ``""`` to start anew.
        mark: new content of ``history.json``.
        passed_over: sentences about newer states that were not taken, with reasons.
        abandons: True if newer states of this run must not be resumed any more.
    """

    source: Source | None
    state: RunState | None
    place: str
    mark: Mark
    passed_over: tuple[str, ...]
    abandons: bool = False

    @property
    def notices(self) -> list[str]:
        """Lines for the console about newer states that were not taken."""
        instead = f"{self.place} is used instead" if self.place else "the run starts at step 0"
        return [f"skipped {words}; {instead}" for words in self.passed_over]

    @property
    def groups(self) -> str:
        """Rule that made the parameter groups of the saved optimizer; ``""`` for a run that starts anew."""
        return self.source.manifest.get("groups", SHAPES) if self.source is not None else ""

    def take(self, output: Path, disk: Disk) -> None:
        """Write ``history.json`` into ``output``, and rename newer states if ``abandons``; call on all ranks.

        Call after all other checks. Rank 0 writes the file.

        Raises:
            RunError: the output folder cannot be written to.
        """
        if self.abandons:
            disk.world.together(disk.set_aside_newer, acts=disk.leads)
        if disk.world.rank == 0:
            self.mark.write(output)


def choose(output: Path, resume: str, disk: Disk, memory: Memory | None, *, restarts: int) -> ResumePoint:
    """Choose the state that a run resumes from; call on all ranks.

    After a restart this is the newest state that the run has left, on disk or in memory. Otherwise ``resume`` decides.

    Args:
        output: output folder of the run, with ``history.json``.
        resume: value of ``--resume``.
        disk: store on disk; its ``history`` and ``resumed_step`` are set.
        memory: store in memory, or None; its ``history`` is set.
        restarts: number of times that the run was restarted.

    Raises:
        UserError: see ``find``.
    """
    world, path = disk.world, output / HISTORY
    readable = world.rank == 0 and path.is_file()
    before = Mark.of(world.broadcast_text(path.read_text(encoding="utf-8") if readable else ""))
    launch = world.broadcast_text(os.environ.get(LAUNCH) or os.environ.get("TORCHELASTIC_RUN_ID", ""))
    # True if an earlier start of this launch has chosen; one that died before leaves the choice to this start.
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
