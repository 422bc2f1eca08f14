"""What kind of positions a model has, and which groups of methods are for it."""

from __future__ import annotations

from transformers import PreTrainedModel

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod, TableMethod, known_methods
from ctxext.methods.remap import RemapMethod
from ctxext.models import find_architecture
from ctxext.models.alibi import AlibiArchitecture
from ctxext.models.unknown import why_absent

# Groups of methods by what they change; a method belongs to the first one that fits.
GROUPS: dict[str, type[Method]] = {"remap": RemapMethod, "frequencies": RopeMethod, "slopes": BiasMethod}
GROUPS |= {"rows": TableMethod, "buckets": BucketMethod, "encodings": EncodingMethod}

NO_POSITIONS, OTHER = "none", "other"

# For each kind of positions the groups whose methods are all walked, the most natural one first; of the other groups,
# and of all groups for a kind that is not here, one method is tried, and the rest where that is not refused.
_OF_KIND: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rotary", "rotary encoder", "rotary on two sides"), ("frequencies", "remap", "slopes")),
    "ALiBi": ("slopes",),
    "learned table": ("rows",),
    "buckets": ("buckets",),
    "sinusoids": ("frequencies",),
}

_BY_ARCHITECTURE = {"rope": "rotary", "table": "learned table", "sinusoid": "sinusoids"}


def positions_of(model: PreTrainedModel, read_as: str) -> str:
    """The kind of positions that a model has, which is walked as one of ``tests.walk.tiny.KINDS``, in a word or two."""
    found = find_architecture(Subject.of(model))
    if found is None:
        why = why_absent(model)
        return NO_POSITIONS if "no positions at all" in why else "sinusoids" if "sinusoid" in why else OTHER
    if isinstance(found, AlibiArchitecture):
        return "ALiBi"
    kind = _BY_ARCHITECTURE.get(found.name, found.name)
    if kind == "rotary" and _has_sides(model):
        return "rotary on two sides"
    writes = read_as in ("causal", "seq2seq", "speech", "pictures")
    return "rotary encoder" if kind == "rotary" and not writes else kind


def _has_sides(model: PreTrainedModel) -> bool:
    try:
        return bool(Subject.of(model).sides)
    except IncompatibleError:  # it has, and they cannot be told apart
        return True


def groups_for(kind: str) -> tuple[str, ...]:
    """The groups of methods that are walked whole for a kind of positions."""
    return _OF_KIND.get(kind, ())


def group_of(method: str | type[Method], kind: str) -> str:
    """The group that a method belongs to, on models of a kind of positions."""
    cls = known_methods()[method] if isinstance(method, str) else method
    names = [name for name, base in GROUPS.items() if issubclass(cls, base)]
    return next((name for name in groups_for(kind) if name in names and "remap" not in names), names[0])
