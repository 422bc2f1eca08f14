"""The report of the laboratory: what was learned, figures, verdicts on published claims, and all numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctxext.evaluation.report.page import NONE, Heading, Headline, Page, Part, TextTable, provenance_table
from ctxext.laboratory.claims import LabVerdict, verdicts
from ctxext.laboratory.figures import CLASSIC, figures, name_of
from ctxext.laboratory.result import LEAST, LabReading, LabResult, over_seeds
from ctxext.laboratory.subjects import ROPE
from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT
from ctxext.measuring.labels import label_of

LONGER = (1, 2, 4, REACH)
# Perplexity at 3512 words of WikiText-103 after training on 512: Press et al., arXiv:2108.12409.
PUBLISHED = {"alibi": 18.4, "t5_bias": 22.9, ROPE: 35.5, "sinusoidal": 179.0}
EXPLANATIONS = (
    "What is compared is the code that users run: one small Llama, its rotation replaced by ctxext.patch before the "
    "first step, and everything else the same. Recurrent models are those of transformers, at the width at which they "
    "have about as many weights. MiniMax, with its lightning attention alone, stands for RetNet, which transformers "
    "does not have.",
    "Budgets are equal but where the tables say otherwise. All have the same learning rate, which is tuned for none. "
    "Extensions of RoPE are put on at the end and never trained: the first row of RoPE is what they cost inside.",
    "A mean has a standard error over seeds. A difference is taken on the same windows or puzzles, so that the "
    "difficulty of the text falls out, and its error adds the variances over seeds and over windows. Few seeds widen "
    "its interval, whether they agree or not. Every claim is judged at 5 percent by itself: of twenty differences that "
    "are none, one would be called something.",
    'Models of this size and training are far from those of the papers. "Not at this size" says that nothing is shown '
    "here, not that the claim is wrong.",
)


def lab_page(result: LabResult) -> Page:
    """Return who learned order, the figures and the verdicts on published claims; in the details all numbers."""
    judged, has_text = verdicts(result), TEXT in result.tasks
    parts: list[Part] = [Heading("Did it learn order at all?"), learned_table(result)]
    parts += [Heading("Beyond the trained length")] if has_text else []
    parts += figures(result)
    parts += [classic_table(result)] if has_text else []
    parts += [Heading("What was published"), claims_table(judged), Headline(headline(judged))]
    details: list[Part] = [
        Heading("Sources"),
        *(f"{verdict.claim.says}: {verdict.claim.source}." for verdict in judged),
        Heading("All numbers"),
        *([text_table(result)] if has_text else []),
        *(_puzzle_table(result, task) for task in result.puzzles),
        Heading("How to read this"),
        *EXPLANATIONS,
        Heading("Provenance"),
        _provenance(result),
    ]
    count = len({reading.subject for reading in result.readings})
    subject = f"{count} ways to know the order of tokens" if count > 1 else name_of(result.readings[0])
    return Page(f"{subject}, trained short and tested {REACH} times as long", parts, details)


def headline(judged: Sequence[LabVerdict]) -> str:
    """Count the claims that stand."""
    answers = ("reproduced", "not at this size", "contradicted", "not measured")
    counts = [(sum(verdict.answer == answer for verdict in judged), answer) for answer in answers]
    return f"Of {len(judged)} published claims: {', '.join(f'{count} {answer}' for count, answer in counts if count)}."


def learned_table(result: LabResult) -> TextTable:
    """Show whether each subject learned order inside the trained length, without which extrapolation means nothing."""
    rows = []
    for subject in dict.fromkeys(reading.subject for reading in result.readings):
        readings = [result.find(task, subject) for task in result.tasks]
        first = next(reading for reading in readings if reading is not None)
        cells = [NONE if reading is None else _learned(result, reading) for reading in readings]
        rows.append((name_of(first), f"{first.parameters:,}", *cells))
    names = ["shuffled text costs" if task == TEXT else f"{task}, above chance" for task in result.tasks]
    return TextTable(
        header=("", "weights", *names),
        rows=rows,
        caption=f"Inside the trained length: how many nats per byte the loss rises when what was read before is "
        f"shuffled, but for the last byte; and the share of a puzzle's answers that is right, above chance; ± standard "
        f"error over windows or puzzles. In brackets where it is below {LEAST} or not above its error: such a model "
        f"did not learn order, and what it does beyond the window says nothing. Weights are those of the first task.",
    )


def _learned(result: LabResult, reading: LabReading) -> str:
    evidence = str(result.evidence(reading))
    return evidence if result.has_learned(reading) else f"({evidence})"


def classic_table(result: LabResult) -> TextTable:
    """Return the table that textbooks and documents have, together with the published order."""
    wanted = ("sinusoidal", "learned", "t5_bias", ROPE, f"{ROPE} + pi", f"{ROPE} + ntk", f"{ROPE} + yarn", "alibi")
    readings = [reading for name in wanted if (reading := result.find(TEXT, name)) is not None]
    known = [reading for reading in readings if reading.name in PUBLISHED]
    measured = {reading.name: result.at(reading, REACH).mean().item() for reading in known}
    places, published = (
        {name: str(place) for place, name in enumerate(sorted(losses, key=losses.__getitem__), start=1)}
        for losses in (measured, PUBLISHED)
    )
    return _readings_table(
        readings,
        header=("", "steps", *(f"at {multiple}x" for multiple in LONGER), "place here", "published"),
        cells=lambda reading: (
            f"{reading.steps:,}",
            *(_mean(result, reading, multiple) for multiple in LONGER),
            places.get(reading.name, NONE),
            f"{published[reading.name]} ({PUBLISHED[reading.name]:g})" if reading.name in PUBLISHED else NONE,
        ),
        caption=f"Nats per byte of the last doubling before each length, in multiples of the trained {result.trained} "
        f"bytes{_with_error(result)}. Other lengths are other bytes: compare down a column. Published: place at 3512 "
        f"words after training on 512, and the perplexity there (Press et al., arXiv:2108.12409, WikiText-103). "
        f"Learned rows behind the window were never trained, and no perplexity is published for them.",
    )


def claims_table(judged: Sequence[LabVerdict]) -> TextTable:
    """Return a table with a verdict per claim."""
    rows = []
    for verdict in judged:
        claim, gap = verdict.claim, verdict.advantage
        difference = NONE if gap is None else f"{gap} (95 %: ± {gap.margin:.3f})"
        answer = verdict.answer + (f": {verdict.why}" if verdict.why else "")
        rows.append((claim.says, f"{', '.join(claim.tasks)} at {claim.multiple:g}x", difference, answer))
    return TextTable(
        header=("claim", "where", "difference", "verdict"),
        rows=rows,
        styles={verdict.claim.says: "best" for verdict in judged if verdict.answer == "reproduced"},
        prose=True,
        caption="What was published, and whether this size shows it. The difference is in favour of the claim, on the "
        "same windows or puzzles, in nats per byte (text) or as a share of the answers; its error knows seeds and "
        "windows. Reproduced: above its 95 percent interval; contradicted: below; not at this size: within, or one of "
        "the two did not learn order. Against every other the difference is the one to the best of them; each must be "
        "beaten, and a contradiction divides the 5 percent among them.",
    )


def text_table(result: LabResult) -> TextTable:
    """Return the numbers of all readings on text."""

    def cells(reading: LabReading) -> tuple[str, ...]:
        truncated = f"{over_seeds(result.truncated_at(reading, REACH))[0]:.3f}" if reading.truncated else NONE
        means = [_mean(result, reading, multiple) for multiple in LONGER]
        seconds = NONE if reading.extension else f"{reading.seconds:,.0f}"
        return f"{reading.parameters:,}", _steps(reading), seconds, *means, truncated

    return _readings_table(
        result.of(TEXT),
        header=("", "weights", "steps", "s", *(f"at {multiple}x" for multiple in LONGER), f"truncated, {REACH}x"),
        cells=cells,
        caption=f"All on text: nats per byte as above{_with_error(result)}. Steps: a model that adds vectors to the "
        f"embeddings, or has no positions, is trained longer, since that leaves a plateau late; all others take "
        f"{result.settings['text_steps']:,}. Seconds of one processor per seed, the test included. Truncated: the same "
        f"model at {REACH}x, which sees the last {result.trained // 2} to {result.trained} bytes alone; a model that "
        f"is worse than that gives nothing for its length.",
    )


def _puzzle_table(result: LabResult, task: str) -> TextTable:
    def cells(reading: LabReading) -> tuple[str, ...]:
        shares = [result.at(reading, multiple) for multiple in MULTIPLES]
        whole = [f"{100 * (share == 1).double().mean().item():.0f}" for share in shares]
        means = [_mean(result, reading, multiple) for multiple in MULTIPLES]
        return f"{reading.parameters:,}", _steps(reading), *map(", ".join, zip(means, whole, strict=True))

    return _readings_table(
        result.of(task),
        header=("", "weights", "steps", *(f"at {multiple:g}x" for multiple in MULTIPLES)),
        cells=cells,
        caption=f"{task}: {TASKS[task].asks}; trained on up to {TASKS[task].trained} symbols. Percent of the answers "
        f"that are right{_with_error(result)}, and, after the comma, of the puzzles without a mistake. Chance: "
        f"{100 * TASKS[task].chance:.0f}.",
    )


def _readings_table(
    readings: Sequence[LabReading],
    *,
    header: Sequence[str],
    cells: Callable[[LabReading], Sequence[str]],
    caption: str,
) -> TextTable:
    """Return a table with a row per reading. Rows of extensions, which were not trained, are dim."""
    return TextTable(
        header=header,
        rows=[(name_of(reading), *cells(reading)) for reading in readings],
        styles={name_of(reading): "reference" for reading in readings if reading.extension},
        caption=caption,
    )


def _steps(reading: LabReading) -> str:
    return "none more" if reading.extension else f"{reading.steps:,}"


def _mean(result: LabResult, reading: LabReading, multiple: float | int) -> str:
    mean, error = over_seeds(result.at(reading, multiple))
    scale, digits = (1, 3) if reading.task == TEXT else (100, 0)
    return f"{scale * mean:.{digits}f}" + ("" if error is None else f" ± {scale * error:.{digits}f}")


def _with_error(result: LabResult) -> str:
    count = max(len(reading.seeds) for reading in result.readings)
    return f", ± standard error over {count} seeds" if count > 1 else " (one seed, no error)"


def _provenance(result: LabResult) -> TextTable:
    settings = result.settings
    return provenance_table(
        {**result.provenance, "documents": result.documents, "corpus_sha256": result.text_sha256},
        Preset=result.preset,
        Model=f"Llama, {settings['text']['layers']} layers of width {settings['text']['hidden']} on text, "
        f"{settings['puzzle']['layers']} of {settings['puzzle']['hidden']} on puzzles; each on one thread",
        Training=f"AdamW, learning rate {settings['rate']:g} for all, warmup and cosine; text: "
        f"{settings['text_rows']} x {settings['length']} bytes a step; puzzles: about {settings['puzzle_tokens']:,} "
        f"tokens a step; {result.seconds:,.0f} s of one processor",
        Classic_kinds=", ".join(label_of(name) for name in CLASSIC),
    )
