"""Remapping of models in which only some layers reach far: hybrids, windows, layers without positions, sinks, latents.

Expected logits are those of the model's own code with dense attention, written here, in the layers that reach far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec
from ctxext.training.sequences import require_separate
from tests._models import tiny, tokens
from tests._products import some
from tests._remap import relative_positions, weights
from tests.walk.tiny import TRAINED_LENGTH

LENGTH = 3 * TRAINED_LENGTH
EXACT, SINGLE = 1e-6, 1e-4
"""Largest error in parts of the largest logit, in float64; and where transformers computes a part in float32 only."""


class Kind(NamedTuple):
    """What is known of a type from its code: which dimensions rotate, and how many layers reach far, of how many.

    Args:
        far: layers with attention that reach far and rotate.
        attending: all layers with attention.
        tail: whether the last dimensions of a head rotate.
        interleaved: whether neighbouring dimensions are a pair.
        backwards: whether a later position turns the other way round.
        dtype: of the test; experts know no float64.
        continues: whether transformers continues a cache of the type by several tokens.
        decodes: whether transformers reads with a cache what it reads without one.
        changes: fields of the config.
    """

    far: int = 2
    attending: int = 2
    tail: bool = False
    interleaved: bool = False
    backwards: bool = False
    dtype: torch.dtype = torch.float64
    continues: bool = True
    decodes: bool = True
    changes: dict[str, Any] = {}  # noqa: RUF012


FOUR = {"num_hidden_layers": 4}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16} | FOUR
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2} | FOUR
FLOAT = torch.float32
KINDS = {
    "qwen3_5_text": Kind(2, 2, dtype=FLOAT, continues=False, changes=HYBRID),
    "qwen3_next": Kind(2, 2, dtype=FLOAT, continues=False, changes=HYBRID),
    "granitemoehybrid": Kind(
        2, 2, dtype=FLOAT, continues=False, changes={"layer_types": ["mamba", "attention"] * 2} | FOUR
    ),
    "lfm2_moe": Kind(
        2, 2, dtype=FLOAT, continues=False, changes={"layer_types": ["conv", "full_attention"] * 2} | FOUR
    ),
    "bamba": Kind(1, 1, dtype=FLOAT, decodes=False),
    "gemma3_text": Kind(2, 4, changes=TWO_KINDS),
    "gemma4_text": Kind(2, 4, changes=TWO_KINDS),
    "olmo3": Kind(2, 4, changes=TWO_KINDS),
    "cwm": Kind(2, 4, changes=TWO_KINDS),
    "qwen2": Kind(2, 4, changes=TWO_KINDS | {"use_sliding_window": True}),
    "ministral": Kind(2, 4, changes=TWO_KINDS),
    "smollm3": Kind(2, 4, changes={"no_rope_layers": [1, 0, 1, 0], "layer_types": ["full_attention"] * 4} | FOUR),
    "gpt_oss": Kind(2, 4, dtype=FLOAT, changes=TWO_KINDS),
    "deepseek_v3": Kind(2, 2, tail=True, dtype=FLOAT),
    "glm4_moe_lite": Kind(2, 2, tail=True, dtype=FLOAT),
    "gemma2": Kind(2, 4, dtype=FLOAT, changes=TWO_KINDS),
    "nanochat": Kind(2, 2, backwards=True),
    "phi3": Kind(2, 2),
    "apertus": Kind(2, 2),
}
# One of each structure; the others are like one of these.
DISTINCT = ["qwen3_next", "granitemoehybrid", "gemma3_text", "gemma4_text", "smollm3", "gpt_oss", "deepseek_v3"]
every_kind = pytest.mark.parametrize("model_type", some(KINDS, *DISTINCT, "nanochat", "phi3"))
METHODS = [ReRoPE(factor=4, window=20), DualChunk(factor=4, chunk=40, local=8)]
SAMPLE = ("qwen3_next", "gemma3_text", "gpt_oss", "deepseek_v3")
"""Types that every test takes; the others take the longest only with self_extend."""

SELF_EXTEND = SelfExtend(factor=4, window=16, thinning=0.5)


def model_of(model_type: str) -> PreTrainedModel:
    return tiny(model_type, **KINDS[model_type].changes).to(KINDS[model_type].dtype)


def patched(model: PreTrainedModel, method: RemapMethod = SELF_EXTEND) -> PreTrainedModel:
    return ctxext.patch(model, method, trained_length=TRAINED_LENGTH)


class Oracle:
    """Dense attention by the positions of a method, in layers that do not look back over a window only."""

    def __init__(self, model: PreTrainedModel, kind: Kind, method: RemapMethod) -> None:
        self.kind, self.method, self.model, self.remapped = kind, method, model, set[int]()

    def frequencies(self, module: nn.Module) -> Tensor:
        buffers = {path.rpartition(".")[2]: buffer for path, buffer in self.model.named_buffers()}
        return buffers.get("full_attention_original_inv_freq", buffers.get("original_inv_freq")).double()

    def relative(self, method: RemapMethod, inv_freq: Tensor, length: int) -> tuple[Tensor, Tensor]:
        rope = RopeSpec(2 * len(inv_freq), 1e4, TRAINED_LENGTH)
        target = method.target_length(TRAINED_LENGTH)
        return relative_positions(method, rope, target, length), weights(method, rope, target)[:length, :length]

    def __call__(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5 if scaling is None else scaling
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        dtype, q, keys, values = q.dtype, q.double(), keys.double(), values.double()
        scores = q @ keys.transpose(2, 3)
        counts: Tensor | float = 1.0
        rotates = getattr(module, "use_rope", True)
        if sliding_window is None and getattr(module, "layer_type", "full_attention") == "full_attention" and rotates:
            self.remapped.add(module.layer_idx)
            inv_freq, length = self.frequencies(module), q.shape[2]
            scores, counts = self.far(q, keys, self.method, inv_freq, length)
            if isinstance(self.method, RetrievalHeads):
                near, near_counts = self.far(q, keys, self.method.near_method, inv_freq, length)
                assert isinstance(self.method.heads, tuple)
                numbers = range(module.layer_idx * k.shape[1], (module.layer_idx + 1) * k.shape[1])
                is_far = torch.tensor([number in self.method.heads for number in numbers]).repeat_interleave(group)
                scores = torch.where(is_far[None, :, None, None], scores, near)
                counts = torch.where(is_far[:, None, None], counts, near_counts)
        scores = scores * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask[..., : k.shape[2]].double()
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
            counts = torch.nn.functional.pad(torch.as_tensor(counts).expand_as(scores[0, ..., :-1]), (0, 1), value=1.0)
        share = (scores - scores.amax(-1, keepdim=True)).exp() * counts
        share = share / share.sum(-1, keepdim=True)
        return (share[..., : k.shape[2]] @ values).to(dtype).transpose(1, 2).contiguous(), None

    def far(self, q: Tensor, k: Tensor, method: RemapMethod, inv_freq: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Scores and weights of pairs, from queries and keys that are rotated to their own positions."""
        relative, weight = self.relative(method, inv_freq, length)
        places = torch.arange(length)
        more = (relative - (places[:, None] - places[None])[..., None]) * (
            -inv_freq if self.kind.backwards else inv_freq
        )
        wide = 2 * len(inv_freq)
        start = q.shape[3] - wide if self.kind.tail else 0

        def numbers(x: Tensor) -> Tensor:
            part = x[..., start : start + wide]
            first, second = (part[..., ::2], part[..., 1::2]) if self.kind.interleaved else part.chunk(2, -1)
            return torch.complex(first.contiguous(), second.contiguous())

        turn = torch.polar(torch.ones_like(more), more.nan_to_num())
        scores = torch.einsum("bhif,bhjf,ijf->bhij", numbers(q), numbers(k).conj(), turn).real
        still = [x[..., [d for d in range(x.shape[3]) if not start <= d < start + wide]] for x in (q, k)]
        scores = scores + still[0] @ still[1].transpose(2, 3)
        return scores.masked_fill(relative[..., 0].isnan(), -torch.inf), weight


@contextlib.contextmanager
def dense(model: PreTrainedModel, kind: Kind, method: RemapMethod) -> Iterator[Oracle]:
    oracle = Oracle(model, kind, method)
    AttentionInterface.register("oracle", oracle)
    AttentionMaskInterface.register("oracle", eager_mask)
    before, model.config._attn_implementation_internal = model.config._attn_implementation, "oracle"
    try:
        yield oracle
    finally:
        model.config._attn_implementation_internal = before


@torch.no_grad()
def logits_of(model: PreTrainedModel, inputs: Tensor, **more: Any) -> Tensor:
    found: Tensor = model(inputs, use_cache=False, **more).logits
    return found


def require_equal(found: Tensor, wanted: Tensor) -> None:
    """Hold an error in parts of the largest number to that of the precision."""
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < (EXACT if found.dtype == torch.float64 else SINGLE), error


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [SELF_EXTEND, ReRoPE(factor=4, window=20), DualChunk(factor=4, chunk=40, local=8)], ids=lambda m: m.name
)
@every_kind
def test_layers_that_reach_far_attend_by_the_positions_of_the_method(model_type: str, method: RemapMethod) -> None:
    model, kind, inputs = model_of(model_type), KINDS[model_type], tokens(LENGTH)
    with dense(model, kind, method) as oracle:
        expected = logits_of(model, inputs)
    assert len(oracle.remapped) == kind.far
    plain = logits_of(model, inputs)
    found = logits_of(patched(model, method), inputs)
    assert float((found - plain).abs().max()) > 1e-2
    require_equal(found, expected)
    assert torch.equal(logits_of(ctxext.unpatch(model), inputs), plain)


@pytest.mark.slow
@every_kind
def test_inside_the_window_every_bit_stays(model_type: str) -> None:
    model, inputs = model_of(model_type), tokens(TRAINED_LENGTH, rows=2)
    keep = torch.ones_like(inputs)
    keep[0, :7] = 0

    def read() -> list[Tensor]:
        whole, padded = logits_of(model, inputs), logits_of(model, inputs, attention_mask=keep)
        cache = DynamicCache(config=model.config)
        steps = [model(part, past_key_values=cache).logits for part in inputs[:1].split([50, 5, 1, 1, 7], 1)]
        return [whole, padded, *steps]

    with torch.no_grad():
        before = read()
        patched(model)
        assert all(torch.equal(now, then) for now, then in zip(read(), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name, kind in KINDS.items() if kind.decodes])
def test_a_cache_changes_nothing(model_type: str) -> None:
    model, inputs = patched(model_of(model_type)), tokens(LENGTH)
    expected = logits_of(model, inputs)
    for steps in ([LENGTH - 3, 1, 1, 1], [100, *[1] * 40, LENGTH - 140]):
        if steps[-1] > 1 and not KINDS[model_type].continues:
            continue
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            found = [model(part, past_key_values=cache).logits for part in inputs.split(steps, 1)]
        require_equal(torch.cat(found, 1), expected)


@pytest.mark.slow
@every_kind
def test_padding_is_no_text(model_type: str) -> None:
    model, inputs = patched(model_of(model_type)), tokens(LENGTH, rows=2)
    keep = torch.ones_like(inputs)
    keep[0, :31] = 0
    found = logits_of(model, inputs, attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0))
    require_equal(found[1], logits_of(model, inputs[1:])[0])
    require_equal(found[0, 31:], logits_of(model, inputs[:1, 31:])[0])


@pytest.mark.slow
@every_kind
def test_gradients_are_those_of_dense_attention(model_type: str) -> None:
    model, kind, inputs = model_of(model_type), KINDS[model_type], tokens(LENGTH)

    def gradients() -> Tensor:
        model.zero_grad()
        model(inputs, labels=inputs, use_cache=False).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    with dense(model, kind, SELF_EXTEND):
        expected = gradients()
    patched(model)
    require_equal(gradients(), expected)


def held(cache: DynamicCache) -> int:
    """Numbers in a cache."""
    near = [layer.near for layer in cache.layers if getattr(layer, "near", None) is not None]
    return sum(part.keys.numel() + part.values.numel() for part in [*cache.layers, *near])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "phi3"])
def test_checkpointed_layers_have_the_same_gradients(model_type: str) -> None:
    model, inputs = patched(model_of(model_type)).train(), tokens(LENGTH)
    sums = []
    for _ in range(2):
        model.zero_grad()
        model(inputs, labels=inputs, use_cache=False).loss.backward()
        sums.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
        model.gradient_checkpointing_enable()
    require_equal(*sums)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "cwm", "deepseek_v3", "gemma2"])
def test_retrieval_heads_of_the_layers_that_reach_far(model_type: str) -> None:
    model, kind, inputs = model_of(model_type), KINDS[model_type], tokens(LENGTH)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs, past_key_values=plain)
    method = RetrievalHeads(factor=4, heads=(3,), sinks=4, window=24, exact=False)  # the other group of layer 1
    with dense(model, kind, method):
        expected = logits_of(model, inputs)
    patched(model, method)
    require_equal(logits_of(model, inputs), expected)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = [model(part, past_key_values=cache).logits for part in inputs.split([100, *[1] * 20, LENGTH - 120], 1)]
    require_equal(torch.cat(found, 1), expected)
    if model_type == "deepseek_v3":  # one vector of a token serves all heads
        assert held(cache) == held(plain)
        assert "The cache holds all tokens" in str(ctxext.describe(model))
    else:
        assert held(cache) < held(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self_extend", "streaming", "retrieval_heads"])
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys(model_type: str, name: str) -> None:
    """No layer drops keys that a later one reads, and those that compute the last queries only see what they saw."""
    methods: dict[str, RemapMethod] = {
        "self_extend": SELF_EXTEND,
        "streaming": Streaming(factor=4, window=24, exact=False),
        "retrieval_heads": RetrievalHeads(factor=4, heads=(3,), sinks=4, window=24, exact=False),
    }
    model = tiny(model_type, **TWO_KINDS, num_kv_shared_layers=2).double()
    inputs = tokens(LENGTH, rows=2)
    keep = torch.ones_like(inputs)
    keep[0, :9] = 0
    short = inputs[:, :40]
    before = logits_of(model, short), logits_of(model, short, logits_to_keep=1)
    patched(model, methods[name])
    if name == "self_extend":
        now = logits_of(model, short), logits_of(model, short, logits_to_keep=1)
        assert all(torch.equal(*pair) for pair in zip(now, before, strict=True))
    for more in ({}, {"attention_mask": keep}):
        expected = logits_of(model, inputs, **more)
        require_equal(logits_of(model, inputs, logits_to_keep=1, **more), expected[:, -1:])
        require_equal(logits_of(model, inputs, logits_to_keep=5, **more), expected[:, -5:])
        cache, found, at = DynamicCache(config=model.config), [], 0
        for count in [100, *[1] * 60, 32]:
            at += count
            part = {key: mask[:, :at] for key, mask in more.items()}
            with torch.no_grad():
                found.append(model(inputs[:, at - count : at], past_key_values=cache, **part).logits)
        require_equal(torch.cat(found, 1)[1:], expected[1:])
        require_equal(torch.cat(found, 1)[:, 9:], expected[:, 9:])


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("padding", some([0, 11], 11))
def test_generate_writes_the_same_with_any_cache(model_type: str, padding: int) -> None:
    model, inputs = patched(model_of(model_type).float()), tokens(100, rows=2)
    keep = torch.ones_like(inputs)
    keep[0, :padding] = 0
    how: dict[str, Any] = {"attention_mask": keep, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    for beams in (1, 2):
        expected = model.generate(inputs, do_sample=False, num_beams=beams, use_cache=False, **how)
        for cache in (None, "static") if beams == 1 else (None,):
            found = model.generate(inputs, do_sample=False, num_beams=beams, cache_implementation=cache, **how)
            assert torch.equal(found, expected), cache


@pytest.mark.slow
@every_kind
def test_saved_and_loaded(model_type: str, tmp_path: Path) -> None:
    model, inputs = patched(model_of(model_type).float()), tokens(LENGTH)
    ctxext.save(model, tmp_path)
    loaded = ctxext.load(tmp_path)
    assert torch.equal(logits_of(loaded, inputs), logits_of(model, inputs))
    kind, notes = KINDS[model_type], str(ctxext.describe(model))
    said = f"{kind.far} of {kind.attending} attention layers are remapped; the others stay as they are"
    assert (said in notes) == (kind.far < kind.attending)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite", "nanochat", "gemma3_text", "gpt_oss"])
def test_how_a_model_rotates_is_seen_without_its_weights_too(model_type: str) -> None:
    changes = KINDS[model_type].changes if model_type in KINDS else {}
    live, empty = tiny(model_type, **changes), tiny(model_type, **changes).to("meta")
    forms = []
    for model in (live, empty):
        attends = [vars(m)["_ctxext_attend"] for m in patched(model).modules() if "_ctxext_attend" in vars(m)]
        forms.append({attend.form for attend in attends if hasattr(attend, "form")})
    assert forms[0] == forms[1]
    assert len(forms[0]) == 1


def test_positions_along_several_axes_are_refused_where_they_differ() -> None:
    model, inputs = patched(model_of("qwen3_5_text")), tokens(LENGTH)
    places = torch.arange(LENGTH)[None]
    same = places.expand(4, 1, -1)
    require_equal(logits_of(model, inputs, position_ids=same), logits_of(model, inputs))
    with pytest.raises(IncompatibleError, match="differ, as in a text with an image or a video"):
        logits_of(model, inputs, position_ids=torch.stack([places, places, places // 2, places // 3]))


def test_a_model_that_was_saved_is_extended_afterwards(tmp_path: Path) -> None:
    """``save_pretrained`` leaves the name of the dtype in the config, of which Apertus makes a tensor."""
    model = tiny("apertus")
    model.save_pretrained(tmp_path)
    assert isinstance(model.config.dtype, str)
    assert logits_of(patched(model), tokens(LENGTH)).isfinite().all()


def test_a_window_wider_than_the_training_is_refused() -> None:
    model = tiny("cwm", **TWO_KINDS | {"sliding_window": 100})
    with pytest.raises(IncompatibleError, match="wider"):
        patched(model)


def test_a_model_of_windows_alone_has_no_distance_to_remap() -> None:
    model = tiny("mistral", sliding_window=16)
    with pytest.raises(IncompatibleError, match="lift"):
        patched(model)


CARRYING = {"qwen3_5_text", "qwen3_next", "granitemoehybrid", "lfm2_moe", "bamba"}
PACKED = [SELF_EXTEND, *METHODS, Streaming(factor=4, window=20), "yarn", "dynamic_ntk"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some(KINDS, "lfm2_moe", "gemma3_text", "smollm3", "gpt_oss"))
def test_documents_of_one_row_are_read_each_alone_or_refused(model_type: str) -> None:
    """By every method; where ctxext computes attention, also with a cache, with which no mask of transformers does."""
    model, ids = model_of(model_type), tokens(90)
    positions = torch.cat([torch.arange(50), torch.arange(40)])[None]
    for method in PACKED:
        factor = 4.0 if isinstance(method, str) else None
        try:
            ctxext.patch(model, method, factor=factor, trained_length=TRAINED_LENGTH)
        except IncompatibleError:  # two methods do not fit layers of two kinds of positions
            continue
        by_masks_alone = isinstance(method, str) and model_type == "gpt_oss"
        for use_cache in (False,) if isinstance(method, str) else (False, True):
            with torch.no_grad():
                if model_type in CARRYING or by_masks_alone:
                    reason = (
                        "attention masks without positions" if by_masks_alone else "from one document into the next"
                    )
                    with pytest.raises(IncompatibleError, match=rf"^position_ids restart.*{reason}\. .*a row\.$"):
                        model(ids, position_ids=positions, use_cache=use_cache)
                    model(ids[:, :50], position_ids=positions[:, :50], use_cache=use_cache)
                    hidden = {"attention_mask": (torch.arange(50) > 5).long()[None]}
                    model(ids[:, :50], position_ids=(positions[:, :50] - 6).clamp(min=0), **hidden)
                    continue
                found = model(ids, position_ids=positions, use_cache=use_cache).logits
                alone = torch.cat([model(ids[:, :50]).logits, model(ids[:, 50:]).logits], 1)
            tolerance = (EXACT if KINDS[model_type].dtype is torch.float64 else SINGLE) * float(alone.abs().max())
            torch.testing.assert_close(found, alone, atol=tolerance, rtol=0)
        ctxext.unpatch(model)


def test_packed_rows_of_a_model_that_carries_a_state_in_the_recipe() -> None:
    with pytest.raises(IncompatibleError, match=r"^position_ids restart.*'conv'"):
        require_separate(patched(model_of("lfm2_moe")))
    require_separate(patched(model_of("gpt_oss")))
