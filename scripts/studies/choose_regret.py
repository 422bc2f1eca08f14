"""How far a choice is from the best of its own candidates, on other texts, and at what part of their cost.

    python scripts/studies/choose_regret.py CHECKPOINT -t choosing.parquet --judge other.parquet --target 512 -o regret

`ctxext choose` drops most candidates after a look. Here all of them read the texts of --judge as well, whole: what the
choice never read. The regret is the loss of its choice beyond the window minus that of the best candidate, and
of the best one that damages the window no more than YaRN as published does, which a choice may not either. The best of
many is lucky on the texts that it is the best on, so the regret is a little smaller than it looks.

Everything finished is kept in the output folder: run the same command again after an interruption, or with --stock.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor
from typer import Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.choosing.choose import ChoiceSettings, PlannedChoice
from ctxext.choosing.verdict import Choice
from ctxext.cli.eval.common import Session
from ctxext.cli.options import Seed, SourceOptions, TextOptions, grouped, run_script
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.loss import Window
from ctxext.measuring.readings import Reader, Reading
from ctxext.measuring.statistics import PairedDifference, grouped_difference, mean_loss
from ctxext.measuring.survey import LossJob, Survey
from ctxext.texts.corpus import Corpus, TokenisedDocument, corpus_of
from ctxext.texts.documents import read_documents
from scripts.bench import machine, markdown_table


def stretches(document: TokenisedDocument, length: int) -> list[Window]:
    """All parts of a document that have the length, and a token more to be predicted."""
    step = length + 1 - document.prefix
    begins = range(document.prefix, document.tokens - step + 1, step)
    return [Window(begin, begin + step, length, document.prefix) for begin in begins]


@dataclass(frozen=True, eq=False)
class Judged:
    """A choice and what all its candidates lose on the texts of the judge.

    Args:
        planned: how it was made.
        choice: what came of it.
        losses: of each candidate, by its name: a tensor [stretches, positions] for every document.
    """

    planned: PlannedChoice
    choice: Choice
    losses: dict[str, list[Tensor]]

    def beyond(self, name: str) -> float:
        """Mean loss beyond the window."""
        return mean_loss([one[:, self.planned.trained :].flatten() for one in self.losses[name]])

    def inside(self, name: str) -> float:
        """Mean loss inside the window."""
        return mean_loss([one[:, : self.planned.trained].flatten() for one in self.losses[name]])

    def best(self, *, harmless: bool) -> str:
        """The candidate with the lowest loss beyond the window."""
        usual = self.inside(self.choice.usual)
        names = [name for name in self.losses if not harmless or self.inside(name) <= usual]
        return min(names, key=self.beyond)

    def regret(self, name: str) -> PairedDifference:
        """The loss of the choice beyond the window minus that of another."""
        beyond = [
            [one[:, self.planned.trained :].flatten() for one in self.losses[it]] for it in (self.choice.name, name)
        ]
        return grouped_difference(*beyond, over="documents")

    def row(self) -> list[str]:
        """What a reader wants to know."""
        full = len(self.losses) * len(self.choice.texts)
        cells = [tokens_label(self.planned.length), self.choice.candidate(self.choice.name).label]
        for harmless in (False, True):
            best = self.best(harmless=harmless)
            gap = self.regret(best)
            said = "the choice" if best == self.choice.name else self.choice.candidate(best).label
            cells += [said, f"{gap.mean + 0.0:.4f} ± {gap.standard_error:.4f}"]
        usual = self.regret(self.choice.usual)
        cells.append(f"{usual.mean + 0.0:+.4f} ± {usual.standard_error:.4f}")
        passes = self.choice.spent.passes
        return [*cells, f"{passes:.0f}", f"{full}", f"{passes / full:.2f}"]


HEADER = (
    "target",
    "chosen",
    "best of all",
    "regret",
    "best that damages the window no more than YaRN",
    "regret",
    "choice minus YaRN as published",
    "passes of the choice",
    "of all candidates on its texts",
    "share",
)


@grouped
def main(
    *,
    texts: TextOptions,
    judge: Annotated[list[str], Option(help="Texts that all candidates read: a file or folder. Repeatable.")],
    target: Annotated[list[int], Option(help="Tokens to extend to. Repeatable.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for what is finished and the table.")],
    stock: Annotated[bool, Option("--stock", help="Among what stock transformers loads.")] = False,
    judged_tokens: Annotated[int, Option(help="Tokens that are read of each text of the judge.")] = 8192,
    seed: Seed = 0,
    source: SourceOptions,
) -> None:
    """Choose for every target, let all candidates read other texts, and print the regret."""
    session = Session(source)
    session.load_weights()
    checkpoint = session.checkpoint
    corpus = texts.read(checkpoint, tokens=2, whole=True)
    others = corpus_of(read_documents(judge), checkpoint.tokenizer, tokens=max(*target, judged_tokens) + 1)
    found = []
    for length in sorted(target):
        folder = output / f"chosen-{length}"
        planned = PlannedChoice(
            checkpoint, corpus, ChoiceSettings(target_length=length, seed=seed, stock=stock), folder=folder
        )
        choice = planned.run()
        session.console.print(f"{tokens_label(length)}: {choice.sentence}", markup=False)
        found.append(judged(session, planned, choice, others, output / f"judged-{length}"))
    where = next(checkpoint.model.parameters()).device.type
    among = "stock candidates, " if stock else ""
    title = f"{checkpoint.name}, {among}{len(others.documents)} texts of the judge; {machine(where)}"
    text = markdown_table(title, HEADER, [one.row() for one in found])
    (output / ("table-stock.md" if stock else "table.md")).write_text(text + "\n", encoding="utf-8")
    session.console.print(text, markup=False, soft_wrap=True)


def judged(session: Session, planned: PlannedChoice, choice: Choice, others: Corpus, folder: Path) -> Judged:
    """Let every candidate read the texts of the judge."""
    jobs = {one.reading.name: jobs_of(planned, one.reading, others) for one in choice.candidates}
    all_jobs = [job for some in jobs.values() for job in some]
    journal = Journal(folder / "cells.jsonl", identity="study.json")
    survey = Survey("choose_regret.py", session.checkpoint, all_jobs, corpus=others, journal=journal)
    session.measure(survey)
    lines = journal.finished()
    losses = {
        name: [journal.losses(lines[job.key]).view(-1, planned.length) for job in some] for name, some in jobs.items()
    }
    return Judged(planned, choice, losses)


def jobs_of(planned: PlannedChoice, reading: Reading, others: Corpus) -> list[LossJob]:
    """A candidate that reads all documents."""
    readings, length = planned.readings, planned.length
    return [
        LossJob.of(
            Reader(reading, readings, (length,)),
            document,
            stretches(document, length),
            name=f"{reading.label}, {document.name}",
            turning_point=planned.costs.turning_point,
            key=readings.key(reading.identity, task=["judge", length, document.sha256]),
        )
        for document in others.documents
    ]


if __name__ == "__main__":
    run_script(main)
