"""Find tables of positions in any model, lengthen them in place, and read them back.

A table is a weight or buffer whose rows grow with a config field that counts positions. Two twins of the model that
differ in that field show the tables and everything else that has to grow with them (position ids, token type ids,
causal masks). A twin that reads tokens shows the row of the first token, which is never assumed.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.caches.digest import is_zero3
from ctxext.core.edits import Edits
from ctxext.core.old_form import drop_old_form
from ctxext.core.rebuild import Unfilled, reread, restoring
from ctxext.core.saved import without_guard
from ctxext.core.scaling import REFUSALS
from ctxext.core.subject import field_of
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.methods import METHODS, RopeMethod
from ctxext.methods.base import Rows
from ctxext.models.lookups import TOKENS, lookups, table_of

# Config fields that count positions of tokens, and below them fields that count distances or places on a page.
FIELD = re.compile(r"(^|_)(n_)?positions?(_|$)|n_ctx|max_seq|seq_len|context_length|max_source|max_target|max_text")
NO_FIELD = re.compile(r"2d|bucket|relative|type|token_id")
STEP = 8  # difference of the field between twins
LONGEST = 2**14  # longest text that a twin reads, since its masks grow with the square
SINUSOIDAL = 1e-3  # spread along diagonals of a Gram matrix: below 3e-6 for sinusoids, above 0.028 for other tables


Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


@dataclass(frozen=True)
class PositionTable:
    """A weight, or a buffer, with a row for each position.

    Args:
        field: Config field that sets the size, with dots for parts of the config.
        first: Row of the first token; rows before it belong to no position.
        skips_padding: True if padding tokens get no position, so that rows start after the padding id.
    """

    name: str
    field: str
    rows: int
    first: int
    token: int
    skips_padding: bool

    @property
    def positions(self) -> int:
        """Number of tokens that the table has a row for."""
        return self.rows - self.first


@dataclass(frozen=True)
class Growth:
    """The differences between a model and its twin with more positions.

    Args:
        tables: names of weights that gain rows, each with its present number of rows.
        computed: names of buffers that gain rows, which the model's code fills, with their present number of rows.
    """

    field: str
    tables: dict[str, int]
    computed: dict[str, int]
    others: tuple[str, ...]


class _WeightsOnMeta(Unfilled):
    """Function mode that allocates weights on the meta device, and all other tensors for real.

    Args:
        real: shapes of weights that are allocated for real, too.
    """

    def __init__(self, real: Iterable[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self.real = set(real)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and not self.real and len(args) == 1 and args[0] == [] and not kwargs:
            kwargs["device"] = "meta"  # transformers finds the device of weights this way, and initialises none on meta
        if func in (torch.empty, torch.rand, torch.randn) and kwargs.get("device") is None:
            size = args[0] if args and isinstance(args[0], list | tuple) else args
            if tuple(size) not in self.real:
                kwargs["device"] = "meta"
        return super().__torch_function__(func, types, args, kwargs)


def twin_of(model: PreTrainedModel, fields: dict[str, int], real: Iterable[tuple[int, ...]] = ()) -> PreTrainedModel:
    """Build the model from its config with other fields: real buffers, weights on the meta device.

    Raises:
        REFUSALS: if transformers cannot build it.
    """
    changed = copy.deepcopy(model.config)
    drop_old_form(changed)
    for name, value in fields.items():
        part, leaf = field_of(changed, name)
        setattr(part, leaf, value)
    without_guard(changed)
    config = reread(changed)
    config._attn_implementation_internal = "eager"
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), restoring(), _WeightsOnMeta(real):
        return type(model)(config).eval()


def fields_of_positions(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the fields of a config and of its parts that may count positions, with their values."""
    for name, value in vars(config).items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 1
        if is_count and FIELD.search(name) and not NO_FIELD.search(name):
            yield prefix + name, value
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from fields_of_positions(part, f"{prefix}{name}.")


@dataclass(eq=False)
class Twins:
    """Twins of a model and the tables that they show; each twin is built on first use, from the model of that time."""

    reference: weakref.ref[PreTrainedModel]

    @property
    def model(self) -> PreTrainedModel:
        """The live model itself."""
        model = self.reference()
        assert model is not None, "the caller holds the model"
        return model

    @functools.cached_property
    def plain(self) -> PreTrainedModel:
        """Twin with the present config."""
        return twin_of(self.model, {})

    @functools.cached_property
    def growths(self) -> list[Growth]:
        """Growth of each config field that weights or buffers grow with."""
        fields = list(fields_of_positions(self.model.config))
        try:
            before, buffers = (weights_of(self.plain), _computed(self.plain)) if fields else ({}, {})
        except REFUSALS:  # transformers cannot build the model at all
            return []
        growths = []
        for field, value in fields:
            try:
                twin = twin_of(self.model, {field: value + STEP})
            except (*REFUSALS, AssertionError):  # a field that cannot change counts something else
                continue
            tables, others = _grown(before, weights_of(twin))
            computed, _ = _grown(buffers, _computed(twin))
            if tables or computed:
                growths.append(Growth(field, tables, computed, others))
        return growths

    @functools.cached_property
    def tables(self) -> list[PositionTable]:
        """Tables whose rows tokens look up in order.

        Raises:
            IncompatibleError: if there is none, or if the rows of one cannot be assigned to positions.
        """
        tables = self._read_in_order(lambda growth: list(growth.tables))
        vars(self).pop("plain", None)  # its buffers may be large
        return tables

    @functools.cached_property
    def sinusoids(self) -> list[PositionTable]:
        """Tables of sinusoids whose rows tokens look up in order, weights and buffers alike.

        Raises:
            IncompatibleError: as for ``tables``.
        """
        return self._read_in_order(
            lambda growth: [name for name in growth.tables | growth.computed if name in self._sinusoidal]
        )

    @functools.cached_property
    def _sinusoidal(self) -> frozenset[str]:
        """Names of tables that hold sinusoids, which are computed and not learned."""
        names = {name for growth in self.growths for name in growth.tables | growth.computed}
        saved = getattr(self.model.config, "ctxext", None) or {}
        extending = METHODS.get(saved.get("method", {}).get("method"))
        if names and extending is not None and issubclass(extending, RopeMethod):
            # Look at the table before the extension: it may have been trained since, or mix two sets of frequencies.
            values = functools.partial(table_of, self.filled(names))
        else:
            values = functools.partial(values_of, self)
        return frozenset(name for name in names if is_sinusoidal(values(name)))

    def _read_in_order(self, names: Callable[[Growth], list[str]]) -> list[PositionTable]:
        accepted: list[PositionTable] = []
        refusals: list[str] = []
        kind = self.model.config.model_type
        for growth in self.growths:
            results = [_watched(self.plain, growth, name) for name in names(growth)]
            tables = [result for result in results if isinstance(result, PositionTable)]
            reasons = [result for result in results if isinstance(result, str)]
            reasons += [f"{name} changes with it in another way" for name in growth.others]
            if tables and reasons:
                raise IncompatibleError(
                    f"{growth.field} of this {kind} sets the size of {tables[0].name}, but not of that alone: "
                    f"{reasons[0]}. ctxext does not know how to extend both together."
                )
            for table in tables:
                self._refuse_other_padding(table)
            accepted += tables
            refusals += reasons
        if not accepted:
            reason = refusals[0] if refusals else "no weight grows with a field of its config that counts positions"
            raise IncompatibleError(f"This {kind} has no table of positions that can be lengthened: {reason}.")
        return accepted

    def _refuse_other_padding(self, table: PositionTable) -> None:
        """Refuse a config that names another padding token than the live model counts the rows of a table from."""
        owner, live = table.name.rpartition(".")[0], dict(self.model.named_modules())
        while owner and table.skips_padding:
            held, built = (
                getattr(each, "padding_idx", None) for each in (live.get(owner), self.plain.get_submodule(owner))
            )
            if held not in (None, built):
                raise IncompatibleError(
                    f"The config of this {self.model.config.model_type} has pad_token_id={built}, but {owner} was "
                    f"built with {held}, from which it counts positions. Set it back to {held}."
                )
            owner = owner.rpartition(".")[0]

    @property
    def has_learned(self) -> bool:
        """True if the model has a learned row for each position."""
        return any(name not in self._sinusoidal for growth in self.growths for name in growth.tables)

    @property
    def has_sinusoids(self) -> bool:
        """True if the vector of each position, or a part of it, is computed, and none is learned."""
        return not self.has_learned and bool(self._sinusoidal)

    def filled(self, names: Collection[str]) -> PreTrainedModel:
        """Return the twin with the present config, in which the class has filled the tables of these names."""
        if not any(table_of(self.plain, name).is_meta for name in names):
            return self.plain
        return twin_of(self.model, {}, real=[tuple(table_of(self.plain, name).shape) for name in names])


# Twins by model, with the state that they were built from: many methods are tried on one model in turn.
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Twins]] = weakref.WeakKeyDictionary()


def twins_of(model: PreTrainedModel) -> Twins:
    """Return the twins of a model, cached until its config or the shape of a weight changes."""
    now = (model.config.to_json_string(use_diff=False), weights_of(model))
    before, twins = _FOUND.get(model, (None, None))
    if twins is None or before != now:
        twins = Twins(weakref.ref(model))
        _FOUND[model] = now, twins
    return twins


def _computed(model: nn.Module) -> Shapes:
    """Return the shapes of the buffers that may be tables, by name."""
    named = model.named_buffers()
    return {name: tuple(buffer.shape) for name, buffer in named if buffer.dim() == 2 and buffer.is_floating_point()}


def _grown(before: Shapes, after: Shapes) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the present rows of tensors that gain rows, by name, and the names of tensors that change otherwise."""
    changed = {name: shape for name, shape in before.items() if after.get(name) != shape}
    grown = {name: shape[0] for name, shape in changed.items() if after.get(name) == (shape[0] + STEP, *shape[1:])}
    return grown, tuple(name for name in changed if name not in grown)


def weights_of(model: nn.Module) -> Shapes:
    """Return the shapes of all weights by name; a shared weight counts under one name."""
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def weight_of(model: PreTrainedModel, name: str, refusal: str = "") -> nn.Parameter:
    """Return the weight of this name, if it is the plain parameter that transformers creates.

    An error begins with ``refusal``; left out, a table of positions cannot be lengthened.

    Raises:
        IncompatibleError: if another object has taken the place of the weight.
    """
    path, _, leaf = name.rpartition(".")
    modules = dict(model.named_modules())
    weight = modules[path]._parameters.get(leaf) if path in modules else None
    refusal = refusal or f"The table of positions {name} of this {model.config.model_type} cannot be lengthened"
    if weight is None:
        raise IncompatibleError(
            f"{refusal}: {type(modules[path]).__name__ if path in modules else 'nothing'} stands in its place. Extend "
            f"the model before you wrap it in an adapter or anything else."
        )
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise IncompatibleError(
            f"{refusal}: it is quantised or sharded ({kind}). Extend the checkpoint before quantising it, or exclude "
            f"this weight from quantisation."
        )
    if is_zero3(model):
        raise IncompatibleError(f"{refusal}: DeepSpeed ZeRO-3 has sharded it. Extend the model before that.")
    is_offloaded = hasattr(modules[path], "_hf_hook") or any(not parameter.is_meta for parameter in model.parameters())
    if weight.is_meta and is_offloaded:
        raise IncompatibleError(f"{refusal}: it is offloaded. Load the model onto a device, extend it, and save it.")
    return weight


def values_of(twins: Twins, name: str) -> Tensor:
    """Return the values of a table; for a model on the meta device, the values that its class initialises."""
    held = dict(twins.model.named_parameters()) | dict(twins.model.named_buffers())
    weight: Tensor | None = held.get(name)
    if weight is not None and not weight.is_meta and weight.is_floating_point():
        return weight
    return table_of(twins.filled([name]), name).detach()


def is_sinusoidal(weight: Tensor) -> bool:
    """Return whether a table holds sinusoids: the product of two rows then depends on their distance alone."""
    rows = weight.detach()[2 : 2 + 64].to("cpu", torch.float64)
    if len(empty := (rows == 0).all(1).nonzero()):  # the padding row, if it is not one of the first two
        rows = rows[int(empty[-1]) + 1 :]
    gram = rows @ rows.T
    spread = [gram.diagonal(distance).std(correction=0) for distance in range(1, len(rows) - 1)]
    size = gram.diagonal().mean()
    return bool(spread) and bool(size > 0) and bool(max(spread) / size < SINUSOIDAL)


def _watched(twin: PreTrainedModel, growth: Growth, name: str) -> PositionTable | str:
    """Return the table of this name, or the reason why its rows do not follow tokens in order."""
    padding = getattr(field_of(twin.config, growth.field)[0], "pad_token_id", None)
    token = 5 if padding != 5 else 6
    rows = (growth.tables | growth.computed)[name]
    rows_read = lookups(twin, name, [token] * TOKENS)
    if not rows_read and rows < TOKENS:
        return f"{name} has {rows} rows, fewer than the {TOKENS} tokens that ctxext reads to learn their order"
    if not rows_read:
        return f"reading tokens never asks for a row of {name}"
    runs = {tuple(rows.flatten()[:TOKENS].tolist()) for rows in rows_read}
    first = int(rows_read[0].flatten()[0])
    if runs != {tuple(range(first, first + TOKENS))}:
        shown = " and ".join(str(list(run)) for run in sorted(runs))
        return f"{TOKENS} tokens ask {name} for the rows {shown}, not for one row after the other, once"
    skips_padding = False
    if padding is not None:
        padded = lookups(twin, name, [padding] * 2 + [token] * TOKENS, only_first=True)
        skips_padding = bool(padded) and padded[0].flatten()[2:3].tolist() == [first]
    table = PositionTable(name, growth.field, rows, first, token, skips_padding)
    return unread(twin, table) or table


def unread(twin: PreTrainedModel, table: PositionTable) -> str | None:
    """Return why a text that fills a table does not read its rows to the last one; None if it does."""
    length = min(table.positions, LONGEST)
    rows_read = lookups(twin, table.name, [table.token] * length, only_first=True)
    rows = rows_read[0].flatten()[:length].tolist() if rows_read else []
    if rows == list(range(table.first, table.first + length)):
        return None
    return f"a text of {length:,} tokens does not read the rows of {table.name} to the last one"


def mixed(table: Tensor, first: int, rows: Rows) -> Float[Tensor, "longer dim"]:
    """Return a table whose rows from ``first`` on are a method's mixtures of old rows, rounded once.

    The ``first`` rows belong to no position and are copied. ``rows`` holds indices and weights from
    ``TableMethod.rows``.
    """
    indices, weights = rows
    if table.is_meta:
        return table.new_empty((first + len(indices), *table.shape[1:]))
    old = table.detach().to("cpu", torch.float64)
    mixtures = torch.zeros(len(indices), *old.shape[1:], dtype=torch.float64)
    for index, weight in zip(indices.unbind(1), weights.unbind(1), strict=True):
        mixtures += weight[:, None] * old[first + index]
    return torch.cat([old[:first], mixtures]).to(table.dtype).to(table.device)


def unmixed(table: Tensor, first: int, trained: int, rows: Rows) -> Tensor | None:
    """Return the rows that ``mixed`` was given; None if one of them survives in mixtures only."""
    places = places_of(trained, rows)
    if len(places) < trained:
        return None
    return table.detach()[torch.cat([torch.arange(first), first + places]).to(table.device)]


def places_of(trained: int, rows: Rows) -> Int[Tensor, " readable"]:
    """Return the first new row that holds each trained row unmixed, without rows that only mixtures hold."""
    indices, weights = rows
    most = indices.gather(1, weights.argmax(1, keepdim=True))  # the trained row with the largest share
    share = torch.where(indices == most, weights, 0).sum(1)
    whole = (share == 1) & ((indices == most) | (weights == 0)).all(1)
    places = torch.full((trained,), len(indices))
    places.scatter_reduce_(0, most[whole, 0], whole.nonzero()[:, 0], "amin")
    return places[places < len(indices)]


def replace_tables(
    twins: Twins,
    tables: dict[str, Tensor],
    fields: dict[str, int],
    edits: Edits,
    *,
    after: PreTrainedModel | None = None,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Replace tables of a model, and change everything that depends on their number of rows.

    Returns:
        A twin of the changed model, and the attributes that changed in layers without a table or grown buffer, which
        may compute differently now.

    Raises:
        IncompatibleError: if a tensor that has to grow differs from the one that the model's class creates.
        VerificationError: if a reload would not have the new tables.
    """
    model, before = twins.model, twins.plain
    after = twin_of(model, fields) if after is None else after
    for name, value in tables.items():
        if (shape := tuple(table_of(after, name).shape)) != tuple(value.shape):
            raise VerificationError(
                f"{name} would have the shape {tuple(value.shape)}, but transformers would build {shape} from the "
                f"config."
            )
    computed = {name for name, _ in model.named_buffers()} & tables.keys()
    edits.replace_weights(model, {name: value for name, value in tables.items() if name not in computed})
    for name in computed:
        edits.set(*field_of(model, name), tables[name])
    grown = _set_buffers(model, before, after, computed, edits)
    others = _set_attributes(model, before, after, {name.rpartition(".")[0] for name in tables} | grown, edits)
    for name, count in fields.items():
        edits.set(*field_of(model.config, name), count)
    follow_fields(model, after, {name.rpartition(".")[2] for name in fields}, edits)
    return after, others


def _set_buffers(
    model: PreTrainedModel, before: PreTrainedModel, after: PreTrainedModel, done: set[str], edits: Edits
) -> set[str]:
    """Grow all buffers that are not ``done``; return the paths of their modules."""
    olds, lives, owners = dict(before.named_buffers()), dict(model.named_buffers()), set()
    for name, new in after.named_buffers():
        if name in done:
            continue
        old, live = olds[name], lives.get(name)
        if not new.is_meta and old.shape == new.shape and torch.equal(old, new):
            continue
        is_built = live is not None and (
            live.is_meta or (live.shape == old.shape and torch.equal(live.to("cpu", old.dtype), old))
        )
        if new.is_meta or live is None or not is_built:
            raise IncompatibleError(
                f"The buffer {name} has to grow with the table of positions, but differs from the one that "
                f"{type(model).__name__} builds from its config. Load the checkpoint again, and extend it first."
            )
        path, _, leaf = name.rpartition(".")
        edits.set(model.get_submodule(path), leaf, new.to(live.device, live.dtype))
        owners.add(path)
    return owners


def _set_attributes(
    model: PreTrainedModel, before: PreTrainedModel, after: PreTrainedModel, owners: set[str], edits: Edits
) -> tuple[str, ...]:
    """Set the plain attributes that differ; return the ones in modules that contain none of the ``owners``."""
    olds, others = dict(before.named_modules()), []
    for path, module in after.named_modules():
        for name, new in vars(module).items():
            old = vars(olds[path]).get(name)
            if isinstance(new, int | float) and isinstance(old, int | float) and old != new:
                edits.set(model.get_submodule(path), name, new)
                if not any(owner == path or owner.startswith(f"{path}.") for owner in owners):
                    others.append(f"{path}.{name}")
    return tuple(others)


def follow_fields(model: PreTrainedModel, after: PreTrainedModel, names: Iterable[str], edits: Edits) -> None:
    """Set fields in every module's config as in the same module of a twin: some configs are copies of the model's."""
    built, done = dict(after.named_modules()), set()
    for path, module in model.named_modules():
        config, new = vars(module).get("config"), vars(built[path]).get("config") if path in built else None
        if not isinstance(config, PreTrainedConfig) or id(config) in done:
            continue
        done.add(id(config))
        for name in names:
            value = getattr(new, name, None)
            if value is not None and name in vars(config) and getattr(config, name) != value:
                edits.set(config, name, value)


def prove(twin: PreTrainedModel, tables: Iterable[PositionTable], new: dict[str, Tensor]) -> None:
    """Raise ``VerificationError`` unless a text that fills each of the ``new`` tables reads it to its last row."""
    for table in tables:
        if reason := unread(twin, replace(table, rows=len(new[table.name]))):
            raise VerificationError(f"The extended {type(twin).__name__} would not read its positions: {reason}.")
