"""Tables of positions: found in any model, made longer in place, read back.

A table is a weight, or a buffer, whose rows grow by as much as a field of the config that counts positions. Two twins
of the model that differ in that field show which those are and what else has to grow along (ids of positions and of
token types, causal masks). Which row stands for the first token is watched by letting a twin read tokens, never
assumed.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.errors import IncompatibleError, VerificationError
from ctxext.methods import METHODS, RopeMethod
from ctxext.methods.base import Rows
from ctxext.surgery.edits import Edits
from ctxext.surgery.lookups import TOKENS, lookups, table_of
from ctxext.surgery.old_form import REFUSALS, drop_old_form
from ctxext.surgery.rebuild import reread, restoring
from ctxext.surgery.rope_types import without_guard
from ctxext.surgery.texts import field_of
from ctxext.surgery.wrappers import is_zero3

# Fields of a config that count positions of tokens; kinds of distances and places on a page are counted otherwise.
FIELD = re.compile(r"(^|_)(n_)?positions?(_|$)|n_ctx|max_seq|seq_len|context_length|max_source|max_target|max_text")
NO_FIELD = re.compile(r"2d|bucket|relative|type|token_id")
STEP = 8  # by how much twins differ
LONGEST = 2**14  # tokens that a twin reads: its masks have the square of it
SINUSOIDAL = 1e-3  # spread along the diagonals of a Gram matrix: at most 3e-6 of sinusoids, at least 0.028 of others
FILLS = ("normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "copy_")  # what puts values into weights


@dataclass(frozen=True)
class PositionTable:
    """A weight, or a buffer, with a row for each position.

    Args:
        name: its name in the model.
        field: the config field that sets its size, with dots for parts of the config.
        rows: rows that it has.
        first: the row of the first token; rows before it stand for no position.
        token: one that is not padding.
        skips_padding: whether tokens that are padding by their id are given no position, so that rows start behind
            the id of padding.
    """

    name: str
    field: str
    rows: int
    first: int
    token: int
    skips_padding: bool

    @property
    def positions(self) -> int:
        """Tokens that it has a row for."""
        return self.rows - self.first

    def of_rows(self, rows: int) -> PositionTable:
        """The same table with another number of rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Growth:
    """What differs between a model and its twin with more positions.

    Args:
        field: the config field in which they differ.
        tables: weights with more rows, by name, with the rows that they have now.
        computed: likewise, those that are no weights but buffers, which the model's code fills.
        others: weights that differ in another way.
    """

    field: str
    tables: dict[str, int]
    computed: dict[str, int]
    others: tuple[str, ...]


class _WeightsOnMeta(TorchFunctionMode):
    """While active, what is allocated to be filled with weights takes no memory; all other tensors are real.

    Args:
        real: shapes that are allocated all the same.
    """

    def __init__(self, real: Iterable[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self.real = set(real)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and not self.real and len(args) == 1 and args[0] == [] and not kwargs:
            kwargs["device"] = "meta"  # so transformers asks where weights go, and computes none that go nowhere
        if func in (torch.empty, torch.rand, torch.randn) and kwargs.get("device") is None:
            size = args[0] if args and isinstance(args[0], list | tuple) else args
            if tuple(size) not in self.real:
                kwargs["device"] = "meta"
        if getattr(func, "__name__", "") in FILLS:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:  # torch takes long over nothing
                return filled
        return func(*args, **kwargs)


def twin_of(model: PreTrainedModel, fields: dict[str, int], real: Iterable[tuple[int, ...]] = ()) -> PreTrainedModel:
    """The model that transformers would build from the config with other fields: real buffers, weights without memory.

    Raises:
        REFUSALS, RuntimeError: where transformers cannot build it.
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
    """Yield the fields of a config, and of its parts, that may count positions, with their values."""
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
    """What twins of a model show of its tables; each is built when it is first asked for, of the model as it then is.

    Args:
        reference: to any model; it is not touched.
    """

    reference: weakref.ref[PreTrainedModel]

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        found = self.reference()
        assert found is not None, "asked for by whoever holds it"
        return found

    @functools.cached_property
    def plain(self) -> PreTrainedModel:
        """The model as it is."""
        return twin_of(self.model, {})

    @functools.cached_property
    def growths(self) -> list[Growth]:
        """Every field that weights grow with."""
        fields = list(fields_of_positions(self.model.config))
        try:
            before, buffers = (weights_of(self.plain), _computed(self.plain)) if fields else ({}, {})
        except (*REFUSALS, RuntimeError):  # nothing can be said of a model that transformers does not build
            return []
        found = []
        for field, value in fields:
            try:
                twin = twin_of(self.model, {field: value + STEP})
            except (*REFUSALS, AssertionError, RuntimeError):  # a field that is not free counts something else
                continue
            tables, others = _grown(before, weights_of(twin))
            computed, _ = _grown(buffers, _computed(twin))
            if tables or computed:
                found.append(Growth(field, tables, computed, others))
        return found

    @functools.cached_property
    def tables(self) -> list[PositionTable]:
        """Every table whose rows tokens ask for in order.

        Raises:
            IncompatibleError: if there is none, or one of which it cannot be said which rows stand for which positions.
        """
        found = self._read_in_order(lambda growth: list(growth.tables))
        vars(self).pop("plain", None)  # its buffers may be large
        return found

    @functools.cached_property
    def sinusoids(self) -> list[PositionTable]:
        """Every table of sinusoids whose rows tokens ask for in order, weights and buffers alike.

        Raises:
            IncompatibleError: as for ``tables``.
        """
        return self._read_in_order(
            lambda growth: [one for one in growth.tables | growth.computed if one in self._sinusoidal]
        )

    @functools.cached_property
    def _sinusoidal(self) -> frozenset[str]:
        """Which of all tables are computed, and not learned."""
        names = {name for growth in self.growths for name in growth.tables | growth.computed}
        saved = getattr(self.model.config, "ctxext", None) or {}
        extending = METHODS.get(saved.get("method", {}).get("method"))
        if names and extending is not None and issubclass(extending, RopeMethod):
            # What such an extension was put on; its table may have been trained since, or stand at two frequencies.
            twin = self.filled(names)
            values = {name: table_of(twin, name).detach() for name in names}
        else:
            values = {name: values_of(self, name) for name in names}
        return frozenset(name for name in names if is_sinusoidal(values[name]))

    def _read_in_order(self, names: Callable[[Growth], list[str]]) -> list[PositionTable]:
        found: list[PositionTable] = []
        passed_over: list[str] = []
        kind = self.model.config.model_type
        for growth in self.growths:
            seen = [_watched(self.plain, growth, name) for name in names(growth)]
            tables = [one for one in seen if isinstance(one, PositionTable)]
            reasons = [one for one in seen if isinstance(one, str)]
            reasons += [f"{name} changes with it in another way" for name in growth.others]
            if tables and reasons:
                raise IncompatibleError(
                    f"{growth.field} of this {kind} sets the size of {tables[0].name}, but not of that alone: "
                    f"{reasons[0]}. Both would have to be extended, and it is not known how."
                )
            found += tables
            passed_over += reasons
        if not found:
            why = passed_over[0] if passed_over else "no weight grows with a field of its config that counts positions"
            raise IncompatibleError(f"This {kind} has no table of positions that can be made longer: {why}.")
        return found

    @property
    def has_learned(self) -> bool:
        """Whether a row for each position was learned."""
        return any(name not in self._sinusoidal for growth in self.growths for name in growth.tables)

    @property
    def has_sinusoids(self) -> bool:
        """Whether the vector of each position, or part of it, is computed, and none is learned."""
        return not self.has_learned and bool(self._sinusoidal)

    def filled(self, names: Collection[str]) -> PreTrainedModel:
        """The model as it is, with the tables of these names as its class fills them."""
        if not any(table_of(self.plain, name).is_meta for name in names):
            return self.plain
        return twin_of(self.model, {}, real=[tuple(table_of(self.plain, name).shape) for name in names])


# What was found, with what it was found of: many methods are tried on one model, one after the other.
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Twins]] = weakref.WeakKeyDictionary()


def twins_of(model: PreTrainedModel) -> Twins:
    """Twins of a model; the same ones until its config, or the shape of a weight, is another."""
    now = (model.config.to_json_string(use_diff=False), weights_of(model))
    before, twins = _FOUND.get(model, (None, None))
    if twins is None or before != now:
        twins = Twins(weakref.ref(model))
        _FOUND[model] = now, twins
    return twins


def _computed(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers that may be tables, by name."""
    named = model.named_buffers()
    return {name: tuple(one.shape) for name, one in named if one.dim() == 2 and one.is_floating_point()}


def _grown(
    before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The rows of what has more of them ``after``, by name, and the names of what differs in another way."""
    changed = {name: shape for name, shape in before.items() if after.get(name) != shape}
    grown = {name: shape[0] for name, shape in changed.items() if after.get(name) == (shape[0] + STEP, *shape[1:])}
    return grown, tuple(name for name in changed if name not in grown)


def weights_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights by their names; one that has several names has one here."""
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def weight_of(model: PreTrainedModel, name: str, refusal: str = "") -> nn.Parameter:
    """The weight of this name, as transformers makes it.

    Args:
        model: it is not touched.
        name: of the weight.
        refusal: what cannot be done with it where it is another; left out, a table of positions made longer.

    Raises:
        IncompatibleError: where something else stands in its place.
    """
    path, _, leaf = name.rpartition(".")
    modules = dict(model.named_modules())
    weight = modules[path]._parameters.get(leaf) if path in modules else None
    refusal = refusal or f"The table of positions {name} of this {model.config.model_type} cannot be made longer"
    if weight is None:
        raise IncompatibleError(
            f"{refusal}: {type(modules[path]).__name__ if path in modules else 'nothing'} stands in its place. Extend "
            f"the model before an adapter, or anything else, is put around it."
        )
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise IncompatibleError(
            f"{refusal}: it is quantised or sharded ({kind}). Extend the checkpoint as it was before, and quantise the "
            f"result; or leave this weight out of the quantisation."
        )
    if is_zero3(model):
        raise IncompatibleError(f"{refusal}: DeepSpeed ZeRO-3 has shared it out. Extend the model before that.")
    if weight.is_meta and any(not other.is_meta for other in model.parameters()):
        raise IncompatibleError(f"{refusal}: it is offloaded. Load the model onto a device, extend it, and save it.")
    return weight


def values_of(twins: Twins, name: str) -> Tensor:
    """A table of a model; for a model without memory what its class fills it with."""
    held = dict(twins.model.named_parameters()) | dict(twins.model.named_buffers())
    weight: Tensor | None = held.get(name)
    if weight is not None and not weight.is_meta and weight.is_floating_point():
        return weight
    return table_of(twins.filled([name]), name).detach()


def is_sinusoidal(weight: Tensor) -> bool:
    """Whether a table holds sinusoids: then the product of two rows depends on their distance alone."""
    rows = weight.detach()[2 : 2 + 64].to("cpu", torch.float64)
    if len(empty := (rows == 0).all(1).nonzero()):  # the row of padding, where it is not one of the first two
        rows = rows[int(empty[-1]) + 1 :]
    gram = rows @ rows.T
    spread = [gram.diagonal(distance).std(correction=0) for distance in range(1, len(rows) - 1)]
    size = gram.diagonal().mean()
    return bool(spread) and bool(size > 0) and bool(max(spread) / size < SINUSOIDAL)


def _watched(twin: PreTrainedModel, growth: Growth, name: str) -> PositionTable | str:
    """The table of this name, or why its rows are not those of tokens in order."""
    padding = getattr(field_of(twin.config, growth.field)[0], "pad_token_id", None)
    token = 5 if padding != 5 else 6
    asked = lookups(twin, name, [token] * TOKENS)
    if not asked:
        return f"reading tokens never asks for a row of {name}"
    runs = {tuple(one.flatten()[:TOKENS].tolist()) for one in asked}
    first = int(asked[0].flatten()[0])
    if runs != {tuple(range(first, first + TOKENS))}:
        shown = " and ".join(str(list(run)) for run in sorted(runs))
        return f"{TOKENS} tokens ask {name} for the rows {shown}, not for one row after the other, once"
    skips_padding = False
    if padding is not None:
        padded = lookups(twin, name, [padding] * 2 + [token] * TOKENS, only_first=True)
        skips_padding = bool(padded) and padded[0].flatten()[2:3].tolist() == [first]
    rows = (growth.tables | growth.computed)[name]
    table = PositionTable(name, growth.field, rows, first, token, skips_padding)
    return unread(twin, table) or table


def unread(twin: PreTrainedModel, table: PositionTable) -> str | None:
    """Why a text that fills a table does not read its rows to the last one, None where it does."""
    length = min(table.positions, LONGEST)
    asked = lookups(twin, table.name, [table.token] * length, only_first=True)
    found = asked[0].flatten()[:length].tolist() if asked else []
    if found == list(range(table.first, table.first + length)):
        return None
    return f"a text of {length:,} tokens does not read the rows of {table.name} to the last one"


def mixed(table: Tensor, first: int, rows: Rows) -> Float[Tensor, "longer dim"]:
    """The rows before ``first`` as they are, and behind them what a method makes, rounded once.

    Args:
        table: rows of a table, in any dtype.
        first: how many stand for no position.
        rows: from ``TableMethod.rows``.
    """
    indices, weights = rows
    if table.is_meta:
        return table.new_empty((first + len(indices), *table.shape[1:]))
    old = table.detach().to("cpu", torch.float64)
    made = torch.zeros(len(indices), *old.shape[1:], dtype=torch.float64)
    for index, weight in zip(indices.unbind(1), weights.unbind(1), strict=True):
        made += weight[:, None] * old[first + index]
    return torch.cat([old[:first], made]).to(table.dtype).to(table.device)


def unmixed(table: Tensor, first: int, trained: int, rows: Rows) -> Tensor | None:
    """The rows that ``mixed`` was given, where each can still be read; None where one is in mixtures only."""
    places = places_of(trained, rows)
    if len(places) < trained:
        return None
    return table.detach()[torch.cat([torch.arange(first), first + places]).to(table.device)]


def places_of(trained: int, rows: Rows) -> Int[Tensor, " readable"]:
    """Where among the new rows each trained one stands first, unmixed; those that are in mixtures only are left out."""
    indices, weights = rows
    dense = torch.zeros(len(indices), trained, dtype=torch.float64).scatter_add_(1, indices, weights)
    whole = (dense == 1) & ((dense != 0).sum(1, keepdim=True) == 1)
    return whole.int().argmax(0)[whole.any(0)]


def replace_tables(
    twins: Twins,
    tables: dict[str, Tensor],
    fields: dict[str, int],
    edits: Edits,
    *,
    after: PreTrainedModel | None = None,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Put other tables into a model, with all that depends on how many rows they have.

    Args:
        twins: of the model, which is changed through ``edits`` only.
        tables: the new values of weights and buffers, by name.
        fields: the config fields that go with them, by dotted name.
        edits: the journal.
        after: the twin with these fields, where it is there already.

    Returns:
        A twin of the model as it is then, and attributes of layers that changed with it: they own neither a table nor a
        buffer that grew, and so may compute otherwise.

    Raises:
        IncompatibleError: if something that would have to grow is not as the model's class makes it.
        VerificationError: if the model would not have the new tables when it is loaded again.
    """
    model, before = twins.model, twins.plain
    after = twin_of(model, fields) if after is None else after
    for name, value in tables.items():
        if (shape := tuple(table_of(after, name).shape)) != tuple(value.shape):
            raise VerificationError(
                f"{name} would have the shape {tuple(value.shape)}, and transformers would build {shape} from the "
                f"config."
            )
    computed = {name for name, _ in model.named_buffers()} & tables.keys()
    put_weights(model, {name: value for name, value in tables.items() if name not in computed}, edits)
    for name in computed:
        path, _, leaf = name.rpartition(".")
        edits.set(model.get_submodule(path), leaf, tables[name])
    grown = _set_buffers(model, before, after, computed, edits)
    others = _set_attributes(model, before, after, {name.rpartition(".")[0] for name in tables} | grown, edits)
    _set_fields(model, after, fields, edits)
    return after, others


def put_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], edits: Edits) -> None:
    """Put others into the place of weights, under every name that those have; a parameter goes in as it is.

    Args:
        model: changed through ``edits`` only.
        weights: by name.
        edits: the journal.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, value in weights.items():
        old = names[name]
        with torch.inference_mode(False):
            new = value.clone() if value.is_inference() else value
            if not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
        for alias in [alias for alias, weight in names.items() if weight is old]:  # tied, or shared by two modules
            path, _, leaf = alias.rpartition(".")
            edits.replace_weight(model.get_submodule(path), leaf, new)


def _set_buffers(
    model: PreTrainedModel, before: PreTrainedModel, after: PreTrainedModel, done: set[str], edits: Edits
) -> set[str]:
    """Let buffers other than those that are ``done`` grow along; return the paths of their modules."""
    olds, lives, owners = dict(before.named_buffers()), dict(model.named_buffers()), set()
    for name, new in after.named_buffers():
        if name in done:
            continue
        old, live = olds[name], lives.get(name)
        if not new.is_meta and old.shape == new.shape and torch.equal(old, new):
            continue
        if new.is_meta or live is None or not (live.is_meta or _same(live, old)):
            raise IncompatibleError(
                f"The buffer {name} has to grow with the table of positions, and is not what {type(model).__name__} "
                f"makes of its config. Load the checkpoint anew, and extend that before anything else."
            )
        path, _, leaf = name.rpartition(".")
        edits.set(model.get_submodule(path), leaf, new.to(live.device, live.dtype))
        owners.add(path)
    return owners


def _same(live: Tensor, made: Tensor) -> bool:
    return live.shape == made.shape and torch.equal(live.to("cpu", made.dtype), made)


def _set_attributes(
    model: PreTrainedModel, before: PreTrainedModel, after: PreTrainedModel, owners: set[str], edits: Edits
) -> tuple[str, ...]:
    """Set the plain attributes that differ; return those of modules that hold none of the ``owners``."""
    olds, others = dict(before.named_modules()), []
    for path, module in after.named_modules():
        for name, new in vars(module).items():
            old = vars(olds[path]).get(name)
            if isinstance(new, int | float) and isinstance(old, int | float) and old != new:
                edits.set(model.get_submodule(path), name, new)
                if not any(owner == path or owner.startswith(f"{path}.") for owner in owners):
                    others.append(f"{path}.{name}")
    return tuple(others)


def _set_fields(model: PreTrainedModel, after: PreTrainedModel, fields: dict[str, int], edits: Edits) -> None:
    """Set the fields, also in configs of modules that are changed copies of the model's."""
    done = set()
    for name, value in fields.items():
        part, leaf = field_of(model.config, name)
        edits.set(part, leaf, value)
        done.add(id(part))
    made = dict(after.named_modules())
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if not isinstance(config, PreTrainedConfig) or id(config) in done:
            continue
        done.add(id(config))
        for leaf in {name.rpartition(".")[2] for name in fields}:
            new = getattr(getattr(made.get(path), "config", None), leaf, None)
            if new is not None and leaf in vars(config) and getattr(config, leaf) != new:
                edits.set(config, leaf, new)


def prove(twin: PreTrainedModel, tables: Iterable[PositionTable]) -> None:
    """Raise ``VerificationError`` unless a text that fills each table reads it to its last row.

    Args:
        twin: of the model as it is extended.
        tables: as they are then.
    """
    for table in tables:
        if reason := unread(twin, table):
            raise VerificationError(f"The extended {type(twin).__name__} would not read its positions: {reason}.")
