"""Claims of papers, and whether this laboratory shows them: reproduced, not at this size, or contradicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ctxext.laboratory.result import BySeed, LabReading, LabResult, paired
from ctxext.laboratory.tasks import TEXT
from ctxext.measuring.labels import label_of
from ctxext.measuring.statistics import PairedDifference

REPRODUCED, TOO_SMALL, CONTRADICTED, UNKNOWN = "reproduced", "not at this size", "contradicted", "not measured"
ITSELF_TRUNCATED = "itself, truncated"
EVERY_OTHER = "every other attention encoding"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper, as a comparison of two readings.

    Args:
        worse: name of the other reading; ``ITSELF_TRUNCATED`` for the same model that sees the last bytes alone,
            ``EVERY_OTHER`` for every encoding that is not related to the better one (their names begin differently).
    """

    says: str
    source: str
    better: str
    worse: str
    tasks: tuple[str, ...] = (TEXT,)
    multiple: float | int = 8


PRESS = "Press et al., arXiv:2108.12409: WikiText-103, trained on 512, perplexity at 3512"
REWRITING = ("copy", "reverse", "order")
KAZEMNEJAD = "Kazemnejad et al., arXiv:2305.19466: ten tasks, trained on 20, mean reciprocal rank at 40"
CLAIMS = (
    Claim(
        says="Far beyond the window, ALiBi predicts better than T5's buckets",
        source=f"{PRESS} 18.4 and 22.9",
        better="alibi",
        worse="t5_bias",
    ),
    Claim(
        says="Far beyond the window, T5's buckets predict better than RoPE",
        source=f"{PRESS} 22.9 and 35.5",
        better="t5_bias",
        worse="rope",
    ),
    Claim(
        says="Sinusoids break right behind the window: dropping the old text is better",
        source=f"{PRESS} 179.0, inside the window 20.1",
        better=ITSELF_TRUNCATED,
        worse="sinusoidal",
        multiple=2,
    ),
    Claim(
        says="RoPE breaks right behind the window too",
        source=f"{PRESS} 35.5; Chen et al., arXiv:2306.15595",
        better=ITSELF_TRUNCATED,
        worse="rope",
        multiple=2,
    ),
    Claim(
        says="Another base rescues RoPE without training (NTK)",
        source="bloc97 and others, 2023; Peng et al., arXiv:2309.00071",
        better="rope + ntk",
        worse="rope",
        multiple=4,
    ),
    Claim(
        says="Interpolation rescues RoPE (PI), where the paper trains a little more",
        source="Chen et al., arXiv:2306.15595",
        better="rope + pi",
        worse="rope",
    ),
    Claim(
        says="Without training, YaRN reads farther than interpolation",
        source="Peng et al., arXiv:2309.00071",
        better="rope + yarn",
        worse="rope + pi",
    ),
    Claim(
        says="FIRE predicts long text better than KERPLE",
        source="Li et al., arXiv:2310.04418: C4",
        better="fire",
        worse="kerple",
    ),
    Claim(
        says="KERPLE predicts long text better than T5's buckets",
        source="Chi et al., arXiv:2205.09921; Li et al., arXiv:2310.04418",
        better="kerple",
        worse="t5_bias",
    ),
    Claim(
        says="PaTH alone keeps a state over four times the length: parity",
        source="Yang et al., arXiv:2505.16381: state tracking in few layers",
        better="path",
        worse=EVERY_OTHER,
        tasks=("parity",),
        multiple=4,
    ),
    Claim(
        says="Without positions, copying and sorting go farther than with RoPE",
        source=f"{KAZEMNEJAD}, 0.69 and 0.33",
        better="nope",
        worse="rope",
        tasks=REWRITING,
        multiple=2,
    ),
    Claim(
        says="With T5's buckets, copying and sorting go farther than with ALiBi",
        source=f"{KAZEMNEJAD}, 0.55 and 0.50",
        better="t5_bias",
        worse="alibi",
        tasks=REWRITING,
        multiple=2,
    ),
)


@dataclass(frozen=True, kw_only=True)
class LabVerdict:
    """Answer of the laboratory to a claim.

    The advantage of the better one is in nats per byte or a share of the answers; below zero the claim is wrong here.
    Of several rivals it is the one over the best of them, ``baselines`` being their number.
    """

    claim: Claim
    answer: str
    advantage: PairedDifference | None = None
    why: str = ""


def judge(advantages: Sequence[PairedDifference]) -> str:
    """Judge a claim by the differences to every rival; each answer but the middle one errs in 2.5 percent.

    A claim is reproduced where every rival is beaten, which needs no correction. It is contradicted where some rival is
    better, which among many happens by luck: the 5 percent, to both sides, are divided among them (Bonferroni).

    Source: Berger, Technometrics 24 (1982), 295-300, for what holds against every rival.
    """
    if all(gap.mean > gap.margin for gap in advantages):
        return REPRODUCED
    rivals = len(advantages)
    is_beaten = any(gap.mean < -gap.errors_needed(rivals) * gap.standard_error for gap in advantages)
    return CONTRADICTED if is_beaten else TOO_SMALL


def verdicts(result: LabResult, claims: Sequence[Claim] = CLAIMS) -> list[LabVerdict]:
    """Judge every claim about what was measured, and say of the others that it was not."""
    return [_verdict(result, claim) for claim in claims]


def _verdict(result: LabResult, claim: Claim) -> LabVerdict:
    def side(name: str, task: str) -> LabReading | None:
        return result.find(task, claim.worse if name == ITSELF_TRUNCATED else name)

    tasks = [task for task in claim.tasks if task in result.tasks]
    advantages, readings = [], []
    for rival in _rivals(result, claim):
        sides = [(side(claim.better, task), side(rival, task)) for task in tasks]
        pairs = [(better, worse) for better, worse in sides if better is not None and worse is not None]
        if pairs:
            advantages.append(paired(torch.stack([_advantage(result, claim, *pair) for pair in pairs]).mean(0)))
            readings += [reading for pair in pairs for reading in pair]
    if not advantages:
        names = [name for name in (claim.better, claim.worse) if name != ITSELF_TRUNCATED]
        missing = [name for name in names if all(side(name, task) is None for task in tasks)]
        lacking = " and ".join(missing or names) if tasks else ", ".join(claim.tasks)
        return LabVerdict(claim=claim, answer=UNKNOWN, why=f"without {lacking}")
    closest = replace(min(advantages, key=lambda gap: gap.mean), baselines=len(advantages))
    # That others than the better one fail at a puzzle may be the claim itself.
    judged = [reading for reading in readings if claim.worse != EVERY_OTHER or reading.name == claim.better]
    weak = dict.fromkeys(reading.subject for reading in judged if not result.has_learned(reading))
    if weak:
        why = f"{' and '.join(map(label_of, weak))} did not learn order inside the window"
        return LabVerdict(claim=claim, answer=TOO_SMALL, advantage=closest, why=why)
    why = f"of {', '.join(tasks)} alone" if len(tasks) < len(claim.tasks) else ""
    return LabVerdict(claim=claim, answer=judge(advantages), advantage=closest, why=why)


def _rivals(result: LabResult, claim: Claim) -> list[str]:
    """Return the names of the readings that the claim says to be worse."""
    if claim.worse != EVERY_OTHER:
        return [claim.worse]
    others = [
        reading.name
        for task in claim.tasks
        for reading in result.of(task)
        if reading.kind != "recurrent" and not reading.extension and not reading.name.startswith(claim.better)
    ]
    return list(dict.fromkeys(others))


def _advantage(result: LabResult, claim: Claim, better: LabReading, worse: LabReading) -> BySeed:
    """Compute by how much the better one is better, on the same windows or puzzles, seed by seed."""
    first, second = result.at(better, claim.multiple), result.at(worse, claim.multiple)
    if claim.better == ITSELF_TRUNCATED:
        first = result.truncated_at(better, claim.multiple)
    return second - first if better.task == TEXT else first - second
