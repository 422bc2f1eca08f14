"""Find the heads that retrieve: score each key-value group by its attention to where a text said the same before.

A text says something twice, and the second time its tokens are known from the first. Two kinds of heads find them: some
look from a token at its twin, the same token earlier; others look at the token after the twin, which is the one to
copy, and rest on what the former have found. The score of a head is its attention to both, a mean over tokens.

Heads that look at the token to copy do not suffice alone: where the best fifth of SmolLM2's groups saw all of 2,048
tokens and the others the last 256, the second half of six texts lost 0.24 nats a token with them, 0.10 with both kinds.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ctxext.attention.attend import LayerCall, attention_function, put_in_evaluation
from ctxext.attention.engines import RemapAttend
from ctxext.caches.digest import UNKNOWN, is_shared_out, sample
from ctxext.caches.records import attends_of
from ctxext.core.edits import Edits
from ctxext.core.patching import patched_state
from ctxext.core.rebuild import FAILURES
from ctxext.core.scaling import stated_length
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import Subject, shares_heads
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError, shown
from ctxext.files import JsonObject, digest, parse_json, write_json
from ctxext.methods.retrieval_heads import SHARE, RetrievalHeads
from ctxext.spec import ExtensionArguments
from ctxext.version import __version__

RECORDING = "ctxext_heads"
SEEDS = (0, 1, 2)
REPEATED = 512  # tokens of the text that is repeated, where the model was trained for twice as many
LONGEST = 2048  # tokens of a text with needles
LEAST = 32  # tokens that a model must read
CHUNK = 256  # queries whose attention weights exist at a time
# Of needles: what each is called, and of those made of random tokens, how many tokens name one and how many it has.
PLACES = ("Lisbon", "Cairo", "Oslo", "Lima", "Kyoto", "Dublin", "Nairobi", "Quito")
NEEDLE = "\n\nThe pass key of {place} is"
NAMED, HIDDEN = 4, 4


@dataclass(frozen=True)
class HeadScores:
    """Scores of the key-value groups of a model; a group is as good as its best query head.

    Groups are numbered through all attention layers: the number of a group is the number of groups in the layers
    before, plus its index in its layer.

    Args:
        kv_heads: key-value groups of each attention layer, in the order of layers.
        probes: by probe, the score of every group: attention to what was said before, from 0 to 1, mean over seeds.
        spread: by probe, the standard deviation of each of these scores over seeds; empty for one seed.
        fingerprint: Fingerprint of the model without an extension, see ``fingerprint_of``.
        settings: the seeds, tokens and versions that the scores were measured with.
        windowed: the attention layers that look back over a window only, and never read far; their groups score 0.
    """

    kv_heads: tuple[int, ...]
    probes: dict[str, tuple[float, ...]]
    spread: dict[str, tuple[float, ...]] = field(default_factory=dict)
    fingerprint: str = ""
    settings: JsonObject = field(default_factory=dict)
    windowed: tuple[int, ...] = ()

    @property
    def scores(self) -> tuple[float, ...]:
        """The score of every group: the mean over probes."""
        return tuple(sum(each) / len(each) for each in zip(*self.probes.values(), strict=True))

    def ranked(self) -> tuple[int, ...]:
        """Return the numbers of all groups, best first; the lower number comes first among equal scores."""
        return tuple(best_first(self.scores))

    def chosen(self, *, share: float | None = None, threshold: float | None = None) -> tuple[int, ...]:
        """Return the numbers of the groups that retrieve, in ascending order.

        Args:
            share: Share of the groups that can read far, above 0 and at most 1, rounded up to whole groups.
            threshold: the least score of a group, from 0 to 1; at least the best group is chosen.

        Raises:
            InvalidParameterError: unless one of the two is given, in its range.
        """
        if (share is None) == (threshold is None):
            raise InvalidParameterError("Give share or threshold, one of the two, to choose the groups that retrieve.")
        scores = self.scores
        ranked = [group for group in self.ranked() if self.place(group)[0] not in self.windowed]
        if share is not None:
            if not 0 < share <= 1:
                raise InvalidParameterError(f"share must be above 0 and at most 1, found {shown(share)}.")
            # A share of 0.2 of 90 groups is 18, although 0.2 * 90 may come out a little above.
            return tuple(sorted(ranked[: max(1, math.ceil(share * len(ranked) - 1e-9))]))
        if threshold is None or not 0 <= threshold <= 1:
            raise InvalidParameterError(f"threshold must be from 0 to 1, found {shown(threshold)}.")
        return tuple(sorted({ranked[0], *(group for group in ranked if scores[group] >= threshold)}))

    def place(self, group: int) -> tuple[int, int]:
        """Return the attention layer and the index in it of a group's number."""
        layer = 0
        while group >= self.kv_heads[layer]:
            group, layer = group - self.kv_heads[layer], layer + 1
        return layer, group

    def to_dict(self) -> JsonObject:
        """Return plain JSON values."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the scores as JSON, whole or not at all."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def read(cls, path: str | Path) -> HeadScores:
        """Read what ``save`` wrote.

        Raises:
            InvalidParameterError: the file is missing, or holds something else.
        """
        way = "Write it by `ctxext heads CHECKPOINT -o heads.json`, or by ctxext.heads(model).save(path)."
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"The scores of heads {str(path)!r} cannot be read: {error}. {way}") from error
        try:
            scores = cls(
                kv_heads=tuple(map(int, content["kv_heads"])),
                probes={name: tuple(map(float, values)) for name, values in content["probes"].items()},
                spread={name: tuple(map(float, values)) for name, values in content["spread"].items()},
                fingerprint=str(content["fingerprint"]),
                settings=dict(content["settings"]),
                windowed=tuple(map(int, content.get("windowed", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidParameterError(f"{str(path)!r} does not hold scores of heads ({error!r}). {way}") from error
        groups, measured = sum(scores.kv_heads), list(scores.probes.values())
        is_whole = bool(measured) and min(scores.kv_heads, default=0) > 0
        if not is_whole or any(len(values) != groups or not all(map(math.isfinite, values)) for values in measured):
            raise InvalidParameterError(f"{str(path)!r} should hold a score of each of its {groups} groups. {way}")
        return scores


def best_first(scores: Sequence[float]) -> list[int]:
    """Return the numbers of groups, greatest score first; the lower number comes first among equal scores."""
    return sorted(range(len(scores)), key=lambda group: (-scores[group], group))


@dataclass(frozen=True, eq=False)
class Repetition:
    """A text that says something again, so that tokens can be copied from the first time.

    Args:
        queries: positions whose next token can be copied, in ascending order.
        twins: for each of them the earlier position of the same token; the token after the twin is the one to copy.
    """

    tokens: Int[Tensor, " tokens"]
    queries: Int[Tensor, " pairs"]
    twins: Int[Tensor, " pairs"]


def induction_scores(subject: Subject, *, seeds: Sequence[int] = SEEDS, lifted: bool = False) -> HeadScores:
    """Score the groups of a model that is not patched by induction: random tokens, then the same tokens again.

    Windows that the text fits into hide nothing of it, and do not count where they are to be ``lifted``.

    Raises:
        IncompatibleError: the model's attention cannot be recorded, or it reads too few tokens.
        PatchStateError: the model is patched.
    """
    with _recording(subject, lifted=lifted) as recorder:
        with torch.device("cpu"):  # whatever device is the default
            texts = {"induction": [_repeated(_Source(subject, seed)) for seed in seeds]}
        return _scored(recorder, texts, seeds)


def heads(model: Any, tokenizer: Any = None, *, text: str | None = None, seeds: Any = SEEDS) -> HeadScores:
    """Find the key-value groups with retrieval heads, by two probes: a repetition, and needles in a text.

    The first probe is induction: up to 512 random tokens, then the same tokens again. The second hides facts in up to
    2,048 tokens and asks for them at the end. The score, from 0 to 1, is the attention of each group's best query head
    to the earlier occurrence of the same tokens. No answer is sampled: each seed takes one pass per probe.

    Args:
        model: an unextended causal language model of transformers, or a wrapper around one. It is left unchanged, bit
            for bit; in training mode its passes are without dropout.
        tokenizer: the model's tokenizer, to hide facts in ``text``.
        text: a real text, of a thousand words or more; by default facts are random tokens, hidden in random tokens.
        seeds: seeds of all random tokens; at least one.

    Raises:
        IncompatibleError: the model's attention does not go through transformers' attention interface, the model is not
            a causal language model, or its window is too short.
        InvalidParameterError: no seeds, a text without a tokenizer, or too short a text.
        PatchStateError: the model is patched.

    Source: Wu et al., arXiv:2404.15574, section 2: a head retrieves if, where the model copies a token of the needle,
    its greatest attention is on that token. Counted here is the attention itself, and that to the token before; the
    answer is given and not sampled. The name induction comes from Olsson et al., arXiv:2209.11895.
    """
    if (
        not isinstance(seeds, Sequence)
        or not seeds
        or any(type(seed) is not int or not -(2**63) <= seed < 2**64 for seed in seeds)
    ):
        raise InvalidParameterError(
            f"seeds must be whole numbers, such as (0, 1), found {shown(seeds)}. torch holds 64 bits."
        )
    if text is not None and tokenizer is None:
        raise InvalidParameterError("A text needs the model's tokenizer. Give both, or neither.")
    subject = Subject.of(model)
    with _recording(subject) as recorder:
        return _scored(recorder, _probes(subject, tokenizer, text, seeds), seeds, text)


@torch.no_grad()
def retrieval_share(model: Any, *, seed: int = 0) -> float:
    """Measure the attention that the heads which read far pay to what a text said before, in a model extended by them.

    The induction probe of ``heads`` in one pass, inside the window in which the extension changes nothing.

    Returns:
        The mean over the groups that read far, from 0 to 1.

    Raises:
        IncompatibleError: the extension changes texts as short as the probe, or processes share the weights.
        PatchStateError: the model is not extended by ``retrieval_heads``.
    """
    subject, edits = Subject.of(model), Edits()
    patched = patched_state(subject.model)
    if patched is None or not isinstance(patched.method, RetrievalHeads):
        raise PatchStateError(f"This {subject.kind} is not extended by retrieval_heads, so no heads of it read far.")
    if is_shared_out(subject.model):
        raise IncompatibleError(
            "Processes share the weights of this model, and its heads are measured in a whole one. Measure none, or "
            "take data parallelism (recipes/accelerate/ddp.yaml)."
        )
    layers = {layer: by for layer, by in attends_of(subject.model).items() if isinstance(by, RemapAttend)}
    exact = min(by.exact_length for by in layers.values())
    if exact < LEAST:
        raise IncompatibleError(
            f"This extension changes texts of more than {exact} tokens, and heads are measured where it changes "
            f"nothing, on {LEAST} or more. Set exact to true and temperature to none, or measure no heads."
        )
    recorder = _Recorder(subject, "eager")

    def watched(by: RemapAttend) -> Any:
        def attend(layer: LayerCall) -> Tensor:
            recorder.record(layer.module, layer.q, layer.k, layer.v, layer.mask.under("eager"), layer.given)
            return by(layer)

        return attend

    try:
        put_in_evaluation(subject.model, edits)
        for module, by in layers.items():
            edits.set(module, "_ctxext_attend", watched(by))
        with torch.device("cpu"):  # whatever device is the default
            text = _repeated(_Source(subject, seed, exact))
        recorder.run(text)
    finally:
        edits.undo()
    far: list[Tensor] = []
    for module, by in layers.items():
        scores = recorder.layers[module]
        if by.heads is not None:
            far.append(scores[list(by.heads.far.numbers)])
        elif by.kind == "all":
            far.append(scores)
    return float(torch.cat(far).mean())


def require_scorable(model: Any, tokenizer: Any, *, text: str | None, seeds: Sequence[int]) -> None:
    """Raise what ``heads`` raises before it reads anything; the weights of ``model`` may be missing."""
    subject = Subject.of(model)
    with _recording(subject):
        _probes(subject, tokenizer, text, seeds)


def _probes(subject: Subject, tokenizer: Any, text: str | None, seeds: Sequence[int]) -> dict[str, list[Repetition]]:
    """Return the texts of both probes, one for each seed."""
    with torch.device("cpu"):  # whatever device is the default
        sources = [_Source(subject, seed) for seed in seeds]
        texts = {"induction": [_repeated(source) for source in sources]}
        texts["needle"] = [
            _random_needles(source) if text is None else _needles_in(text, tokenizer, source) for source in sources
        ]
        return texts


def with_heads(subject: Subject, method: RetrievalHeads, *, lifted: bool = False) -> RetrievalHeads:
    """Return the method with the numbers of the groups that read far, instead of a file of scores or None.

    The ``subject`` is not patched. Where the method names no heads, they are scored by induction, across windows that
    are to be ``lifted``.

    Raises:
        IncompatibleError: if the model's heads cannot be scored, or processes share its weights.
        InvalidParameterError: if the file of scores cannot be read, or is another model's.
    """
    if isinstance(method.heads, tuple):
        return method
    if method.heads is None:
        modules = list(subject.model.modules())  # a hook of accelerate brings weights from the disk
        if any(w.is_meta for w in subject.model.parameters()) and not any(hasattr(m, "_hf_hook") for m in modules):
            raise IncompatibleError(
                f"The heads of this {subject.kind} cannot be scored: some of its weights are not in memory. Give "
                f"heads: their numbers, or the file that `ctxext heads CHECKPOINT -o heads.json` writes."
            )
        scores = induction_scores(subject, seeds=SEEDS[:1], lifted=lifted)
    else:
        scores = HeadScores.read(method.heads)
        here = fingerprint_of(subject.model)
        if UNKNOWN in (here, scores.fingerprint):
            raise IncompatibleError(
                f"heads={method.heads!r} cannot be compared with this {subject.kind}: processes share its weights, or "
                f"shared them when the file was written. Give the numbers of its groups: heads=[2, 5]."
            )
        if not scores.fingerprint.startswith(here):
            raise InvalidParameterError(
                f"heads={method.heads!r} holds the scores of another model, or of one that was fine-tuned, quantised "
                f"or given an adapter since. Score this {subject.kind} itself: ctxext.heads(model).save('heads.json'). "
                f"Or give the numbers of its groups: heads=[2, 5]."
            )
    share = SHARE if method.share is None and method.threshold is None else method.share
    chosen = scores.chosen(share=share, threshold=method.threshold)
    return replace(method, heads=chosen, share=None, threshold=None)


def fingerprint_of(model: nn.Module) -> str:
    """Return digits of the names and shapes of a model's tensors, then digits of samples of their values.

    The dtype that a model was loaded in does not count: values are rounded to bfloat16. Where some values are not in
    memory, their digits are left out, so that the result begins the fingerprint of the whole model. Where ZeRO-3
    or FSDP has shared the weights out, ``UNKNOWN``.
    """
    if is_shared_out(model):
        return UNKNOWN
    tensors, shapes, values = sorted(model.state_dict().items()), hashlib.sha256(), hashlib.sha256()
    for name, tensor in tensors:
        shapes.update(f"{name} {list(tensor.shape)}".encode())
        values.update(sample(tensor, torch.bfloat16 if tensor.is_floating_point() else tensor.dtype))
    whole = not any(tensor.is_meta for _, tensor in tensors)
    return f"{shapes.hexdigest()[:12]}-" + values.hexdigest()[:12] * whole


def _scored(
    recorder: _Recorder, texts: dict[str, list[Repetition]], seeds: Sequence[int], text: str | None = None
) -> HeadScores:
    """Read the texts of each probe, and return the mean and the spread of the scores over a probe's texts."""
    probes: dict[str, tuple[float, ...]] = {}
    spread: dict[str, tuple[float, ...]] = {}
    kv_heads: tuple[int, ...] = ()
    for name, repetitions in texts.items():
        layers = [recorder.run(repetition) for repetition in repetitions]
        kv_heads = tuple(len(layer) for layer in layers[0])
        scores = torch.stack([torch.cat(each) for each in layers])
        if not bool(scores.isfinite().all()):
            raise IncompatibleError(
                f"Attention of this {type(recorder.subject.model).__name__} is not finite. Load it in another dtype, "
                f"such as bfloat16 or float32."
            )
        probes[name] = tuple(scores.mean(0).tolist())
        if len(layers) > 1:
            spread[name] = tuple(scores.std(0).tolist())
    made = {
        "seeds": list(seeds),
        "tokens": {name: len(repetitions[0].tokens) for name, repetitions in texts.items()},
        "text": None if text is None else digest(text),
        "versions": {"ctxext": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }
    windowed = tuple(index for index, layer in enumerate(recorder.layers) if layer in recorder.windowed)
    return HeadScores(kv_heads, probes, spread, fingerprint_of(recorder.subject.model), made, windowed)


class _Source:
    """Random tokens of a model's vocabulary, each at most once, none of them special.

    Raises:
        IncompatibleError: the model reads too few tokens, or knows too few.
    """

    def __init__(self, subject: Subject, seed: int, trained: int | None = None) -> None:
        text, self.ordinary = subject.text, subject.ordinary_tokens
        # Many models read a text rightly only behind the token that begins it.
        first, vocabulary = getattr(text, "bos_token_id", None), getattr(text, "vocab_size", None) or 0
        self.start = torch.tensor(
            [first] if isinstance(first, int) and 0 <= first < vocabulary else [], dtype=torch.long
        )
        trained = trained or stated_length(text) or 0
        self.room = (trained if 0 < trained < LONGEST else LONGEST) - len(self.start)
        self.generator = torch.Generator().manual_seed(seed)
        if self.room < LEAST - 1 or len(self.ordinary) < LEAST // 2:
            raise IncompatibleError(
                f"This {subject.kind} reads {self.room} tokens and knows {len(self.ordinary)} ordinary ones. Heads "
                f"that retrieve are found on {LEAST} tokens or more, of {LEAST // 2} kinds or more."
            )

    def draw(self, count: int) -> Int[Tensor, " tokens"]:
        """Return so many different tokens, or all that there are."""
        return self.ordinary[torch.randperm(len(self.ordinary), generator=self.generator)[:count]]


def _repeated(source: _Source) -> Repetition:
    """Repeat random tokens: the successor of each is known from the second time on."""
    tokens = source.draw(min(REPEATED, source.room // 2))
    first = len(source.start)
    twins = torch.arange(first, first + len(tokens) - 1)
    return Repetition(torch.cat([source.start, tokens, tokens]), twins + len(tokens), twins)


def _random_needles(source: _Source) -> Repetition:
    """Hide needles of random tokens between random tokens, about one to 64 tokens."""
    size = NAMED + HIDDEN
    count = max(1, min(source.room // 64, len(source.ordinary) // 64))
    tokens = source.draw(source.room - count * size)
    facts = [(needle[:NAMED], needle[NAMED:]) for needle in tokens[: count * size].view(count, size)]
    return _hidden(source, tokens[count * size :], facts, tokens[:0])


def _needles_in(text: str, tokenizer: Any, source: _Source) -> Repetition:
    """Hide pass keys of five digits in a stretch of a text, about one to 512 tokens.

    Raises:
        InvalidParameterError: the text is too short, or the model reads too few tokens for a needle and its question.
    """

    def encoded(words: str) -> Int[Tensor, " tokens"]:
        return torch.tensor(tokenizer(words, add_special_tokens=False).input_ids, dtype=torch.long)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=source.generator))

    facts = [
        (encoded(NEEDLE.format(place=place)), encoded(f" {10_000 + drawn(90_000)}"))
        for place in PLACES[: max(1, source.room // 512)]
    ]
    end = encoded(".\n\n")
    room = source.room - 2 * sum(len(name) + len(key) + len(end) for name, key in facts)
    letters = 8 * source.room  # more than any stretch of so many tokens has
    begin = drawn(max(1, len(text) - letters))
    body = encoded(text[begin : begin + letters])[: max(0, room)]
    if len(body) < 2 * len(facts):
        raise InvalidParameterError(
            f"{len(facts)} needles and their questions leave {room} of {source.room} tokens to the text, which has "
            f"{len(body)} there. Give a longer text, or none: then needles are random tokens."
        )
    return _hidden(source, body, facts, end)


def _hidden(source: _Source, body: Tensor, facts: Sequence[Sequence[Tensor]], end: Tensor) -> Repetition:
    """Put facts between pieces of a text, and say each again at its end in another order."""
    *pieces, last = body.tensor_split(len(facts) + 1)
    parts, places = [source.start], []
    for piece, (name, key) in zip(pieces, facts, strict=True):
        parts += [piece, name, key, end]
        places.append(sum(map(len, parts)) - len(end) - len(key) - 1)
    parts.append(last)
    queries, twins = [], []
    for index in torch.randperm(len(facts), generator=source.generator).tolist():
        name, key = facts[index]
        asked = torch.arange(len(key))  # from the last token of the name on, each predicts a token of the key
        queries.append(asked + sum(map(len, parts)) + len(name) - 1)
        twins.append(asked + places[index])
        parts += [name, key, end]
    return Repetition(torch.cat(parts), torch.cat(queries), torch.cat(twins))


@dataclass
class _Recorder:
    """Attention of a model's layers to what a text said before, summed up while the model reads it.

    Args:
        own: name of the attention implementation that the model had before.
        layers: for each attention layer so far, the score of each of its groups; the best of all its calls.
        windowed: the layers among them that look back over a window only.
        lifted: True if windows count only where they hide a part of the text.
    """

    subject: Subject
    own: str
    lifted: bool = False
    text: Repetition | None = None
    layers: dict[nn.Module, Float[Tensor, " groups"]] = field(default_factory=dict)
    windowed: set[nn.Module] = field(default_factory=set)

    def run(self, text: Repetition) -> list[Float[Tensor, " groups"]]:
        """Read a text, and return the scores of each layer's groups.

        Raises:
            IncompatibleError: no layer calls transformers' attention interface, or the model's code fails.
        """
        self.text, self.layers = text, {}
        model = self.subject.model
        try:
            reads: nn.Module = model.get_input_embeddings()
        except NotImplementedError:  # it reads sound, or has several tables
            reads = model
        device = next(reads.parameters()).device
        try:
            ids = text.tokens[None].to("cpu" if device.type == "meta" else device)
            model.base_model(input_ids=ids, use_cache=False)
        except CtxextError:
            raise
        except FAILURES as error:
            raise IncompatibleError(
                f"{type(model).__name__} fails on {len(text.tokens)} tokens while ctxext records its attention: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self.layers or self.windowed == self.layers.keys():
            raise _not_recorded(self.subject)
        return list(self.layers.values())

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Any) -> None:
        """Compute the attention of the chosen queries by the model's own eager function, in float32."""
        text = self.text
        assert text is not None  # run() has set it
        tokens, window = len(text.tokens), given.get("sliding_window")
        if window is not None and not (self.lifted and window >= tokens):
            # It can read no farther, whatever it has learned.
            self.layers.setdefault(module, torch.zeros(key.shape[1]))
            self.windowed.add(module)
            return
        if not isinstance(mask, Tensor) or mask.shape[-2:] != (tokens, tokens) or query.shape[2] != tokens:
            raise IncompatibleError(
                f"{type(module).__name__} attends to {key.shape[2]} keys of a text of {tokens} tokens, under a mask of "
                f"its own. ctxext cannot record which heads retrieve there."
            )
        keys, values = key.float(), value[..., :1].float()
        eager = attention_function(module, "eager")
        total = torch.zeros(query.shape[1], device=query.device)
        first, last = int(text.queries[0]), int(text.queries[-1])
        for start in range(first, last + 1, CHUNK):
            stop = min(start + CHUNK, last + 1)
            here = (text.queries >= start) & (text.queries < stop)
            rows = _as_bias(mask[..., start:stop, :])
            if bool((rows[..., 0, start + 1 :] == 0).any()):
                raise IncompatibleError(
                    f"{type(module).__name__} lets tokens see later ones, so it has nothing to retrieve. Heads that "
                    f"retrieve are found in models that predict the next token."
                )
            bias = given.get("position_bias")
            part = {} if bias is None else {"position_bias": bias[:, :, start:stop]}
            _, weights = eager(module, query[:, :, start:stop].float(), keys, values, rows, **given | part)
            at, twins = (text.queries[here] - start).to(weights.device), text.twins[here].to(weights.device)
            total += weights[0][:, at, twins].float().sum(-1) + weights[0][:, at, twins + 1].float().sum(-1)
        groups = (total / len(text.queries)).view(key.shape[1], -1).amax(-1).cpu()
        self.layers[module] = torch.maximum(groups, self.layers.get(module, groups))


def _as_bias(mask: Tensor) -> Tensor:
    """Return a mask in the form that is added to scores, in float32. It has true or 0 for the tokens that are seen."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextlib.contextmanager
def _recording(subject: Subject, *, lifted: bool = False) -> Iterator[_Recorder]:
    """Make a model record its attention, in evaluation mode; put everything back at the end.

    Raises:
        IncompatibleError: the model's attention does not go through transformers' interface, or it has an encoder.
        PatchStateError: the model is patched.
    """
    model = subject.model
    if patched_state(model) is not None:
        raise PatchStateError(
            f"This {type(model).__name__} is extended by ctxext, and its heads are found without that. Call "
            f"ctxext.unpatch first."
        )
    if subject.config.is_encoder_decoder:
        raise IncompatibleError(
            f"{type(model).__name__} is an encoder-decoder. Heads that retrieve are found in models that predict the "
            f"next token of one text."
        )
    if shares_heads(model) or is_shared_out(model):
        raise IncompatibleError(
            f"Processes share the weights of this {type(model).__name__}, and heads are scored in a whole model. "
            f"Load it whole to score its heads."
        )
    if not type(model)._can_set_attn_implementation():
        raise _not_recorded(subject)
    # Other kernels than these two take no mask of all queries and keys, from which the weights are computed.
    own = subject.text._attn_implementation
    if own not in ("eager", "sdpa"):
        own = "sdpa" if model._supports_sdpa else "eager"
    recorder, edits = _Recorder(subject, own, lifted), Edits()
    token = _recorder.set(recorder)
    try:
        edits.set(subject.text, "_attn_implementation_internal", RECORDING)
        put_in_evaluation(model, edits)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield recorder
    finally:
        edits.undo()
        _recorder.reset(token)


def _not_recorded(subject: Subject) -> IncompatibleError:
    return IncompatibleError(
        f"No attention of {type(subject.model).__name__} reaches beyond a window and goes through transformers' "
        f"attention interface, so ctxext cannot record which heads retrieve."
    )


def _running() -> _Recorder:
    recorder = _recorder.get()
    if recorder is None:
        raise PatchStateError(
            f"The attention implementation {RECORDING!r} works inside ctxext.heads only. Choose another by "
            f"model.set_attn_implementation('sdpa')."
        )
    return recorder


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """Record the attention to what was said before, and compute the layer's output by the model's own attention."""
    recorder = _running()
    recorder.record(module, query, key, value, attention_mask, given)
    own = attention_function(module, recorder.own)
    result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **given)
    return result


def _mask(**arguments: Any) -> Tensor:
    """Return the mask that the model's own attention takes, always of all queries and keys."""
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[_running().own](**arguments)
    return mask


def _measure_heads(work: Work) -> None:
    """Complete a method that leaves open which heads read far."""
    assert isinstance(work.method, RetrievalHeads)
    lifted = isinstance(given := work.arguments, ExtensionArguments) and given.sliding_window == "lift"
    work.method = with_heads(work.subject, work.method, lifted=lifted)


register(Step(Moment.WEIGHTS, _measure_heads, applies=lambda work: isinstance(work.method, RetrievalHeads)))
AttentionInterface.register(RECORDING, _attention)
AttentionMaskInterface.register(RECORDING, _mask)
