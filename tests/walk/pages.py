"""The pages that are made of a walk: counts by kind of positions; tables of every type and of every reason."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich.table import Table

from tests.walk.kinds import GROUPS, group_of, groups_for

Line = dict[str, Any]

HEADER = """\
# Every model type

Made by `python -m tests.walk.run --markdown docs/evidence/architectures.md --coverage
docs/evidence/coverage.md` on {date}, {machine}, torch {torch} (CPU), transformers {transformers}: every type that the
installed transformers knows as a language model (causal, masked, sequence-to-sequence, speech-to-text), as an encoder
of text, or as a model of pictures whose text is of no type that is walked alone, at a tiny size with random weights. A
type that is a decoder and an encoder-decoder is walked as both.

{kinds}

A type is **right** where some method is right on it and none is wrong. It is **refused** where `patch` refuses every
method and says why. It is **not checked** where it does not build here, or cannot be run on tokens alone.

## What was checked

Of each method on each type, through the public verbs:

* it is patched in place, and the logits beyond the trained length change;
* a change of a later token reaches earlier ones exactly if it did before;
* saved and reloaded by stock transformers in a process that never imports ctxext, the difference is exactly 0, or
  loading is a hard error where there is no stock form;
* it is restored by `ctxext.load`, and undone bit for bit;
* texts of the trained length are read as before, bit for bit, where `describe` promises that;
* which layers rotate: by putting what is not a number into cos and sin, against what ctxext sees.

Of methods for another kind of positions one of each group is tried, and must be refused without a trace. Encoders of
sound are replaced by random states, and models of pictures read text alone. Not checked: images, audio, generation, and
whether an extension is any good.

Groups of methods: {groups}.

## Refused or not checked, and why

Every reason in a sentence, and its model types ([CSV](architectures-refused.csv)):

<!-- architectures-refused.csv -->
<!-- /architectures-refused.csv -->

## Every type

{summary}. Numbers in brackets are [reasons](architectures-reasons.csv) why others of a group are not right.

Every type ([CSV](architectures.csv)):

<!-- architectures.csv -->
<!-- /architectures.csv -->
"""

MEANING = {
    "frequencies": "**frequencies** (of rotations and sinusoids: {})",
    "remap": "**remap** (other distances inside attention: {})",
    "slopes": "**slopes** (of ALiBi, or ALiBi in the place of rotation: {})",
    "rows": "**rows** (of a learned table: {})",
    "buckets": "**buckets** (of T5: {})",
    "encodings": "**encodings** (of the laboratory, in the place of rotation: {})",
}

COVERAGE = """\
transformers {transformers}: **{right} model types right, {refused} refused by a named reason, {wrong} wrong**{more}, by
the checks that [architectures.md](architectures.md) lists with every type: causality, stock reload, unpatching, which
layers rotate ({checks_right} pairs of method and model type right).
"""

SHOWN = {"unchecked": "not checked"}
OUTCOMES = ("right", "refused", "unchecked", "wrong")
COLUMNS = ("model type", "read as", "kind of positions", "outcome", "methods that are right", "layers that rotate")


@dataclass
class Reasons:
    """Each reason once, in the order of its first use."""

    numbers: dict[str, int] = field(default_factory=dict)
    types: dict[str, list[str]] = field(default_factory=dict)

    def number(self, detail: str, model_type: str) -> int:
        """The number of a reason, which is kept without what it says of one type alone."""
        said = general(detail, model_type)
        types = self.types.setdefault(said, [])
        if model_type not in types:
            types.append(model_type)
        return self.numbers.setdefault(said, len(self.numbers) + 1)


# What reasons say of one type alone, and what they say of any.
_GENERAL = (
    (r"^\w+Error: ", ""),
    (r" Known families:.*", ""),
    (r"\b[Mm]ethod '[\w.]+'", "this method"),
    (r"\b[A-Z]\w*(?:For[A-Z]\w+|LMHeadModel|Model)\b(?: \([\w.-]+\))?", "This model"),
    (r"\b[A-Z]\w*RotaryEmbedding\b", "its rotary module"),
    (r"\b[A-Z][A-Za-z0-9]+Config\b", "its config"),
    (r"\b([Tt]his) [\w-]+_text\b", r"\1 model"),
)


def general(detail: str, model_type: str) -> str:
    """A reason as it would be said of any model."""
    said = detail.replace("\n", " ")
    for pattern, general_form in _GENERAL:
        said = re.sub(pattern, general_form, said)
    said = re.sub(rf"\b{re.escape(model_type)}\b", "model", said)
    return said if "_" in said.partition(" ")[0] else said[:1].upper() + said[1:]


def first_sentence(said: str) -> str:
    """A reason in one sentence."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", said, maxsplit=1)[0]


def counts(lines: list[Line]) -> dict[str, Any]:
    """What the results say in numbers."""
    types = Counter(line["outcome"] for line in lines)
    checks = Counter(finding["outcome"] for line in lines for finding in line["findings"])
    unchecked = types["unchecked"]
    return {
        **{name: types[name] for name in OUTCOMES},
        **{f"checks_{name}": checks[name] for name in OUTCOMES},
        "more": f", {unchecked} not checked" if unchecked else "",
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
    }


def summarise(lines: list[Line]) -> str:
    """The line that counts."""
    return (
        "{right} right, {refused} refused by reason, {wrong} wrong{more} ({checks_right} checks of a method on a model "
        "right, {checks_refused} refused, {checks_wrong} wrong, {checks_unchecked} not to be run; "
        "transformers {transformers})"
    ).format(**counts(lines))


def kinds_table(lines: list[Line]) -> str:
    """Counts by kind of positions."""
    order = Counter(line["positions"] for line in lines)
    rows = [(kind, [line for line in lines if line["positions"] == kind]) for kind, _ in order.most_common()]
    rows.append(("**all**", lines))
    cells = []
    for kind, some in rows:
        by = Counter(line["outcome"] for line in some)
        cells.append([kind, *(str(by[name]) for name in OUTCOMES)])
    return markdown(["kind of positions", *(SHOWN.get(name, name) for name in OUTCOMES)], cells)


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    names = list(head)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (names, *rows)]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:]])


def natives(lines: list[Line]) -> dict[str, list[str]]:
    """For each kind of positions the groups of methods that are for it, or were right on some type of it."""
    found: dict[str, list[str]] = {}
    for line in lines:
        groups = {group_of(_method(one), line["positions"]) for one in line["findings"] if one["outcome"] == "right"}
        seen = found.setdefault(line["positions"], list(groups_for(line["positions"])))
        seen += [group for group in GROUPS if group in groups and group not in seen]
    return found


def _method(finding: dict[str, Any]) -> str:
    return str(finding["method"]).partition(" (")[0]


def cells_of(line: Line, groups: list[str], reasons: Reasons) -> tuple[str, ...]:
    """A type in a line; reasons are footnotes."""
    said = []
    findings = [one for one in line["findings"] if one["method"] != "none"]
    for group in groups if line["outcome"] != "refused" else ():
        some = [one for one in findings if group_of(_method(one), line["positions"]) == group]
        if not some:
            continue
        right = [one for one in some if one["outcome"] == "right"]
        notes = [reasons.number(one["detail"], line["model_type"]) for one in some if one["outcome"] != "right"]
        marks = f" ({', '.join(map(str, dict.fromkeys(notes)))})" if notes else ""
        said.append(f"{group} {len(right)}/{len(some)}{marks}")
    if not said and line["outcome"] in ("refused", "unchecked"):
        details = [one["detail"] for one in natural(line, groups)] or [line["reason"]]
        numbers = dict.fromkeys(reasons.number(detail, line["model_type"]) for detail in details)
        said = [f"({', '.join(map(str, numbers))})"]
    if line["outcome"] == "wrong":
        said.append(line["reason"])
    shown = SHOWN.get(line["outcome"], line["outcome"])
    return line["model_type"], line["kind"], line["positions"], shown, ", ".join(said), line["layers"]


def natural(line: Line, groups: list[str]) -> list[dict[str, Any]]:
    """The refusals of a type that say most of it: those of methods that are for its kind of positions."""
    refused = [one for one in line["findings"] if one["method"] != "none"]
    own = [one for one in refused if group_of(_method(one), line["positions"]) in groups[:1]]
    return own or refused


def pages(lines: list[Line]) -> dict[str, str]:
    """The files docs/evidence/architectures*, by what follows that word in their names."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    date, own = datetime.date.today().isoformat(), natives(lines)
    named = {group: sorted(_names(lines, group)) for group in GROUPS}
    groups = "; ".join(MEANING[group].format(", ".join(names)) for group, names in named.items() if names)
    text = HEADER.format(
        date=date, machine=machine, kinds=kinds_table(lines), groups=groups, summary=summarise(lines), **counts(lines)
    )
    reasons = Reasons()
    rows = [cells_of(line, own[line["positions"]], reasons) for line in lines]
    notes = [(str(number), said, _shown(reasons.types[said])) for said, number in reasons.numbers.items()]
    return {
        ".md": text,
        ".csv": csv_text((COLUMNS, *rows)),
        "-reasons.csv": csv_text((("number", "reason", "model types"), *notes)),
        "-refused.csv": csv_text((("outcome", "reason", "model types"), *_refused(lines, own))),
    }


def csv_text(rows: Iterable[Iterable[str]]) -> str:
    """A table as a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _refused(lines: list[Line], own: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """The types that are refused or not checked, by reason in one sentence."""
    rows: list[tuple[str, str, str]] = []
    for outcome in ("refused", "unchecked"):
        types: dict[str, list[str]] = {}
        for line in (line for line in lines if line["outcome"] == outcome):
            details = [one["detail"] for one in natural(line, own[line["positions"]])] or [line["reason"]]
            types.setdefault(first_sentence(general(details[0], line["model_type"])), []).append(line["model_type"])
        ordered = sorted(types.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        rows += [(SHOWN.get(outcome, outcome), said, ", ".join(names)) for said, names in ordered]
    return rows


def _names(lines: list[Line], group: str) -> set[str]:
    findings = [(one, line["positions"]) for line in lines for one in line["findings"] if one["outcome"] == "right"]
    return {_method(one) for one, kind in findings if group_of(_method(one), kind) == group}


def _shown(types: list[str]) -> str:
    more = f" and {len(types) - 3} more" if len(types) > 4 else ""
    return ", ".join(types[: 3 if more else 4]) + more


def coverage(lines: list[Line]) -> str:
    """docs/evidence/coverage.md, which docs/guides/models.md shows."""
    said = textwrap.fill(COVERAGE.format(**counts(lines)), 120, break_on_hyphens=False)
    return f"{said}\n"


def table(lines: list[Line]) -> Table:
    """What the terminal shows."""
    own, shown = natives(lines), Table(*COLUMNS, "reason", title="methods on model types")
    colours = {"right": "green", "refused": "yellow", "wrong": "red", "not checked": "magenta"}
    for line in lines:
        name, kind, positions, outcome, said, layers = cells_of(line, own[line["positions"]], Reasons())
        said = re.sub(r" ?\([\d, ]+\)", "", said)
        reason = first_sentence(line["reason"]) if line["outcome"] != "right" else ""
        shown.add_row(
            name, kind, positions, f"[{colours[outcome]}]{outcome}[/]", said, layers, reason.replace("[", r"\[")
        )
    return shown
