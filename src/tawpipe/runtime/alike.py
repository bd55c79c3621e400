"""Comparison of the files that each rank has read from its own disk, made before the run uses them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar, cast

from tawpipe.errors import UserError
from tawpipe.model.facts import Fact, Facts
from tawpipe.model.files.build import resolve_model
from tawpipe.model.files.pretrained import folder_facts
from tawpipe.runtime.world import World, in_words

T = TypeVar("T")
SAME_FILES = "the same files on every machine"
LONGEST, MOST_NAMED = 80, 3
"""Largest number of characters of a value, and of differences, in an error message."""


def same_folder(world: World, spec: str, *, code: bool = False) -> Path | None:
    """Resolve a model's folder on every rank, check that all ranks have equal files, and return this rank's path.

    Call on all ranks.

    Args:
        spec: folder, model name or preset that ``resolve_model`` accepts.
        code: if True, Python modules that come with the model will be executed, so their files are compared as well.

    Returns:
        The folder, or None for a preset.

    Raises:
        UserError: On all ranks, if the folders differ or some rank cannot read its folder.
    """
    facts = lambda folder: folder_facts(folder, code=code) if folder else {}  # noqa: E731
    return read_alike(world, "model", spec, SAME_FILES, lambda: resolve_model(spec), facts)


def read_alike(
    world: World, setting: str, value: object, expected: str, read: Callable[[], T], facts: Callable[[T], Facts]
) -> T:
    """Call ``read`` on every rank, check that all ranks read equal content, and return this rank's result.

    Call on all ranks: either all return or all raise. A single process only calls ``read``.

    Args:
        setting: Name of the setting in the error.
        value: Value of the setting in the error.
        expected: Text of the error that says what is required.
        read: Reads the content on this rank.
        facts: Returns the facts to compare about the result of ``read``.

    Raises:
        UserError: On all ranks, if a fact differs from rank 0's or if ``read`` fails on some rank.
        Exception: The error of ``read`` itself, on a rank where it is not a UserError, OSError, ValueError or KeyError,
            or if all ranks failed.
    """
    if world.group is None:
        return read()
    known, problem, result = Facts(), None, None
    try:
        result = read()
        known = facts(result)
    except Exception as error:  # any error: this rank must still take part in the exchange below
        problem = error
    refusal = [problem.setting, str(problem.value), problem.expected] if isinstance(problem, UserError) else None
    if problem and not refusal:
        refusal = [setting, str(value), f"{expected}, which can be read ({in_words(problem)})"]
    digest = blake2b(json.dumps(sorted((name, *fact[1:]) for name, fact in known.items())).encode()).hexdigest()
    world.wait_patiently()  # another rank may read from a slower disk
    everyone = [json.loads(text) for text in world.gather_texts(json.dumps([socket.gethostname(), digest, refusal]))]
    hosts, digests, refusals = zip(*everyone, strict=True)
    if any(refusals):
        if problem and (all(refusals) or not isinstance(problem, UserError | OSError | ValueError | KeyError)):
            raise problem
        refused = [rank for rank, refusal in enumerate(refusals) if refusal]
        setting, value, expected = refusals[refused[0]]
        raise UserError(setting, value, f"{expected}; so {_named(refused, hosts)}, not on all") from problem
    if len(set(digests)) > 1:
        first = {name: Fact(*fact) for name, fact in json.loads(world.broadcast_text(json.dumps(known))).items()}
        ranks = dict[str, list[int]]()
        for rank, words in enumerate(world.gather_texts(_difference(known, first))):
            ranks.setdefault(words, []).append(rank)
        odd = [f"{words} {_named(some, hosts)}" for words, some in ranks.items() if words]
        raise UserError(setting, value, f"{expected}; {'; '.join(odd[:MOST_NAMED])}, unlike {_named([0], hosts)}")
    return cast(T, result)


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks and their host names as text, for example ``on rank 0, 1 (host-a)``."""
    return f"on rank {', '.join(map(str, ranks))} ({', '.join(sorted({hosts[rank] for rank in ranks}))})"


def _difference(known: Mapping[str, Fact], first: Mapping[str, Fact]) -> str:
    """Return text about the first fact in ``known`` that differs from rank 0's ``first``, and the count of the others.

    Returns ``""`` if no fact differs.
    """
    nothing = Fact("", "missing")
    odd = [name for name in {**first, **known} if known.get(name, nothing)[1:] != first.get(name, nothing)[1:]]
    if not odd:
        return ""
    ours, theirs = (facts.get(odd[0], nothing) for facts in (known, first))
    words = odd[0] + (f" in {file}" if (file := ours.file or theirs.file) else "")
    pairs = enumerate(zip(ours.shown, theirs.shown, strict=False))
    alike = next((at for at, (our, their) in pairs if our != their), min(len(ours.shown), len(theirs.shown)))
    shown = [_excerpt(fact.shown, max(0, alike - LONGEST // 2)) for fact in (ours, theirs)]
    words += f" is {shown[0]} instead of {shown[1]}" if shown[0] != shown[1] else " has other content"
    return words + (f" (and {len(odd) - 1} more)" if len(odd) > 1 else "")


def _excerpt(text: str, begin: int) -> str:
    """Return at most ``LONGEST`` characters of ``text`` from index ``begin``, or all of ``text`` if it is no longer.

    Cut ends are marked with ``...``.

    >>> _excerpt("a" * 100 + "b", 61)
    '...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab'
    """
    begin = begin if len(text) > LONGEST else 0
    return f"{'...' * (begin > 0)}{text[begin : begin + LONGEST]}{'...' * (len(text) > begin + LONGEST)}"
