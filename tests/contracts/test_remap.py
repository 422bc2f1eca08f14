"""What every method that remaps positions promises, on live models. A new one gets all of this for nothing."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ctxext
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.kernels.pieces import RotationForm
from ctxext.methods import METHODS
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import Band, Piece, PositionMap, RemapMethod, Sinks
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec
from tests._models import RECENT, logits, tiny, tokens
from tests._remap import dense_attention, relative_positions, weights
from tests.walk.tiny import TRAINED_LENGTH

REMAPS = {name: cls for name, cls in METHODS.items() if issubclass(cls, RemapMethod)}
# Of each structure one: halves with grouped keys, interleaved and partial, partial halves, norms of queries and keys.
TYPES = ["llama", "glm", "gpt_neox", "qwen3", "cohere"]

every_method = pytest.mark.parametrize("cls", REMAPS.values(), ids=REMAPS)


def spec_of(model: PreTrainedModel) -> RopeSpec:
    inv_freq = next(buffer for name, buffer in model.named_buffers() if name.endswith("original_inv_freq"))
    return RopeSpec(2 * len(inv_freq), 10000.0, TRAINED_LENGTH)


def example(cls: type[RemapMethod], model: PreTrainedModel) -> RemapMethod:
    return cls.example(spec_of(model))


def target(method: RemapMethod) -> int:
    return method.target_length(TRAINED_LENGTH)


def extended(cls: type[RemapMethod], model_type: str = "llama") -> tuple[PreTrainedModel, RemapMethod]:
    model = tiny(model_type).double()
    method = example(cls, model)
    return ctxext.patch(model, method), method


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


EXACT = 1e-6  # in float64, of logits of about 1: stock code computes cos and sin in float32


def test_there_are_methods() -> None:
    assert len(REMAPS) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("trained_length", [64, 100, 2048])
@every_method
def test_relative_positions_stay_where_the_model_was_trained(cls: type[RemapMethod], trained_length: int) -> None:
    """Each visible pair is in exactly one piece, near pairs keep their distance, and none is farther than L - 1."""
    rope = RopeSpec(rotary_dim=8, base=1e4, trained_length=trained_length)
    method = cls.example(rope)
    target, length = method.target_length(trained_length), min(method.target_length(trained_length), 2300)
    relative = relative_positions(method, rope, target, length)
    seen = ~relative[..., 0].isnan()
    is_whole = torch.equal(seen, torch.ones(length, length, dtype=torch.bool).tril())
    assert is_whole or cls is Streaming
    assert bool(seen.diagonal().all())
    assert not bool(relative.diagonal(dim1=0, dim2=1).any()), "a token is at distance 0 from itself"
    assert bool((relative[seen] >= 0).all())
    if cls is not ctxext.methods.DPE:  # its searched sizes are bound by no length
        assert relative[seen].max() <= trained_length - 1
    exact = min(method.exact_length(rope), length)
    places = torch.arange(exact, dtype=torch.float64)
    plain = (places[:, None] - places[None]).tril()
    assert torch.equal(relative[:exact, :exact].nan_to_num(0), plain[..., None].expand(-1, -1, 4))


@pytest.mark.parametrize("model_type", TYPES)
@every_method
def test_a_patched_model_attends_by_the_relative_positions_of_its_method(
    cls: type[RemapMethod], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first layer, against dense attention on its own queries and keys, taken before they are rotated."""
    model, method = extended(cls, model_type)
    rope, length = spec_of(model), min(target(method), 150)
    layer = next(module for module in model.modules() if "_ctxext_attend" in vars(module))
    attend = layer._ctxext_attend
    seen: dict[str, Tensor] = {}

    def watch(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.update(q=q, k=k, v=v, out=attend(q, k, v, *rest, **options), scale=torch.tensor(options["scale"]))
        return seen["out"]

    monkeypatch.setitem(vars(layer), "_ctxext_attend", watch)
    logits(model, tokens(length))
    inv_freq = attend.far.inv_freq(torch.device("cpu"))
    plain = [
        in_halves(unrotated(seen[part][0], inv_freq, attend.form.interleaved), inv_freq, attend.form.interleaved)
        for part in "qk"
    ]
    wanted = dense_heads(method, 0, *plain, seen["v"][0], inv_freq, float(seen["scale"]), rope)
    assert error(seen["out"][0], wanted) < EXACT * float(wanted.abs().max())


def dense_heads(
    method: RemapMethod, first: int, q: Tensor, k: Tensor, v: Tensor, inv_freq: Tensor, scale: float, rope: RopeSpec
) -> Tensor:
    """Dense attention of a layer whose groups are numbered from ``first`` on, group by group, ``[heads, seq, dim]``."""
    shared, length, outputs = q.shape[0] // k.shape[0], q.shape[1], []
    for group in range(k.shape[0]):
        by = method
        if isinstance(method, RetrievalHeads) and first + group not in method.heads:
            by = method.near_method
        relative = relative_positions(by, rope, target(method), length)
        weight = weights(by, rope, target(method))[:length, :length]
        here, heads = slice(group, group + 1), slice(group * shared, (group + 1) * shared)
        outputs.append(dense_attention(q[heads], k[here], v[here], relative, inv_freq, scale=scale, weight=weight))
    return torch.cat(outputs)


def in_halves(x: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """Rotating dimensions with all first ones of the pairs before all second ones."""
    if not interleaved:
        return x
    pairs = 2 * len(inv_freq)
    return torch.cat([x[..., 0:pairs:2], x[..., 1:pairs:2], x[..., pairs:]], -1)


def unrotated(x: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """Queries or keys as they were before the model rotated each by its own position."""
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * inv_freq
    half, found = len(inv_freq), x.clone()
    one, other = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    found[..., one] = x[..., one] * angles.cos() + x[..., other] * angles.sin()
    found[..., other] = x[..., other] * angles.cos() - x[..., one] * angles.sin()
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_how_a_model_rotates_is_seen_without_its_weights_too(model_type: str) -> None:
    """Offloaded weights lie on the meta device: what was a guess there would be wrong without a word."""
    live, empty = tiny(model_type), tiny(model_type).to("meta")
    seen = []
    for model in (live, empty):
        ctxext.patch(model, "self_extend", factor=2)
        seen.append(next(vars(m)["_ctxext_attend"] for m in model.modules() if "_ctxext_attend" in vars(m)).form)
    assert seen[0] == seen[1] == RotationForm(interleaved=model_type in ("glm", "cohere"))


@every_method
def test_a_short_text_is_read_bit_for_bit_as_before(cls: type[RemapMethod]) -> None:
    plain = tiny()
    model = ctxext.patch(copy.deepcopy(plain), example(cls, plain))
    exact = min(example(cls, plain).exact_length(spec_of(plain)), 55)  # the chunk of dual_chunk
    assert exact >= 16
    ids = tokens(2 * exact)
    assert torch.equal(logits(model, ids[:, :exact]), logits(plain, ids[:, :exact]))
    assert error(logits(model, ids)[:, :exact], logits(plain, ids)[:, :exact]) < 1e-4
    assert error(logits(model, tokens(96)), logits(plain, tokens(96))) > 1e-3, "beyond, it does something"


def with_weights_in(dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """A model as transformers loads it in this dtype: its frequencies stay in float32."""
    model = tiny()
    model.set_attn_implementation(implementation)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


@torch.no_grad()
def in_chunks(model: PreTrainedModel, ids: Tensor, cache: Any, sizes: list[int], keep: Tensor | None = None) -> Tensor:
    """Logits of a text that is read with a cache, which may hold its beginning already."""
    parts, at = [], ids.shape[1] - sum(sizes)
    for size in sizes:
        mask = None if keep is None else keep[:, : at + size]
        parts.append(model(ids[:, at : at + size], attention_mask=mask, past_key_values=cache).logits)
        at += size
    return torch.cat(parts, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@every_method
def test_with_a_cache_a_short_text_is_read_bit_for_bit_as_before(
    cls: type[RemapMethod], implementation: str, dtype: torch.dtype
) -> None:
    """In chunks and token by token, padded on the left, in a growing cache and in a static one."""
    plain = with_weights_in(dtype, implementation)
    method = example(cls, plain)
    model = ctxext.patch(copy.deepcopy(plain), method)
    exact = min(method.exact_length(spec_of(plain)), 55)
    sizes = [exact - 9, 1, 1, 4, 1, 1, 1]
    ids, keep = tokens(exact, rows=2), torch.ones(2, exact, dtype=torch.long)
    keep[1, :5] = 0
    for mask in (None, keep):
        caches: list[list[Any]] = [
            [DynamicCache(), DynamicCache()],
            [StaticCache(config=plain.config, max_cache_len=exact + 9) for _ in range(2)],
        ]
        for one, other in caches:
            assert torch.equal(in_chunks(model, ids, one, sizes, mask), in_chunks(plain, ids, other, sizes, mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}], ids=str
)
def test_inside_the_window_generate_writes_what_the_model_wrote(how: dict[str, Any]) -> None:
    plain = with_weights_in(torch.bfloat16, "sdpa")
    model = ctxext.patch(copy.deepcopy(plain), "self_extend", factor=2, window=16)
    ids, keep = tokens(20, rows=2), torch.ones(2, 20, dtype=torch.long)
    keep[1, :5] = 0
    how = how | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    found, wanted = (each.generate(ids, attention_mask=keep, **how) for each in (model, plain))
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(map(torch.equal, found.logits, wanted.logits))


@pytest.mark.slow
def test_a_cache_that_was_beyond_the_window_is_exact_again_when_it_was_emptied() -> None:
    """Cropped into the window, its keys are turned back, which rounds."""
    plain = with_weights_in(torch.float32, "eager")
    model = ctxext.patch(copy.deepcopy(plain), "self_extend", factor=2, window=16)
    ids, short = tokens(110), tokens(50)
    cache = DynamicCache()
    in_chunks(model, ids, cache, [70, *[1] * 40])
    cache.crop(-80)
    wanted = in_chunks(plain, ids[:, :50], DynamicCache(), [30, *[1] * 20])[:, 30:]
    assert error(in_chunks(model, ids[:, :50], cache, [1] * 20), wanted) < 1e-4
    cache = emptied(cache)
    assert torch.equal(
        in_chunks(model, short, cache, [30, *[1] * 20]), in_chunks(plain, short, DynamicCache(), [30, *[1] * 20])
    )
    assert error(in_chunks(model, ids, emptied(cache), [40, 50, 20]), logits(model, ids)) < 1e-4


def test_inside_the_window_the_models_own_function_gets_what_it_got_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among it dropout, and the name of the implementation, by which flash attention finds its kernel."""
    calls: list[tuple[Any, ...]] = []

    def mine(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        given.pop("position_ids", None)
        calls.append((module.config._attn_implementation, module.layer_idx, mask, given))
        return sdpa_attention_forward(module, q, k, v, mask, **given)

    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", mine)
    plain = tiny(attention_dropout=0.1)
    plain.set_attn_implementation("mine")
    model = ctxext.patch(copy.deepcopy(plain), "self_extend", factor=2)
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        results.append((each.train()(tokens(50)).logits, calls[:]))
        calls.clear()
    (found, found_calls), (wanted, wanted_calls) = results
    assert torch.equal(found, wanted)
    assert found_calls == wanted_calls
    assert found_calls[0][0] == "mine"
    assert found_calls[0][-1]["dropout"] == 0.1


@pytest.mark.slow
@every_method
def test_a_cache_changes_nothing(cls: type[RemapMethod]) -> None:
    """Token by token, in chunks, in slots; cropped, copied and pickled on the way."""
    model, method = extended(cls)
    length = min(target(method), 120)
    ids = tokens(length, rows=2)
    whole = logits(model, ids)

    @torch.no_grad()
    def read(cache: Any, start: int, stop: int, step: int) -> Tensor:
        parts = [
            model(ids[:, at : min(at + step, stop)], past_key_values=cache).logits for at in range(start, stop, step)
        ]
        return torch.cat(parts, 1)

    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=length)):
        assert error(torch.cat([read(cache, 0, 70, 70), read(cache, 70, length, 1)], 1), whole) < EXACT
    cache = DynamicCache()
    assert error(read(cache, 0, length, 37), whole) < EXACT
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    left = 100 if cls is RetrievalHeads else 50  # whose other heads hold few keys
    copied.crop(-(length - left))
    again = [read(copied, left, left + 7, 7), read(copied, left + 7, length, 1)]
    assert error(torch.cat(again, 1), whole[:, left:]) < EXACT
    cache.crop(-3)
    with_gradient = model(ids[:, -3:-2], past_key_values=cache).logits
    assert error(with_gradient.detach(), whole[:, -3:-2]) < EXACT


def changed(cache: Any, ids: Tensor, chance: random.Random) -> tuple[Any, Tensor]:
    """A cache after something that users do to one, and the tokens that it then holds."""
    how = chance.choice(["crop", "crop", "crop", "reset", "copy", "repeat", "pick"])
    if how == "crop" and ids.shape[1] > 1 and isinstance(cache, DynamicCache):
        removed = chance.randint(1, ids.shape[1] - 1)
        with contextlib.suppress(IncompatibleError):  # of a bounded cache, whose first tokens are gone
            cache.crop(-removed)
            return cache, ids[:, :-removed]
    elif how == "reset":
        return emptied(cache), ids[:, :0]
    elif how == "copy":
        for layer in cache.layers if ids.numel() else ():  # a graph has no copies
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return pickle.loads(pickle.dumps(copy.deepcopy(cache))), ids
    elif how == "repeat" and ids.shape[0] == 1 and isinstance(cache, DynamicCache):
        cache.batch_repeat_interleave(2)
        return cache, ids.repeat_interleave(2, 0)
    elif how == "pick" and ids.shape[0] == 2:
        cache.reorder_cache(torch.tensor([1, 0]))
        return cache, ids.flip(0)
    return cache, ids


def emptied(cache: Any) -> Any:
    """The cache without its tokens."""
    if isinstance(cache, DynamicCache) and not RECENT:  # before 5.18, the tokens of a growing cache are only zeroed
        return DynamicCache()
    cache.reset()
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@every_method
def test_a_cache_stays_right_whatever_is_done_to_it(cls: type[RemapMethod], kind: str) -> None:
    """A seeded walk: read in every mode of autograd, cropped, emptied, copied, reordered, against no cache at all."""
    modes = [torch.enable_grad, torch.no_grad, *([] if kind == "static" else [torch.inference_mode])]
    model, method = extended(cls)
    chance, limit = random.Random(f"{cls.name} {kind}"), min(target(method), 110)
    rows = 2 if kind == "static" else 1
    cache = StaticCache(config=model.config, max_cache_len=limit) if kind == "static" else DynamicCache()
    ids = torch.zeros(rows, 0, dtype=torch.long)
    for _ in range(8):
        cache, ids = changed(cache, ids, chance)
        if ids.shape[1] > limit - 40:
            cache, ids = emptied(cache), ids[:, :0]
        for size in (limit - 10 - ids.shape[1] - chance.randrange(25), chance.choice([1, 5])):
            new = torch.tensor([[chance.randrange(40, 128) for _ in range(size)] for _ in ids])
            ids = torch.cat([ids, new], 1)
            with chance.choice(modes)():
                found = model(new, past_key_values=cache).logits.detach()
            assert error(found, logits(model, ids)[:, -size:]) < EXACT


@dataclass(frozen=True, kw_only=True)
class MovedSinks(RemapMethod):
    """Streaming whose first tokens stand two places further on: a bounded cache, and keys that are turned."""

    name: ClassVar[str] = "moved_sinks"
    summary: ClassVar[str] = "for a test"
    source: ClassVar[str] = "none"

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        far = Piece(region=Sinks(4, 20), query=PositionMap(scale=0.0, offset=30.0), key=PositionMap(offset=2.0))
        return (Piece(region=Band(0, 20)), far)


@pytest.mark.slow
def test_a_cache_that_drops_keys_and_has_some_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "moved_sinks", MovedSinks)
    model = ctxext.patch(tiny().double(), MovedSinks(factor=4.0))
    ids = tokens(90)
    cache = DynamicCache()
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([70, *[5] * 4], 1)]
        assert cache.layers[0].keys.shape[2] < 60
        cache.crop(-30)
        parts.append(model(ids[:, -30:], past_key_values=cache).logits)
    wanted = logits(model, ids)
    assert error(torch.cat(parts, 1), torch.cat([wanted, wanted[:, -30:]], 1)) < EXACT


@pytest.mark.slow
@every_method
def test_generate_is_the_same_however_it_caches_and_whoever_stands_beside(cls: type[RemapMethod]) -> None:
    model, method = extended(cls)
    ids = tokens(min(target(method) - 20, 110), rows=2)
    keep = torch.ones_like(ids)
    keep[1, :23] = 0
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    batch = model.generate(ids, attention_mask=keep, **how)
    assert torch.equal(batch[1:, ids.shape[1] :], model.generate(ids[1:, 23:], **how)[:, ids.shape[1] - 23 :])
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, use_cache=False, **how))
    assert torch.equal(batch, model.generate(ids, attention_mask=keep, cache_implementation="static", **how))
    beams = [model.generate(ids, attention_mask=keep, num_beams=2, use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*beams)
    assert torch.equal(model.generate(ids[:1], prompt_lookup_num_tokens=3, **how), model.generate(ids[:1], **how))


@every_method
def test_packed_documents_are_read_as_if_alone(cls: type[RemapMethod]) -> None:
    model, _ = extended(cls)
    lengths = [90, 40, 50]
    ids = tokens(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = logits(model, ids, position_ids=positions)
    alone = torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)
    assert error(packed, alone) < EXACT
    short = slice(75, 100)  # inside the window, where transformers' mask does not part them
    parts = [logits(model, ids[:, 75:90]), logits(model, ids[:, 90:100])]
    mask = torch.ones(1, 25, dtype=torch.long)
    restarts = torch.cat([torch.arange(15), torch.arange(10)])[None]
    assert error(logits(model, ids[:, short], position_ids=restarts, attention_mask=mask), torch.cat(parts, 1)) < EXACT


def test_a_gap_in_positions_begins_no_document() -> None:
    """Skip-wise training leaves gaps, at which transformers' own mask parts documents unless a mask is given."""
    model, _ = extended(SelfExtend)
    ids, positions = tokens(20), torch.cat([torch.arange(10), torch.arange(30, 40)])[None]
    masked = logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert error(logits(model, ids, position_ids=positions), masked) < EXACT
    assert error(logits(model, ids)[:, 10:], masked[:, 10:]) > 1e-3


@every_method
def test_gradients_are_those_of_dense_attention(cls: type[RemapMethod], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every weight of a model; the reference writes all scores out and takes autograd's own gradients."""
    model, method = extended(cls)
    length = min(target(method), 100)
    ids = tokens(length)
    rope = spec_of(model)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    found = gradients()
    layers = [layer for layer in model.modules() if "_ctxext_attend" in vars(layer)]
    for index, layer in enumerate(layers):
        inv_freq, first = layer._ctxext_attend.far.inv_freq(torch.device("cpu")), 4 * index

        def dense(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *_: Any,
            scale: float,
            inv_freq: Tensor = inv_freq,
            first: int = first,
            **__: Any,
        ) -> Tensor:
            assert k.shape[1] == 4
            plain = [unrotated(x[0], inv_freq, False) for x in (q, k)]
            return dense_heads(method, first, *plain, v[0], inv_freq, scale, rope)[None]

        monkeypatch.setitem(vars(layer), "_ctxext_attend", dense)
    wanted = gradients()
    assert len(found) == len(wanted) > 10
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < EXACT * max(1.0, float(other.abs().max()))


@pytest.mark.slow
@every_method
def test_a_saved_model_loads_with_ctxext_only_and_is_the_same(cls: type[RemapMethod], tmp_path: Path) -> None:
    model, method = extended(cls)
    ids = tokens(min(target(method), 100))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    before, after = ctxext.describe(model), ctxext.describe(loaded)
    assert (before.method, before.fingerprint, before.notes) == (after.method, after.fingerprint, after.notes)
    assert not before.stock
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(copied, ids), logits(model, ids))
    plain = logits(tiny().double(), ids)
    assert torch.equal(logits(ctxext.unpatch(model), ids), plain)
    assert torch.equal(logits(ctxext.unpatch(copied), ids), plain)


@pytest.mark.slow
def test_two_settings_have_two_fingerprints() -> None:
    found = {ctxext.describe(ctxext.patch(tiny(), SelfExtend(factor=2, window=w))).fingerprint for w in (16, 24, 32)}
    assert len(found) == 3


def test_describe_shows_the_pieces_in_words() -> None:
    said = str(ctxext.describe(ctxext.patch(tiny(), "self_extend", factor=2, window=32, thinning=0.5), verbose=True))
    assert "Texts of up to 64 tokens are read as without the extension." in said
    assert "keys less than 32 tokens back, and all keys of queries before 64, at their own positions" in said
    assert (
        "the first 4 keys, where they lie 32 or more tokens back of queries from 64 on: queries at i // 4 + 24" in said
    )
    far = "keys 32 or more tokens back of queries from 64 on, but for the first 4 of the text"
    assert f"{far}: queries at i // 4 + 24, keys at j // 4, each key counting as 0.5 of one" in said


def test_it_extends_what_a_scaled_checkpoint_was_trained_with() -> None:
    """Qwen2.5-1M ships Dual Chunk Attention together with YaRN: positions are remapped, frequencies stay."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    model = tiny(rope_parameters=scaled, max_position_embeddings=64)
    plain = copy.deepcopy(model)
    ctxext.patch(model, "dual_chunk", factor=2, trained_length=64)
    assert torch.equal(logits(model, tokens(55)), logits(plain, tokens(55)))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["logn", "yarn", "growing"])
def test_a_temperature_multiplies_the_scores_of_each_query(temperature: str) -> None:
    rope = RopeSpec(8, 1e4, 64)
    at = torch.tensor([[0, 63, 64, 127]])
    found = ReRoPE(factor=2, temperature=temperature).sharpness(rope, at)
    assert found is not None
    if temperature == "logn":
        assert torch.allclose(found, torch.tensor([[1, 1, 65**0, 7 / 6]]).double(), atol=0.005)
    elif temperature == "growing":
        assert torch.allclose(found[:, [0, 1, 3]], torch.tensor([[1, 1, 1.0693147**2]]).double())
        assert 1 < float(found[0, 2]) < 1.004
    else:
        assert torch.allclose(found, torch.full((1, 4), 1.0693147**2).double())
    model = ctxext.patch(tiny().double(), "rerope", factor=2, temperature=temperature)
    plain = ctxext.patch(tiny().double(), "rerope", factor=2)
    apart = (logits(model, tokens(100)) - logits(plain, tokens(100))).abs().amax(-1)[0]
    assert (float(apart[:63].max()) > 1e-4) == (temperature == "yarn"), "others leave the trained window as it is"
    assert ("read as without the extension" in str(ctxext.describe(model))) == (temperature != "yarn")
    assert float(apart[80:].min()) > 1e-6


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("falcon", {}, "does not go through transformers' attention interface"),
        ("llama4_text", {}, "belong to its sliding-window layers only"),
        ("deepseek_v32", {}, "fails on the layout in place of a mask"),
        ("mistral", {"sliding_window": 16}, "sliding_window"),
        ("bloom", {}, "has ALiBi, which method 'self_extend' cannot change"),
    ],
)
def test_models_whose_attention_cannot_be_taken_over_are_refused_by_name(
    model_type: str, changes: dict[str, Any], said: str
) -> None:
    model = tiny(model_type, **changes)
    before = logits(model, tokens(40))
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "self_extend", factor=2, window=16, trained_length=TRAINED_LENGTH)
    assert torch.equal(logits(model, tokens(40)), before)


def test_a_window_that_is_lifted_is_no_obstacle() -> None:
    model = ctxext.patch(tiny("mistral", sliding_window=16), "self_extend", factor=2, window=16, sliding_window="lift")
    assert logits(model, tokens(100)).isfinite().all()


def test_bad_parameters_leave_the_model_as_it_was() -> None:
    model = tiny()
    before = model.config.to_dict()
    with pytest.raises(InvalidParameterError, match="window must be from 1 to 63 tokens"):
        ctxext.patch(model, "self_extend", factor=2, window=100)
    with pytest.raises(InvalidParameterError, match="reaches 123 tokens, found a target of 128"):
        ctxext.patch(model, "string", factor=2, local=5)
    assert model.config.to_dict() == before


@pytest.mark.slow
@every_method
def test_under_autocast_the_cache_itself_is_turned(cls: type[RemapMethod]) -> None:
    """There, attention is given a copy of the keys in 16 bits, and the cache keeps what rotation left: 32."""
    model = tiny()
    method = example(cls, model)
    ctxext.patch(model, method)
    ids = tokens(min(target(method), 96))
    cache = DynamicCache()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :80], past_key_values=cache)
            for at in range(80, 90):
                model(ids[:, at : at + 1], past_key_values=cache)
        assert cache.layers[0].keys.dtype is torch.float32
        found = model(ids[:, 90:], past_key_values=cache).logits
    wanted = logits(model, ids)[:, 90:]
    assert error(found, wanted) < 0.1 * float(wanted.abs().max()), "more than bfloat16 costs: keys stand elsewhere"


class OtherLayer(DynamicLayer):
    """A layer of a cache that may keep something else than what it returns."""


@pytest.mark.slow
@every_method
def test_a_cache_of_another_kind_is_read_as_it_is(cls: type[RemapMethod]) -> None:
    model, method = extended(cls)
    ids = tokens(min(target(method), 96))
    cache = DynamicCache()
    cache.layer_class_to_replicate = OtherLayer
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([80, *[1] * (ids.shape[1] - 80)], 1)]
    assert all(type(layer) is OtherLayer for layer in cache.layers)
    assert error(torch.cat(parts, 1), logits(model, ids)) < EXACT


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(("self_extend", "retrieval_heads"), marks=pytest.mark.slow),
        pytest.param(("dual_chunk", "rerope", "dpe", "string", "streaming", "texts"), marks=pytest.mark.nightly),
    ],
    ids=["two", "others"],
)
def test_a_step_is_one_graph_and_whole_texts_are_refused_with_the_reason(what: tuple[str, ...]) -> None:
    """In a process of its own: the checker of shapes that tests run under cannot be compiled."""
    program = [sys.executable, "-m", "tests.contracts.compiled_remap_program", *what]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_training_with_dropout_is_refused() -> None:
    model = ctxext.patch(tiny(attention_dropout=0.1), DualChunk(factor=2)).train()
    with pytest.raises(IncompatibleError, match=r"no dropout, found 0\.1"):
        model(tokens(70))


@pytest.mark.slow
def test_a_named_backend_is_taken_and_never_falls_back() -> None:
    ids = tokens(100)
    one = ctxext.patch(tiny(), "self_extend", factor=2, attention="reference")
    other = ctxext.patch(tiny(), "self_extend", factor=2, attention="sdpa")
    assert error(logits(one, ids), logits(other, ids)) < 1e-4
    with pytest.raises(ctxext.errors.BackendUnavailableError, match="flex"):
        logits(ctxext.patch(tiny(), "self_extend", factor=2, attention="flex"), ids)
