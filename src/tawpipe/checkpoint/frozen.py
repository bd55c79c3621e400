"""Frozen weights that a state refers to: it holds the digest of each and the name of their folder instead of values.

A digest is computed from the values in the folder. It does not depend on processes, dtype, ``quantize`` or the path of
the folder. A copy of the weights in another folder is therefore accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tawpipe.checkpoint.format import Manifest, read_manifest
from tawpipe.errors import UserError
from tawpipe.model.files.pretrained import SNAPSHOTS
from tawpipe.model.units import base_name

OF_LIBRARY = "in the library weights=lambda chain: SafetensorsSource(chain, FOLDER) reads them"


def digests_in(manifest: Manifest) -> Mapping[str, str]:
    """Return the digests of frozen parameters that a state refers to, by name; empty if it holds all values."""
    return manifest.get("frozen", {}).get("parameters", {})


def folder_of(manifest: Manifest) -> str:
    """Return the folder that the frozen parameters came from, or ``owner/name@revision`` for one in the Hub's cache."""
    path = Path(manifest["frozen"]["folder"])
    if path.parent.name != SNAPSHOTS:
        return str(path)
    return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"


def difference(manifest: Manifest, digests: Mapping[str, str]) -> str:
    """Compare digests with those in the state; return text about the parameters that differ, or ``""`` if none does.

    The text names the first of these parameters, and has their number.

    Args:
        manifest: manifest of the state.
        digests: digests of the frozen weights in use, by name; a missing one counts as different.
    """
    wanted = digests_in(manifest)
    others = [name for name in wanted if digests.get(name) != wanted[name]]
    return f"{base_name(others[0])} differs ({len(others)} of {len(wanted)} parameters do)" if others else ""


def refuse_other_frozen(manifest: Manifest, where: str, digests: Mapping[str, str], folder: str) -> None:
    """Raise UserError if the frozen weights in use differ from the digests in the state.

    Args:
        manifest: manifest of the state.
        where: folder of the state.
        digests: digests of the frozen weights in use, by name.
        folder: folder of the weights in use; ``""`` without one.

    Raises:
        UserError: a parameter differs.
    """
    if words := difference(manifest, digests):
        words = f"in this one {words}" if folder else OF_LIBRARY
        raise UserError("model", folder or "no folder with weights", f"{_needed(manifest, where)}; {words}")


@contextmanager
def naming_frozen(where: Path | None) -> Iterator[None]:
    """Return a context that adds to a UserError which frozen weights the state in ``where`` needs.

    The error is raised unchanged if ``where`` is None, or if the state holds the values of all its weights."""
    try:
        yield
    except UserError as error:
        manifest: Manifest = {}
        with suppress(UserError):  # a damaged manifest is refused later
            manifest = read_manifest(where) if where is not None else {}
        if not digests_in(manifest):
            raise
        raise UserError(error.setting, error.value, f"{error.expected}. {_needed(manifest, str(where))}") from error


def _needed(manifest: Manifest, where: str) -> str:
    """Return a sentence that names the frozen weights that the state in ``where`` needs."""
    folder = folder_of(manifest)
    return f"{where} does not hold the frozen weights of this run; expected the weights of {folder} or a copy of them"
