"""Choice of the kernels for norms, rotary embeddings and gates of layers: the model's own code, or fused ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.fused.operations import EAGER, KEEPING_INPUTS, PACKAGE, liger, missing_package
from tawpipe.model.fused.places import KINDS, largest_difference
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ELEMENTWISE

KERNELS = ("eager", "fused", "auto")
"""Values of ``TrainingSettings.kernels``."""
FASTER: Mapping[str, str] = {}
"""Name of a device -> folder below benchmarks/results which shows that fused kernels are faster there."""


def choose_kernels(chain: Chain, kernels: str, world: World, dtype: torch.dtype, recompute: str) -> str:
    """Choose the functions that compute norms, rotary embeddings and gates of layers; call on all ranks.

    Fused kernels are compared with the definitions of these functions on the device: outputs and gradients of random
    inputs. A chain that computes by other functions already keeps them.

    Args:
        chain: the model.
        kernels: one of ``KERNELS``. ``auto`` is ``fused`` on devices in ``FASTER``, if that works, else ``eager``.
        world: all processes.
        dtype: dtype in which blocks compute.
        recompute: value of the setting. With ``elementwise``, norms and gates keep only their inputs in any case.

    Returns:
        A line about the choice, or ``""`` if nothing was to be chosen: on CPUs under ``auto``, or for such a chain.

    Raises:
        UserError: ``fused`` does not work on some rank; on all ranks. Or ``elementwise`` finds no norms and gates.
    """
    words = _chosen(chain, kernels, world, dtype)
    if ELEMENTWISE in recompute and chain.operations is EAGER and not chain.compute_by(KEEPING_INPUTS):
        expected = f"full, selective or none: layers of {chain.name} have no norms and gates that can be computed apart"
        raise UserError("schedule.recompute", recompute, expected)
    return words


def _chosen(chain: Chain, kernels: str, world: World, dtype: torch.dtype) -> str:
    """Put fused kernels into the chain if they are chosen; return a line about them; see ``choose_kernels``."""
    if chain.operations is not EAGER or kernels == "eager" or (kernels == "auto" and world.device.type != "cuda"):
        return ""
    why, words = _take_fused(chain, kernels, world.device, dtype)
    if kernels == "fused":
        world.require(not why, "kernels", kernels, f"eager or auto: {why or 'fused kernels do not work everywhere'}")
    elif not all(world.gather_numbers(float(not why))):
        chain.compute_by(EAGER)
        return f"kernels: eager ({why or 'fused ones do not work on all devices'})"
    return f"kernels: fused ({words})"


def _take_fused(chain: Chain, kernels: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Put fused kernels into the chain's layers; return the reason why they cannot be used, and a description."""
    if kernels == "auto" and (name := torch.cuda.get_device_name(device)) not in FASTER:
        return f"no committed result shows that fused ones are faster on {name}", ""
    if device.type != "cuda" or dtype == torch.float64:
        return "fused kernels run on GPUs, in float32 and bfloat16", ""
    if why := missing_package():
        return why, ""
    limit = max(1e-5, 2 * torch.finfo(dtype).eps)
    try:
        operations = liger()
        places = chain.compute_by(operations)
        apart = {place: largest_difference(place, operations, device, dtype) for place in places}
    except Exception as error:  # from compilers of kernels, too; ranks that wait must hear of it
        return f"{PACKAGE} fails with {type(error).__name__} ({error})", ""
    if wrong := [place for place in places if not apart[place] <= limit]:
        return f"{operations.name} differs from the model by {apart[wrong[0]]:.0e} in {KINDS[wrong[0].kind]}", ""
    if not places:
        return f"layers of {chain.name} have no norms, rotary embeddings or gates that {operations.name} computes", ""
    counts = {kind: sum(count for place, count in places.items() if place.kind == kind) for kind in KINDS}
    some = ", ".join(f"{count or 'no'} {KINDS[kind]}" for kind, count in counts.items())
    return "", f"{operations.name}: {some}; largest difference {max(apart.values()):.0e}"
