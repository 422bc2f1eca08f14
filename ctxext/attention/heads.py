"""Find the heads that retrieve: score each key-value group by its attention to where a text said the same before.

A text says something twice, and the second time its tokens are known from the first. Two kinds of heads find them: some
look from a token at its twin, the same token earlier; others look at the token after the twin, which is the one to
copy, and rest on what the former have found. The score of a head is its attention to both, a mean over tokens.

Heads that look at the token to copy do not suffice alone: where the best fifth of SmolLM2's groups saw all of 2,048
tokens and the others the last 256, the second half of six texts lost 0.24 nats a token with them, 0.10 with both kinds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ctxext.attention.recorder import Recorder, recording
from ctxext.attention.repetition import Repetition, inductions, probe_texts
from ctxext.caches.digest import UNKNOWN, is_hooked, is_shared_out, sample
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, shown
from ctxext.files import JsonObject, digest, parse_json, write_json
from ctxext.methods.parameters import is_number, require
from ctxext.methods.retrieval_heads import SHARE, RetrievalHeads
from ctxext.mistakes import text_tokenizer
from ctxext.spec import ExtensionArguments
from ctxext.version import __version__

SEEDS = (0, 1, 2)
ByProbe = dict[str, tuple[float, ...]]


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
    probes: ByProbe
    spread: ByProbe = field(default_factory=dict)
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
            if not (is_number(share) and 0 < share <= 1):
                raise InvalidParameterError(f"share must be above 0 and at most 1, found {shown(share)}.")
            # A share of 0.2 of 90 groups is 18, although 0.2 * 90 may come out a little above.
            return tuple(sorted(ranked[: max(1, math.ceil(share * len(ranked) - 1e-9))]))
        if threshold is None or not (is_number(threshold) and 0 <= threshold <= 1):
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


def induction_scores(subject: Subject, *, seeds: Sequence[int], lifted: bool = False) -> HeadScores:
    """Score the groups of a model that is not patched by induction: random tokens, then the same tokens again.

    Windows that the text fits into hide nothing of it, and do not count where they are to be ``lifted``.

    Raises:
        IncompatibleError: the model's attention cannot be recorded, or it reads too few tokens.
        PatchStateError: the model is patched.
    """
    with recording(subject, lifted=lifted) as recorder:
        return _scored(recorder, {"induction": inductions(subject, seeds)}, seeds)


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
    if text is not None:
        require(isinstance(text, str), "text", text, "a str, such as pathlib.Path(FILE).read_text()")
        tokenizer = text_tokenizer(tokenizer)
    subject = Subject.of(model)
    with recording(subject) as recorder:
        return _scored(recorder, probe_texts(subject, tokenizer, text, seeds), seeds, text)


def require_scorable(model: Any, tokenizer: Any, *, text: str | None, seeds: Sequence[int]) -> None:
    """Raise what ``heads`` raises before it reads anything; the weights of ``model`` may be missing."""
    subject = Subject.of(model)
    with recording(subject):
        probe_texts(subject, tokenizer, text, seeds)


def with_heads(subject: Subject, method: RetrievalHeads, *, lifted: bool) -> RetrievalHeads:
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
        # A hook of accelerate brings such weights from the disk, layer by layer.
        if any(weight.is_meta for weight in subject.model.parameters()) and not is_hooked(subject.model):
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
    recorder: Recorder, texts: dict[str, list[Repetition]], seeds: Sequence[int], text: str | None = None
) -> HeadScores:
    """Read the texts of each probe, and return the mean and the spread of the scores over a probe's texts."""
    probes: ByProbe = {}
    spread: ByProbe = {}
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


def _measure_heads(work: Work) -> None:
    """Complete a method that leaves open which heads read far."""
    assert isinstance(work.method, RetrievalHeads)
    lifted = isinstance(given := work.arguments, ExtensionArguments) and given.sliding_window == "lift"
    work.method = with_heads(work.subject, work.method, lifted=lifted)


register(Step(Moment.WEIGHTS, _measure_heads, applies=lambda work: isinstance(work.method, RetrievalHeads)))
