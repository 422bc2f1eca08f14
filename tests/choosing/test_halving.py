"""Successive halving over stored losses: no winner among equals, one where there is one, and every rule by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.choosing.candidates import CandidateReach
from ctxext.choosing.halving import LOOKS, PIECES, WHOLE, Finish, Halving, Sizes, chosen, is_worse, keys_lost
from ctxext.choosing.verdict import HeldOut, judge_held_out
from ctxext.measuring.loss import loss_by_position
from ctxext.measuring.statistics import CHANCE, PairedDifference
from tests._models import byte_model

TRAINED, LENGTH = 512, 1024
SIZES = Sizes(whole=8, finalists=3, texts=6, first=2, held_out=6, keys=3)


@dataclass
class Stored:
    """Losses that are there already: [texts, positions] by name."""

    of: dict[str, Tensor]
    keys_of: dict[str, tuple[float, ...]] = field(default_factory=dict)
    prefix: int = 256
    texts: int = SIZES.first
    read: list[tuple[str, int]] = field(default_factory=list)

    def inside(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.of[name][: self.texts, : self.prefix].flatten() for name in names}

    def whole(self, name: str, text: int, stop: Callable[[Tensor], object]) -> Tensor:
        own, piece = self.of[name][text], LENGTH // PIECES
        for place in range(piece, LENGTH, piece):
            self.read.append((name, piece))
            if stop(own[:place]):
                return own[:place]
        return own

    def keys(self, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        return {name: self.keys_of.get(name, (0.0, 0.0, 0.0)) for name in names}


def halved(stored: Stored, reaches: Mapping[str, CandidateReach], **given: Any) -> Finish:
    halving = Halving(reaches=reaches, losses=stored, sizes=SIZES, trained=TRAINED, length=LENGTH, **given)
    return halving.run()


def held_out(stored: Stored, finish: Finish, usual: str) -> HeldOut:
    last = slice(SIZES.texts, SIZES.texts + SIZES.held_out)
    plain = stored.of[usual][last]
    return judge_held_out(
        {name: list(stored.of[name][last]) for name in {finish.choice, finish.runner_up, usual}},
        choice=finish.choice,
        usual=usual,
        runner_up=finish.runner_up,
        unpatched=list(plain[:, :TRAINED]),
        truncations={f"truncated {TRAINED}": list(plain[:, -128:])},
        documents=[f"text {number}" for number in range(SIZES.held_out)],
        trained=TRAINED,
        same_documents=False,
    )


def equal(names: Sequence[str]) -> dict[str, CandidateReach]:
    """All of one reach."""
    return dict.fromkeys(names, CandidateReach(slow=torch.ones(3, dtype=torch.float64)))


@pytest.fixture(scope="module")
def measured() -> tuple[Tensor, Tensor]:
    """Losses of a model on texts, and how those of two extensions of it differ, which is what luck is made of."""
    model, generator = byte_model(), torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (SIZES.texts + SIZES.held_out, LENGTH + 1), generator=generator)
    found = []
    for name in ("yarn", "ntk"):
        ctxext.patch(model, name, factor=2)
        found.append(loss_by_position(model, ids).double())
        ctxext.unpatch(model)
    return found[0], found[0] - found[1]


def equals(base: Tensor, gap: Tensor, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Candidates that differ by luck alone: blocks of real differences, in any order and with either sign."""
    generator = torch.Generator().manual_seed(seed)
    blocks = (gap - gap.mean()).reshape(-1, 64)
    found = {}
    for name in names:
        drawn = blocks[torch.randint(0, len(blocks), (len(blocks),), generator=generator)]
        signs = torch.randint(0, 2, (len(blocks), 1), generator=generator) * 2 - 1
        found[name] = base + (drawn * signs).reshape(base.shape)
    return found


def quiet_of(measured: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same losses, with a tenth of the luck."""
    return measured[0], measured[1] / 10


def test_a_single_token_beyond_the_window_stops_nobody() -> None:
    """A text is looked at after each eighth: here one of these ends one token beyond the window."""
    losses = {"usual": torch.full((12, LENGTH), 3.0) + torch.rand(12, LENGTH), "worse": torch.full((12, LENGTH), 9.0)}
    stored = Stored(losses, prefix=64)
    for trained in (LENGTH * 5 // 8 - 1, LENGTH // 2 - 1):
        halving = Halving(reaches=equal(list(losses)), losses=stored, sizes=SIZES, trained=trained, length=LENGTH)
        for name in losses:
            halving._read_texts(name, range(2), WHOLE, 1)
        assert len(halving.read["usual"][0]) == LENGTH
        assert len(halving.read["worse"][0]) == trained + 1 + LENGTH // PIECES, "at the next look"


def test_the_best_truncation_is_that_of_documents() -> None:
    """Four texts of one document count as one: a window that suits that document alone is not the best."""
    documents, noise = ["long"] * 4 + list("abcd"), torch.linspace(-0.01, 0.01, 8)

    def reading(long: float, others: float) -> list[Tensor]:
        return [(long if name == "long" else others) + noise for name in documents]

    losses = [torch.cat([torch.ones(16), text]) for text in reading(1.86, 1.96)]
    held = judge_held_out(
        {"choice": losses},
        choice="choice",
        usual="choice",
        runner_up="",
        unpatched=[text[:16] for text in losses],
        truncations={"truncated 8": reading(1.9, 2.0), "truncated 16": reading(2.2, 1.9)},
        documents=documents,
        trained=16,
        same_documents=False,
    )
    assert held.window == 16
    assert held.versus_truncation.mean == pytest.approx((1.86 - 2.2 + 4 * 0.06) / 5, abs=1e-6)


@pytest.mark.nightly
def test_among_equals_nothing_is_declared_better_or_worse_in_95_of_100_choices(measured: tuple[Tensor, Tensor]) -> None:
    """All looks of all rounds and both verdicts at the end together."""
    names = [f"candidate {number}" for number in range(12)]
    quiet, winners, dropped = 0, 0, 0
    for seed in range(100):
        stored = Stored(equals(*measured, names, seed))
        assert all(losses.dtype == torch.float64 for losses in stored.of.values())
        finish = halved(stored, equal(names))
        verdict = held_out(stored, finish, names[0])
        shown = [course for course in finish.courses if course.worse_by is not None]
        winner = "better" in (verdict.verdict(verdict.versus_usual), verdict.verdict(verdict.versus_runner_up))
        winners += winner
        dropped += bool(shown)
        quiet += not shown and not winner
    assert quiet >= 95, (winners, dropped)


def test_copies_are_never_told_apart(measured: tuple[Tensor, Tensor]) -> None:
    names = ["usual", "copy", "another"]
    stored = Stored(dict.fromkeys(names, measured[0]))
    finish = halved(stored, equal(names), runtimes={"usual": 3, "copy": 1, "another": 2}.__getitem__)
    assert (finish.choice, finish.runner_up) == ("usual", "another")
    assert not any(course.worse_by for course in finish.courses)
    verdict = held_out(stored, finish, "usual")
    assert {verdict.verdict(verdict.versus_usual), verdict.verdict(verdict.versus_runner_up)} == {"no difference"}
    assert sum(LOOKS.values()) + CHANCE / 2 <= CHANCE


def test_a_candidate_that_is_better_wins_and_is_declared_to(measured: tuple[Tensor, Tensor]) -> None:
    names = [f"candidate {number}" for number in range(6)]
    stored = Stored(equals(*quiet_of(measured), names, 4))
    stored.of["candidate 4"][:, TRAINED:] -= 0.5
    finish = halved(stored, equal(names))
    verdict = held_out(stored, finish, names[0])
    assert finish.choice == "candidate 4"
    assert verdict.versus_usual is not None
    assert verdict.verdict(verdict.versus_usual) == "better"
    gap = stored.of["candidate 4"][SIZES.texts :, TRAINED:] - stored.of[names[0]][SIZES.texts :, TRAINED:]
    assert verdict.versus_usual.mean == pytest.approx(gap.mean().item(), rel=1e-12)
    assert verdict.versus_usual.over == "documents"


def test_beyond_rescue_a_text_is_not_read_to_its_end(measured: tuple[Tensor, Tensor]) -> None:
    names = ["usual", "hopeless", "late"]
    stored = Stored(equals(*quiet_of(measured), names, 1))
    stored.of["hopeless"][:, TRAINED:] += 1.0
    # Worse at first and better later by more: what is left of the text could not be that much better, as far as known.
    stored.of["late"][:, TRAINED : TRAINED + 128] += 0.05
    finish = halved(stored, equal(names))
    course = finish.course("hopeless")
    assert (course.round, course.by, course.tokens) == ("whole", "usual", TRAINED + 128)
    assert course.dropped == f"stopped after {TRAINED + 128} of 1,024 tokens, beyond rescue"
    assert course.worse_by is not None
    assert course.worse_by.mean > 4 * course.worse_by.standard_error
    assert course.trace[-1] == (128, pytest.approx(course.beyond.mean if course.beyond else 0))
    assert not finish.course("late").dropped.startswith("stopped")


def test_inside_the_window_only_one_that_reaches_as_far_outruns_another(measured: tuple[Tensor, Tensor]) -> None:
    """What reaches less far is better inside for that reason, and proves nothing."""
    names = ["usual", "near", "far", "farther", "remapped"]
    stored = Stored(equals(*quiet_of(measured), names, 2), prefix=512)
    for name, better in (("near", 0.8), ("usual", 0.6), ("farther", 0.3)):
        stored.of[name] -= better
    slow = {"near": 1.0, "usual": 1.0, "far": 0.5, "farther": 0.4}
    reaches = {name: CandidateReach(slow=torch.full((2,), slow[name]) if name in slow else None) for name in names}
    finish = halved(stored, reaches)
    far, usual = finish.course("far"), finish.course("usual")
    assert (far.round, far.by) == ("inside", "farther")
    assert "reaches as far" in far.dropped
    # The published one is beaten by its equal in reach, and reads on all the same: others are held against it.
    assert (usual.by, usual.inside) == ("near", None)
    assert "usual" in {name for name, _ in stored.read}
    assert finish.course("remapped").round in ("whole", "more")
    assert finish.course("farther").by == "usual"
    assert "more damage" in finish.course("farther").dropped


def test_one_that_falls_apart_at_the_end_is_not_chosen(measured: tuple[Tensor, Tensor]) -> None:
    """Its mean is the best all the same: it stretches too little, and only the last distances tell."""
    names = ["usual", "steady", "short", "shorter"]
    stored = Stored(equals(*quiet_of(measured), names, 5))
    for name, better, end in (("steady", 0.02, 0.0), ("short", 0.2, 0.6), ("shorter", 0.25, 0.6)):
        stored.of[name][:, TRAINED:] -= better
        stored.of[name][:, -LENGTH // 32 :] += end
    finish = halved(stored, equal(names))
    assert finish.choice == "steady"
    short = finish.course("short")
    assert short.beyond is not None
    assert short.end is not None
    assert short.beyond.mean < -0.03
    gap = (stored.of["short"] - stored.of["usual"])[: SIZES.texts, -LENGTH // 32 :]
    assert short.end.mean == pytest.approx(gap.mean().item(), rel=1e-9)
    # With nobody left who holds out, it is the published one; texts that were never read say the same.
    names = ["usual", "short", "shorter"]
    assert halved(stored, equal(names)).choice == "usual"
    verdict = held_out(stored, Finish(choice="short", runner_up="usual", finalists=("short",), courses=()), "usual")
    assert verdict.verdict(verdict.versus_usual) == "better"
    assert verdict.verdict(verdict.end_versus_usual) == "worse"


def difference(mean: float, standard_error: float, units: int = 1000) -> PairedDifference:
    return PairedDifference(mean, standard_error, 64 * units, units)


def test_what_counts_as_worse() -> None:
    assert is_worse(difference(0.02, 0.01), CHANCE, 1)
    assert not is_worse(difference(0.02, 0.01), CHANCE, 2)
    assert not is_worse(difference(-0.02, 0.001), CHANCE, 1)
    assert not is_worse(difference(0.0, 0.0), CHANCE, 1)
    assert not is_worse(difference(0.035, 0.01), CHANCE, 1, least=4.0)


def test_a_key_is_lost_that_another_reads() -> None:
    found = keys_lost({"a": (0.1, 0.2, 5.0), "b": (0.1, 2.0, 6.0), "c": (0.9, 0.3, 4.0)})
    assert found == {"a": 0, "b": 1, "c": 0}  # nobody reads the last one, and 0.9 is less than a nat from 0.1
    assert math.log(2) < 0.9


def test_the_order_of_finalists() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4096, generator=generator, dtype=torch.float64)

    def near(mean: float) -> list[Tensor]:
        noise = torch.randn(4096, generator=generator, dtype=torch.float64)
        return [base + 0.1 * (noise - noise.mean()) + mean]

    beyond = {
        "portable": near(0.004),
        "best": near(0.0),
        "worse": near(0.1),
        "forgets": near(-0.1),
        "harms": near(-0.2),
    }
    keys = dict.fromkeys(beyond, (0.1, 0.1)) | {"forgets": (0.1, 4.0)}
    readers = dict.fromkeys(beyond, 1) | {"portable": 3}
    order = chosen(beyond, keys, {"harms"}, readers.__getitem__, chance=0.01)
    assert order == ["portable", "best", "worse", "forgets", "harms"]
    order = chosen(beyond, keys, (), lambda name: 1, chance=0.01)
    assert order[:2] == ["harms", "best"]
