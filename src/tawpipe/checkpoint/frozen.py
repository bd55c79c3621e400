"""Frozen weights that a state refers to: it holds a digest of each and the name of their folder instead of values.

A digest is of the values as the folder has them. It depends neither on processes, dtype and ``quantize`` nor on where
the folder is, so the same weights in another folder are as good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tawpipe.checkpoint.format import Manifest, read_manifest
from tawpipe.errors import UserError
from tawpipe.model.files.pretrained import SNAPSHOTS
from tawpipe.model.weights import base_name

OF_LIBRARY = "in the library weights=lambda chain: SafetensorsSource(chain, FOLDER) reads them"


def digests_in(manifest: Manifest) -> Mapping[str, str]:
    """Digests of the frozen parameters that a state refers to, by name; empty if it holds all values."""
    return manifest.get("frozen", {}).get("parameters", {})


def folder_of(manifest: Manifest) -> str:
    """Folder that the frozen parameters came from; ``owner/name@revision`` for one in the cache of the Hub."""
    path = Path(manifest["frozen"]["folder"])
    if path.parent.name != SNAPSHOTS:
        return str(path)
    return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"


def difference(manifest: Manifest, digests: Mapping[str, str]) -> str:
    """The first parameter whose digest is another one, and the number of these, in words; empty if there is none."""
    wanted = digests_in(manifest)
    others = [name for name in wanted if digests.get(name) != wanted[name]]
    return f"{base_name(others[0])} differs ({len(others)} of {len(wanted)} parameters do)" if others else ""


def refuse_other_frozen(manifest: Manifest, where: str, digests: Mapping[str, str], folder: str) -> None:
    """Refuse a state whose frozen weights are not those at hand.

    Args:
        where: the state's folder.
        digests: of the weights at hand, by name.
        folder: with the weights at hand; empty if they come from none.

    Raises:
        UserError: a parameter differs.
    """
    if words := difference(manifest, digests):
        words = f"in this one {words}" if folder else OF_LIBRARY
        raise UserError("model", folder or "no folder with weights", f"{_needed(manifest, where)}; {words}")


@contextmanager
def naming_frozen(where: Path | None) -> Iterator[None]:
    """Say in a refusal of the model that the state in the folder ``where`` needs its weights, if it does."""
    try:
        yield
    except UserError as error:
        manifest: Manifest = {}
        with suppress(UserError):  # one that is damaged is refused later
            manifest = read_manifest(where) if where is not None else {}
        if not digests_in(manifest):
            raise
        raise UserError(error.setting, error.value, f"{error.expected}. {_needed(manifest, str(where))}") from error


def _needed(manifest: Manifest, where: str) -> str:
    folder = folder_of(manifest)
    return f"{where} does not hold the frozen weights of this run; expected the weights of {folder} or a copy of them"
