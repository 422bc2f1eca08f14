"""What a comparison says in words; each sentence depends on what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from ctxext.evaluation.comparison.result import NO, YES, ComparisonResult, Row, Series, Verdict
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.truncation import UNPATCHED, windows_of

# Beyond this ratio to its own window a perplexity counts as broken.
BROKEN = 2.0


def headline(result: ComparisonResult) -> str:
    """The answer at the greatest length, in a sentence."""
    verdict = result.verdicts[-1]
    row = result.row(verdict.best)
    window, length = tokens_label(verdict.window), tokens_label(verdict.length)
    name = f"the checkpoint {row.reading.label}" if row.reading.is_reference else row.reading.label
    kind = "extension" if row.reading.is_reference else "zero-shot extension"
    best = f"At {length} tokens, the {f'best {kind} is {name}' if verdict.candidates > 1 else f'{kind} is {name}'}"
    difference = verdict.versus_truncation
    gap = f"{abs(difference.mean):.3f} ± {difference.standard_error:.3f} nats per token"
    where = difference.scope(len(result.provenance["documents"]))
    truncation = f"the best truncation, seeing only the last {window} tokens"
    if verdict.beats == YES:
        return f"{best}. It uses its window{where}: it predicts better than {truncation}, by {gap}."
    if verdict.beats == NO:
        return f"{best}. It predicts worse{where} than {truncation}, by {gap}."
    return (
        f"{best}. Whether it predicts better or worse than {truncation}, {_these_texts(result)} cannot show: "
        f"{difference} nats per token."
    )


def windows_in_words(trained_length: int, last: str = "and") -> str:
    """``2K, 4K, 6K and 8K``: the truncations of which the best is the baseline."""
    *first, longest = map(tokens_label, windows_of(trained_length))
    return f"{', '.join(first)} {last} {longest}" if first else longest


def verdict_line(result: ComparisonResult, verdict: Verdict) -> str:
    """The verdict at one length, as short as it gets."""
    row = result.row(verdict.best)
    kind = "best" if row.reading.is_reference else "best zero-shot"
    where = verdict.versus_truncation.scope(len(result.provenance["documents"]))
    told = {YES: f"yes{where}, by", NO: f"no{where}, by"}.get(
        verdict.beats, f"no difference that {_these_texts(result)} can show,"
    )
    return (
        f"{tokens_label(verdict.length)}: {kind}: {row.reading.label}; beats the best truncation (the last "
        f"{tokens_label(verdict.window)}): {told} {verdict.versus_truncation} nats"
    )


def sentences(result: ComparisonResult) -> list[str]:
    """What else to know, in the order of importance."""
    verdict = result.verdicts[-1]
    best = result.row(verdict.best)
    lines = []
    if verdict.as_good:
        names = [result.row(name).reading.label for name in verdict.as_good]
        lines.append(f"As good, as far as {_these_texts(result)} can show: {all_of(names)}.")
    lines += _unneeded_sentence(result, verdict)
    lines.append(_short_context_sentence(result, best))
    if any(row.passkeys for row in result.rows):
        lines += _passkey_sentences(result, best)
    if not result.row(UNPATCHED).reading.is_candidate:
        lines.append(unpatched_sentence(result.panels[-1].series[0], result.trained_length))
    lines += [f"Not measured: {refusal.label}. {refusal.reason}" for refusal in result.refusals]
    return lines


def unpatched_sentence(series: Series, trained_length: int) -> str:
    """Whether the unpatched model breaks beyond its window.

    Args:
        series: of the unpatched model.
        trained_length: tokens.
    """
    inside, *_, last = series.buckets
    ratio = last.perplexity / inside.perplexity
    start, stop = tokens_label(last.start), tokens_label(last.stop)
    numbers = (
        f"from {inside.perplexity:.3g} inside its trained {tokens_label(trained_length)} tokens to "
        f"{last.perplexity:.3g} at {start}-{stop}"
    )
    if ratio < BROKEN:
        return f"Unpatched, the perplexity goes {numbers}: this model does not break at that length."
    return f"Unpatched, the perplexity goes {numbers}, {ratio:.3g} times as much: it breaks beyond its window."


def hidden_keys(row: Row) -> tuple[int, int]:
    """Passkeys found, and asked for, where truncation cuts the key off."""
    hidden = [score for score in row.passkeys if score.hidden]
    return sum(score.found for score in hidden), sum(score.trials for score in hidden)


def all_of(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capitalised(text: str) -> str:
    """The first letter large, all others as they are."""
    return text[:1].upper() + text[1:]


def _these_texts(result: ComparisonResult) -> str:
    return "this text" if len(result.provenance["documents"]) == 1 else "these texts"


def _unneeded_sentence(result: ComparisonResult, verdict: Verdict) -> list[str]:
    """Said where the unpatched model reads the length no worse than the best extension."""
    plain = result.row(UNPATCHED)
    score = plain.at(verdict.length)
    gap = score.versus_truncation if score else None
    if plain.reading.is_candidate or gap is None or gap.mean > verdict.versus_truncation.mean:
        return []
    length = tokens_label(verdict.length)
    return [
        f"The unpatched model reads {length} tokens no worse ({gap} against the best truncation): it needs no "
        f"extension there."
    ]


def _short_context_sentence(result: ComparisonResult, best: Row) -> str:
    if best.reading.is_reference:
        return f"Inside the trained window, its perplexity is {best.inside.perplexity:.4g}."
    gap = best.short_context
    free = [row.reading for row in result.candidates if row.short_context.mean == 0 and row is not best]
    labels = ["the dynamic methods"] if len(free) > 3 and all(r.dynamic for r in free) else [r.label for r in free]
    cost = (
        "changes nothing inside the trained window"
        if gap.mean == 0
        else f"{'costs' if gap.mean > 0 else 'gains'} {abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token "
        f"inside the trained window"
    )
    tail = f"; {all_of(labels)} change{'s' if len(free) == 1 else ''} nothing there" if free and gap.mean else ""
    return capitalised(f"{best.reading.label} {cost}{tail}.")


def _passkey_sentences(result: ComparisonResult, best: Row) -> list[str]:
    found = {row.reading.name: hidden_keys(row) for row in result.rows if row.passkeys}
    asked = max(trials for _, trials in found.values())
    if not asked:
        window = tokens_label(result.trained_length)
        return [f"Every passkey lies in the last {window} tokens, which truncation reads, too; ask for smaller depths."]
    competing = [row for row in result.candidates if found[row.reading.name][1] == asked]
    most = max((found[row.reading.name][0] for row in competing), default=0)
    winners = [row.reading.label for row in competing if found[row.reading.name][0] == most]
    plain = result.row(UNPATCHED).reading
    told = [f"{plain.label} {found[plain.name][0]}"] if plain not in [row.reading for row in competing] else []
    told += [f"{best.reading.label} {found[best.reading.name][0]}"] if best.reading.label not in winners else []
    who = all_of(winners) if len(winners) <= 4 else f"{len(winners)} of {len(competing)} extensions"
    who = "no extension" if not most else who
    also = f" ({', '.join(told)})" if told else ""
    verb = "finds" if len(winners) == 1 or not most else "find"
    keys = f"{asked} passkey{'s' if asked > 1 else ''}"
    return [f"Of {keys} that truncation cuts off, {who} {verb} {most or 'any'}{also}."]
