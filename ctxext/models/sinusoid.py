"""Models that add sinusoids to their input: Marian, Pegasus, FSMT, XGLM, M2M-100, NLLB, Seamless, CTRL and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.core.architecture import refuse_choices
from ctxext.core.edits import Edits
from ctxext.core.saved import GUARDED, guarded_field
from ctxext.core.subject import Subject, field_of
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.files import JsonObject, digest
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.remap import RemapMethod
from ctxext.models.lookups import table_of
from ctxext.models.table import LongerTable, TableArchitecture, extension_of, is_stored
from ctxext.models.table_rows import (
    PositionTable,
    prove,
    replace_tables,
    twin_of,
    twins_of,
    values_of,
    weight_of,
)
from ctxext.probe.code import names_of
from ctxext.rope_types import GUARD
from ctxext.spec import Extension, ExtensionArguments, RopeSpec

EXAMPLE = RopeSpec(rotary_dim=64, base=10000.0, trained_length=4096)  # spec for listing the usable methods
BASE = 10000.0
ANGLE = 2.0**-22  # rounding error of angles in float32, in radians per row
REMAKERS = ("make_weights", "make_weight")  # methods by which fairseq's module and its descendants recompute the table


@dataclass(frozen=True)
class Sinusoid:
    """The formula of a table: row ``r`` holds the sine and the cosine of ``r`` times each of its frequencies.

    Args:
        width: Number of columns, even.
        base: Base of the frequencies, ``base^(-2i/width)``.
        interleaved: True if the sine and the cosine of a frequency are neighbours; else all sines come first.
        first: Row of the first token.
    """

    width: int
    base: float
    interleaved: bool
    first: int

    def spec(self, trained_length: int) -> RopeSpec:
        """Return the spec that a method for rotations takes for this table."""
        return RopeSpec(rotary_dim=self.width, base=self.base, trained_length=trained_length)

    def rows(
        self, start: int, stop: int, inv_freq: Float[Tensor, " half"] | None = None
    ) -> Float[Tensor, "rows width"]:
        """Compute rows from ``start`` to ``stop``, in float64.

        The growth of each angle from token to token is ``inv_freq``, in radians; None for the formula's own
        frequencies. The first token keeps its trained vector.
        """
        plain = plain_inv_freq(self.spec(1))
        moving = plain if inv_freq is None else inv_freq
        token = torch.arange(start - self.first, stop - self.first, dtype=torch.float64, device="cpu")
        angles = self.first * plain + token[:, None] * moving
        if self.interleaved:
            return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return torch.cat([angles.sin(), angles.cos()], 1)


def sinusoid_of(table: Tensor, first: int) -> Sinusoid | None:
    """Return the published formula that gives the rows of tokens; None if none does.

    Both published spectra fall from 1 to 1/10000. The spectrum of the Transformer's paper would reach 1/10000 one
    frequency after its last; fairseq's reaches it with the last one, as the same series with a slightly larger base.

    Source: Vaswani et al., arXiv:1706.03762, section 3.5; facebookresearch/fairseq@05625e3,
        fairseq/modules/sinusoidal_positional_embedding.py, ``get_embedding``.
    """
    half, odd = divmod(table.shape[1], 2)
    if odd:
        return None
    for base in (BASE, BASE ** (half / (half - 1)) if half > 1 else BASE):
        for interleaved in (False, True):
            formula = Sinusoid(table.shape[1], base, interleaved, first)
            rounding = torch.finfo(table.dtype).eps + ANGLE * torch.arange(first, len(table)).double()
            rows = table.detach()[first:].to("cpu", torch.float64)
            if bool(((rows - formula.rows(first, len(table))).abs() <= rounding[:, None]).all()):
                return formula
    return None


def remaker_of(module: nn.Module) -> str | None:
    """Return the name of the method that recomputes the module's table for a longer text; None without one."""
    return next((name for name in REMAKERS if callable(getattr(type(module), name, None))), None)


def rotates_by_table(model: nn.Module) -> bool:
    """Return whether a model rotates by a table of sinusoids, which other models add to their input."""
    code = names_of(type(model))
    buffers = [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_parameters()]
    verbs = [*code, *(name for module in model.modules() for name in vars(type(module)))]
    return any("embed_positions" in name for name in buffers) and any(name.startswith("apply_rotary") for name in verbs)


@dataclass
class Growing:
    """Replacement of the method that recomputes a module's table for a longer text: it appends rows instead."""

    module: nn.Module
    leaf: str
    formula: Sinusoid
    inv_freq: Tensor

    def __call__(self, rows: int, *_: Any) -> None:
        """Lengthen the table to ``rows`` rows; further arguments of the class's method are ignored."""
        old: Tensor = getattr(self.module, self.leaf)
        with torch.inference_mode(False), torch.no_grad():  # the table is kept, and may be trained
            more = self.formula.rows(len(old), rows, self.inv_freq).to(old)
            longer = torch.cat([old.detach(), more])
            is_weight = isinstance(old, nn.Parameter)
            new = nn.Parameter(longer, requires_grad=old.requires_grad) if is_weight else longer
        setattr(self.module, self.leaf, new)


@dataclass(frozen=True)
class Site(LongerTable):
    """One table of sinusoids to extend, with the formula of its rows, and the new growth of each angle in radians."""

    formula: Sinusoid
    inv_freq: Tensor


class Sinusoids(TableArchitecture):
    """Tables of sinusoids, whose rows are recomputed at the frequencies of a method for rotations.

    If the table is saved among the weights, plain transformers loads the result. If transformers computes the table
    whenever it builds the model, the config is written so that plain transformers refuses the checkpoint.
    """

    name = "sinusoid"
    positions = "sinusoids"

    def matches(self, subject: Subject) -> bool:
        return twins_of(subject.model).has_sinusoids and not rotates_by_table(subject.model)

    def method_names(self) -> list[str]:
        return usable_methods()

    def tables(self, subject: Subject) -> list[PositionTable]:
        return twins_of(subject.model).sinusoids

    def counted(self, subject: Subject, table: PositionTable) -> int:
        stated: int = getattr(*field_of(subject.config, table.field))
        return min(stated, table.positions)

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        rotation, twins = _checked(subject, method, request), twins_of(subject.model)
        longer = self.longer(subject, method, request)
        tables = [each.table for each in longer]
        sites = [_site(subject, rotation, each) for each in longer]
        original: JsonObject = {each.field: getattr(*field_of(subject.config, each.field)) for each in tables}
        fields = {  # a table with enough rows keeps its field
            site.table.field: original[site.table.field] + max(0, site.target - self.counted(subject, site.table))
            for site in sites
        }
        has_reserved = any(table.first for table in tables)
        after = _as_built(subject, tables, fields) if has_reserved else twin_of(subject.model, fields)
        new = {site.table.name: _recomputed(site, after, subject.model) for site in sites}
        stored = all(is_stored(subject, table.name) for table in tables)
        guarded = None if stored else guarded_field(subject, "would compute its sinusoids without the extension")
        replace_tables(twins, new, fields, edits, after=after)
        prove(after, tables, new)
        for site in sites:
            module, leaf = field_of(subject.model, site.table.name)
            if (remaker := remaker_of(module)) is not None:  # its table goes on with the extension for longer texts
                edits.set(module, remaker, Growing(module, leaf, site.formula, site.inv_freq))
            _prove(subject, site)
        if guarded is not None:
            original[guarded] = getattr(subject.config, guarded)
            edits.set_unchecked(subject.config, guarded, GUARD)
        return extension_of(
            longer,
            fields,
            original=original,
            stored_as="another table of weights" if stored else "config.ctxext; stock code refuses the checkpoint",
            stock=stored,
            fingerprint=_fingerprint(sites),
            notes=_notes(subject, sites, stored),
        )

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        tables, twins = self.tables(subject), twins_of(subject.model)
        fields = {name: original[name] for name in {table.field for table in tables}}
        before = _as_built(subject, tables, fields)
        old = {
            each.name: table_of(before, each.name).detach().to(table_of(subject.model, each.name)) for each in tables
        }
        replace_tables(twins, old, fields, edits, after=before)
        for name in original.keys() & set(GUARDED):
            edits.set(subject.config, name, original[name])

    def spec(self, subject: Subject) -> RopeSpec:
        """Return the spec of the table with the most positions.

        Raises:
            IncompatibleError: as for ``tables``, and if the table has no known formula.
        """
        table = max(self.tables(subject), key=lambda each: self.counted(subject, each))
        return _formula(subject, table).spec(self.counted(subject, table))

    def replaces_weights(self, subject: Subject, saved: JsonObject | None = None) -> bool:
        return any(is_stored(subject, name) for growth in twins_of(subject.model).growths for name in growth.tables)


def usable_methods() -> list[str]:
    """Return the names of methods whose defaults give one set of frequencies and nothing else."""
    examples = [cls.example(EXAMPLE) for cls in METHODS.values() if issubclass(cls, RopeMethod)]
    fitting = [method for method in examples if _why_not(method) is None]
    given = {method.name: method.frequencies(EXAMPLE, EXAMPLE.trained_length) for method in fitting}
    return [name for name, each in given.items() if each.attention_scale == 1 and each.inv_freq.any()]


def _why_not(method: Method) -> str | None:
    """Return why a method does not apply to a vector that is added to each token; None if it does."""
    if not isinstance(method, RopeMethod):
        return "gives no frequencies"
    if isinstance(method, RemapMethod):
        return "gives a token several positions, but only one vector is added to each token"
    if method.dynamic:
        return "follows the length of each text, but the table is the same for all texts"
    return None


def _checked(subject: Subject, method: Method, request: ExtensionArguments) -> RopeMethod:
    """Return the method if it applies to sinusoids in the input.

    Raises:
        IncompatibleError: if it does not.
        InvalidParameterError: if the request makes a choice without effect here.
    """
    refuse_choices(
        request, ("sliding_window", "attention"), "other sinusoids in the input leave attention to the model"
    )
    reason = _why_not(method)
    if reason is None and isinstance(method, RopeMethod):
        return method
    raise IncompatibleError(
        f"This {subject.kind} adds sinusoids to its input. Method {method.name!r} {reason}. Methods for "
        f"it: {', '.join(usable_methods())}, and yarn with attention_factor=1.0."
    )


def _formula(subject: Subject, table: PositionTable) -> Sinusoid:
    """Return the formula of a table.

    Raises:
        IncompatibleError: if the formula is unknown, or another object has taken the place of the table.
    """
    if any(table.name in growth.tables for growth in twins_of(subject.model).growths):
        weight_of(subject.model, table.name)  # raises if it is quantised, sharded or missing
    if (formula := sinusoid_of(values_of(twins_of(subject.model), table.name), table.first)) is not None:
        return formula
    raise IncompatibleError(
        f"The sinusoids in {table.name} of this {subject.kind} have unknown frequencies: in "
        f"{table_of(subject.model, table.name).dtype} they are neither those of the Transformer's paper nor of "
        f"fairseq. Load the original checkpoint."
    )


def _site(subject: Subject, method: RopeMethod, longer: LongerTable) -> Site:
    """Find the formula of a table, and the frequencies that a method gives it.

    Raises:
        IncompatibleError: if the method also has a temperature, or stops all rotation; or if the formula is unknown.
    """
    formula, kind = _formula(subject, longer.table), subject.kind
    frequencies = method.frequencies(formula.spec(longer.trained), method.target_length(longer.trained))
    if frequencies.attention_scale != 1:
        raise IncompatibleError(
            f"Method {method.name!r} also multiplies cos and sin by {frequencies.attention_scale:.4g}, to sharpen the "
            f"attention of rotated queries and keys. This {kind} adds its sinusoids to its input, where that has no "
            f"such effect. Pass attention_factor=1.0 if the method has it, or take one of "
            f"{', '.join(usable_methods())}."
        )
    if not frequencies.inv_freq.any():
        raise IncompatibleError(
            f"This {kind} adds sinusoids to its input, and method {method.name!r} would add the same vector to every "
            f"token. Methods for it: {', '.join(usable_methods())}."
        )
    return Site(longer.table, longer.trained, longer.target, formula, frequencies.inv_freq)


def _as_built(subject: Subject, tables: list[PositionTable], fields: dict[str, int]) -> PreTrainedModel:
    """Return a twin with other fields, whose tables the model's class has filled."""
    more = {each.name: fields[each.field] - getattr(*field_of(subject.config, each.field)) for each in tables}
    shapes = [(each.rows + more[each.name], table_of(subject.model, each.name).shape[1]) for each in tables]
    return twin_of(subject.model, fields, real=shapes)


def _recomputed(site: Site, twin: PreTrainedModel, live: PreTrainedModel) -> Tensor:
    """Return a table at other frequencies, rounded once; rows before the first token's come from the ``twin``."""
    first, old = site.table.first, table_of(live, site.table.name)
    built = table_of(twin, site.table.name).detach()
    rows = site.formula.rows(first, len(built), site.inv_freq)
    if first:
        rows = torch.cat([built[:first].to(rows), rows])
    return rows.to(old.dtype).to(old.device)


def _prove(subject: Subject, site: Site) -> None:
    """Compare the live table with the method's mathematics, at every position."""
    live, first = table_of(subject.model, site.table.name), site.table.first
    if live.is_meta:
        return
    exact = site.formula.rows(first, len(live), site.inv_freq)
    error = (live.detach()[first:].to(exact) - exact).abs().max()
    if not error <= torch.finfo(live.dtype).eps:
        raise VerificationError(f"The patched {site.table.name} differs by {float(error):.2g} from the method's rows.")


def _fingerprint(sites: list[Site]) -> str:
    """Return 12 hexadecimal digits of a hash of the tables and their new frequencies."""
    return digest(
        b"".join(
            repr((site.table.name, site.formula)).encode() + site.inv_freq.float().numpy().tobytes() for site in sites
        )
    )


def _notes(subject: Subject, sites: list[Site], stored: bool) -> list[str]:
    """Return the notes for a user of the model, one or two sentences each."""
    notes = ["Positions of short texts change too: train before use, or compare."]
    end = max(site.target for site in sites)
    if any(remaker_of(field_of(subject.model, site.table.name)[0]) for site in sites):
        notes.append(f"Beyond {end:,} tokens the table continues with the extension.")
        if stored:
            notes[-1] += (
                " Plain transformers recomputes it there without the extension, and keeps that. Use ctxext.load for "
                "such texts."
            )
    return notes
