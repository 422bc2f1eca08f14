"""Let the frequencies of a dynamic method follow the length, and the cache follow the frequencies."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._dynamic import CountedForward, DynamicForward, DynamicSite
from ctxext.architectures._hf import ROPE_TYPE
from ctxext.architectures._plan import Plan
from ctxext.architectures._regime import recompute_in_generate
from ctxext.architectures._sites import Site
from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod

__all__ = ["follow_length"]


def follow_length(model: PreTrainedModel, method: RopeMethod, sites: list[Site], plan: Plan, edits: Edits) -> None:
    """Edit the rotary modules of a model that carries ``plan``'s config, and its generation.

    Raises:
        IncompatibleError: if some of them rotate other positions than those of the sequence.
    """
    paths = dict.fromkeys(site.path for site in sites)
    owners = {path: _owner(model, path) for path in paths}
    for owner in owners.values():
        if not hasattr(owner, "config"):  # neither a decoder nor its attention: it is not called with the sequence
            raise IncompatibleError(
                f"Method {method.name!r} follows the length of the sequence, but {type(owner).__name__} rotates "
                f"positions of its own, which do not tell that length. Pick a method that is not dynamic."
            )
    for path in paths:
        rotary = model.get_submodule(path)
        here = [site for site in sites if site.path == path]
        table: dict[str | None, DynamicSite] = {}
        for site in here:
            spec, rope_type = plan.specs[site.layer_type], plan.rope_types[site.layer_type]
            table[site.layer_type] = DynamicSite(rotary, site.layer_type, method, spec, rope_type)
        edits.set(rotary, "forward", DynamicForward(rotary, table))
        # Stock forward methods update themselves by the name of the rope type; this name means: do not.
        kinds = rotary.rope_type
        changed = kinds | dict.fromkeys(table, ROPE_TYPE) if isinstance(kinds, dict) else ROPE_TYPE
        edits.set(rotary, "rope_type", changed)
    for decoder in dict.fromkeys(owners.values()):
        edits.set(decoder, "forward", CountedForward.around(decoder))
    trained_length = next(iter(plan.specs.values())).trained_length
    recompute_in_generate(model, method, trained_length, edits)


def _owner(model: PreTrainedModel, path: str) -> nn.Module:
    """The module that calls the rotary module at ``path``; a list that holds it is never called itself."""
    owner: nn.Module = model
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            break
    return owner
