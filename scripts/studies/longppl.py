"""LongPPL: perplexity over key tokens, of one checkpoint extended in several ways, on the same key tokens.

    python scripts/studies/longppl.py Llama-3-8B --text books.parquet --keys keys.json -m yarn -m ntk --factor 2

The key tokens are at the end of each text. Every length reads that end with more of the text before it, so that all
numbers are of the same tokens, and the only thing that changes is how far back the model can see.

**Differences.** The evaluator's own losses on its key tokens are lower than on tokens like them: being
predicted well by it is what made them key tokens. So on key tokens every other reading looks a little worse beside the
unpatched model than it is, the truncations least. Differences between extensions, and between lengths of one
extension, are free of that.

Source: Fang et al., arXiv:2410.23771.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.eval.common import Session
from ctxext.cli.options import (
    MethodOptions,
    OutputOptions,
    Reference,
    SourceOptions,
    TextOptions,
    grouped,
    option,
    run_script,
    token_option,
)
from ctxext.core.patching import describe
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import Line, Panel, lines_panel
from ctxext.evaluation.report.page import AGAINST, Page, TextTable, losses_page, readings_table
from ctxext.files import write_whole
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal, explain_disk_error
from ctxext.measuring.labels import label_of, tokens_label
from ctxext.measuring.loss import Window
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.provenance import Provenance, Report, provenance_of
from ctxext.measuring.readers import factors_for
from ctxext.measuring.readings import (
    Reader,
    Reading,
    Readings,
    check_reference,
    chosen_methods,
    known_trained_length,
    name_for,
)
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.survey import LossJob, ProcessGroup, Survey
from ctxext.measuring.truncation import (
    AS_SAVED,
    TRUNCATED,
    UNPATCHED,
    is_reference,
    tail_windows,
    window_name,
    window_of,
    windows_of,
)
from ctxext.methods import Method
from ctxext.texts.corpus import Corpus
from scripts.studies.key_tokens import KeyTokens, ending, prepare_search


@dataclass(frozen=True, kw_only=True)
class LongPplScore:
    """One reading at one length.

    Args:
        length: Tokens that the model may see; for the best truncation those of the longest.
        all_loss: Mean over all tokens that could have been key tokens, nats.
        versus_truncation: Loss minus that of the truncation that is best on the key tokens, over these.
        versus_truncation_all: Loss minus that of the truncation that is best on all tokens, over all.
        window: Tokens that the best truncation sees on the key tokens.
    """

    length: int
    key_loss: float
    all_loss: float
    versus_truncation: PairedDifference | None = None
    versus_truncation_all: PairedDifference | None = None
    window: int | None = None
    window_all: int | None = None

    @property
    def longppl(self) -> float:
        """Perplexity over the key tokens."""
        return math.exp(self.key_loss)

    @property
    def perplexity(self) -> float:
        """Perplexity over all tokens at the same place."""
        return math.exp(self.all_loss)


@dataclass(frozen=True)
class LongPplReading:
    """One way to read the texts.

    Args:
        name: Name of a reference: ``unpatched``, ``truncated 2048`` for the last 2,048 tokens, ``truncated`` for the
            best of such; ``as saved``; or the method with its factor.
    """

    name: str
    label: str
    scores: tuple[LongPplScore, ...]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LongPplResult(Report):
    """A whole measurement."""

    TITLE, KIND, FORMAT = "a LongPPL result", "longppl", 2

    keys: KeyTokens
    readings: tuple[LongPplReading, ...]
    provenance: Provenance

    def find(self, name: str) -> LongPplReading:
        """Return the reading of one name."""
        return next(reading for reading in self.readings if reading.name == name)

    @property
    def extensions(self) -> tuple[LongPplReading, ...]:
        """The readings without the references."""
        return tuple(reading for reading in self.readings if not is_reference(reading.name))


@dataclass(eq=False, kw_only=True)
class LongPpl(Survey[LossJob]):
    """A planned measurement; ``begin`` it, ``measure`` what is pending, then ask for its ``result``."""

    key_tokens: KeyTokens
    texts: Mapping[tuple[Reader, int], Sequence[LossJob]]

    def result(self) -> LongPplResult:
        """Average the losses over the key tokens, and over all tokens that could have been key tokens.

        Raises:
            ResultsError: losses cannot be read.
        """
        kept, lines = self.losses(), self.journal.finished()
        last = self.key_tokens.searched - 1
        places = [
            torch.tensor([last - after for after in reversed(passage.from_end)], dtype=torch.long)
            for passage in self.key_tokens.passages
        ]
        names = {place: self._name(*place) for place in self.texts}
        every = LossTable.of({names[place]: [kept[job.key] for job in jobs] for place, jobs in self.texts.items()})
        on_keys = every.select(lambda texts: [text[place] for text, place in zip(texts, places, strict=True)])

        def score(name: str, length: int) -> LongPplScore:
            return LongPplScore(
                length=length,
                key_loss=on_keys.mean(name),
                all_loss=every.mean(name),
                versus_truncation=None if name == UNPATCHED else on_keys.versus(name),
                versus_truncation_all=None if name == UNPATCHED else every.versus(name),
                window=on_keys.window if name == TRUNCATED else None,
                window_all=every.window if name == TRUNCATED else None,
            )

        readings = []
        for reader in self.readers:
            of_reader = [place for place in self.texts if place[0] is reader]
            scores = tuple(score(names[place], place[1]) for place in of_reader)
            seconds = sum(lines[job.key]["seconds"] for place in of_reader for job in self.texts[place])
            readings.append(LongPplReading(reader.reading.name, reader.reading.label, scores, seconds))
        best = LongPplReading(TRUNCATED, label_of(TRUNCATED), (score(TRUNCATED, every.longest),))
        readings.insert(1 + len(every.short), best)
        provenance = self.with_extensions(provenance_of(self.checkpoint, self.corpus))
        return LongPplResult(keys=self.key_tokens, readings=tuple(readings), provenance=provenance)

    def _name(self, reader: Reader, length: int) -> str:
        """Name the row of a reading in the table: an extension has one for each length."""
        name = reader.reading.name
        return name if is_reference(name) else f"{name}, {length} tokens"


def prepare(
    checkpoint: Checkpoint,
    corpus: Corpus,
    keys: KeyTokens,
    *,
    lengths: Sequence[int],
    methods: Sequence[Method] = (),
    reference: Checkpoint | None = None,
    trained_length: int | None = None,
    journal: Journal | None = None,
    group: ProcessGroup | None = None,
) -> LongPpl:
    """Lay out the references' jobs, then those of the checkpoint extended by each method.

    Args:
        corpus: the texts of ``keys``, each longer than the greatest length.
        lengths: tokens, each at least ``keys.window``, which is added to them.
        methods: Methods to extend by; none measures the checkpoint as it was saved, extended.

    Raises:
        InvalidParameterError: key tokens of other texts, a length out of range, a method twice, or no unextended model
            for the references.
        IncompatibleError: a method that cannot be right on this model.
    """
    readings = Readings(checkpoint, trained_length=trained_length, windows=())
    plain = _plain(readings, reference, methods)
    keys.check(checkpoint, corpus)
    lengths = sorted({*lengths, keys.window})
    if lengths[0] < keys.window:
        raise InvalidParameterError(
            f"A length must be at least the {keys.window:,} tokens in which the key tokens were found, found "
            f"{lengths[0]:,}."
        )
    trained, longest = readings.trained_length, lengths[-1]
    # Where nothing lies beyond the trained window, there is nothing to drop.
    windows = windows_of(trained) if longest > trained else (trained,)
    unpatched = Reader(Reading(name=UNPATCHED, label=label_of(UNPATCHED)), plain, (keys.window,))
    readers = [unpatched]
    for window in windows:
        readers.append(Reader(Reading(name=window_name(window), label=label_of(window_name(window))), plain, (window,)))
    readers += [Reader(reading, readings, tuple(lengths)) for reading in _extensions(readings, methods, longest)]
    point = turning_point(checkpoint.subject)

    def jobs_of(reader: Reader, length: int) -> list[LossJob]:
        start, jobs = (longest if reader.window else length) - keys.searched, []
        for document in corpus.documents:
            text = ending(document, longest if reader.window else length)
            passes: Sequence[Window] = [Window(0, length + 1, keys.searched)]
            if reader.window:
                passes = tail_windows(reader.window, start=start, positions=longest, prefix=text.prefix)
            name = f"{reader.reading.name}, {document.name}, {text.tokens - 1:,} tokens"
            jobs.append(LossJob.of(reader, text, passes, name=name, turning_point=point))
        return jobs

    texts = {(reader, length): jobs_of(reader, length) for reader in readers for length in reader.lengths}
    return LongPpl(
        "longppl.py",
        checkpoint,
        [job for jobs in texts.values() for job in jobs],
        corpus=corpus,
        journal=journal or Journal(None),
        group=group or ProcessGroup(),
        key_tokens=keys,
        texts=texts,
    )


def check(
    checkpoint: Checkpoint,
    lengths: Sequence[int],
    methods: Sequence[Method] = (),
    reference: Checkpoint | None = None,
    trained_length: int | None = None,
) -> None:
    """Refuse what ``prepare`` would, before key tokens are found; no weights are needed."""
    readings = Readings(checkpoint, trained_length=trained_length, windows=())
    _plain(readings, reference, methods)
    _extensions(readings, methods, max(lengths))


def _plain(readings: Readings, reference: Checkpoint | None, methods: Sequence[Method]) -> Readings:
    """Return the readings of the checkpoint that reads the references."""
    if not readings.extended and not methods:
        raise InvalidParameterError("Nothing is extended: give at least one method, or a checkpoint saved extended.")
    if reference is None and readings.extended:
        raise InvalidParameterError(
            f"{readings.checkpoint.name} comes extended, and may have been trained since. Give the checkpoint that it "
            f"was made from as the reference, which reads the last tokens only."
        )
    if reference is None:
        return readings
    check_reference(readings.checkpoint, reference)
    return Readings(reference, trained_length=readings.trained_length, windows=())


def _extensions(readings: Readings, methods: Sequence[Method], longest: int) -> list[Reading]:
    """Try the methods, and refuse one that does not reach the greatest length; without any, the checkpoint as saved."""
    names = [name_for(method) for method in methods]
    if len(set(names)) < len(names):
        raise InvalidParameterError(f"Give each method once; found {', '.join(names)}.")
    saved, extensions = readings.extensions(methods)
    if not methods:
        extensions = [replace(saved, name=AS_SAVED, label=AS_SAVED)]
    for reading in extensions:
        if not reading.dynamic and longest > (reading.reach or 0):
            raise InvalidParameterError(
                f"{longest:,} tokens are more than the {reading.reach or 0:,} that {reading.label} reaches. Ask for "
                f"fewer, or extend further."
            )
    return extensions


def longppl_page(result: LongPplResult) -> Page:
    """Return LongPPL beside plain perplexity, the differences to truncation, the sentences and the figure."""
    lengths = sorted({score.length for reading in result.extensions for score in reading.scores})
    places = {  # a truncation is the same at every length
        reading.name: {
            length: score
            for score in reading.scores
            for length in (lengths if reading.name.startswith(TRUNCATED) else [score.length])
        }
        for reading in result.readings
    }

    def table(title: str, cell: Callable[[LongPplScore], str]) -> TextTable:
        cells = {r.label: {tokens_label(n): cell(s) for n, s in places[r.name].items()} for r in result.readings}
        return readings_table(title, list(map(tokens_label, lengths)), cells)

    def panel(title: str, value: Callable[[LongPplScore], float]) -> Panel:
        lines = [
            Line(r.name.split()[0], r.label, [(n, value(s)) for n, s in places[r.name].items()])
            for r in result.readings
            if window_of(r.name) is None  # the best truncation represents the others
        ]
        return lines_panel(lines, title=title, x_label="tokens that the model may see", ticks=lengths, log=False)

    tables = [
        table("LongPPL: perplexity over the key tokens", lambda score: f"{score.longppl:.2f}"),
        table("Perplexity over all tokens at the same place", lambda score: f"{score.perplexity:.2f}"),
        table(f"{AGAINST} ± standard error, over key tokens", lambda score: str(score.versus_truncation or "")),
        table(f"{AGAINST} ± standard error, over all tokens", lambda score: str(score.versus_truncation_all or "")),
    ]
    panels = [
        panel("LongPPL (key tokens)", lambda score: score.longppl),
        panel("Perplexity (all tokens at the same place)", lambda score: score.perplexity),
    ]
    return losses_page("longppl", result.provenance, tables, _longppl_sentences(result), panels)


def _longppl_sentences(result: LongPplResult) -> list[str]:
    """Return how many key tokens there are, how the best extension predicts them, and the limits of the numbers."""
    keys = result.keys
    sentences = [
        f"{keys.tokens:,} of {keys.searched * len(keys.passages):,} tokens are key tokens: {keys.evaluator}, "
        f"unextended, predicts each better by more than {keys.alpha:g} nats after {keys.window:,} tokens than after "
        f"{keys.short:,}."
    ]
    best = min(result.extensions, key=lambda reading: reading.scores[-1].key_loss)
    score = best.scores[-1]
    if score.versus_truncation is not None:
        window = result.find(TRUNCATED).scores[0].window
        answer = score.versus_truncation.answer(len(keys.passages), candidates=len(result.extensions))
        sentences.append(
            f"Best at {tokens_label(score.length)}: {best.label}. Does it beat the best truncation on the key tokens "
            f"(to the last {tokens_label(window or 0)})? {answer}"
        )
    sentences.append(
        "Key tokens are those that the unextended model predicts well in its window, which favours it and truncation a "
        "little; differences between extensions, and between lengths of one, are free of that."
    )
    return sentences


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Key tokens: where they are kept, and how they are found."""

    keys: Path | None = option("File of key tokens: reused if it exists, else written.", show_default="none")
    evaluator: str | None = option(
        "The checkpoint that finds key tokens; default the one measured, or its --reference."
    )
    short: int | None = token_option("Tokens of a short context; default a quarter of the trained window.")
    stride: int | None = token_option("Tokens that share a short context; default a quarter of --short.")
    alpha: float | None = option("Least gain of a key token from the long context, nats; default the paper's 2.")
    beta: float | None = option(
        "Least log-likelihood of a key token in the long context, nats; default the paper's -2."
    )

    def search(self, window: int | None) -> dict[str, Any]:
        """Return the arguments of a search for key tokens, without those that are left out."""
        given = {"window": window} | {name: getattr(self, name) for name in ("short", "stride", "alpha", "beta")}
        return {name: value for name, value in given.items() if value is not None}


@grouped
def main(
    *,
    texts: TextOptions,
    asked: MethodOptions,
    keys: KeyOptions,
    reference: Reference = None,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure perplexity over key tokens: those that need a long context, found by the unextended model.

    Key tokens kept with --keys are the same for every method and checkpoint with this tokenizer.
    """
    if keys.keys is not None and not keys.keys.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {keys.keys.parent}", param_hint="--keys")
    session = Session(source, results, reference=reference, methods=asked.method or ())
    loaded = session.checkpoint
    trained = known_trained_length(loaded.subject, asked.trained_length)
    factors = factors_for(asked.method or (), asked.factor or (), asked.length or (), trained)
    methods = chosen_methods(loaded.subject, asked.method, factors, trained) if asked.method else ()
    reach = int(trained * min(factors)) if asked.method else describe(loaded.model).target_length
    lengths = asked.length or [reach or trained]
    corpus = texts.read(loaded, tokens=max(lengths) + 1)
    check(loaded, lengths, methods, session.reference, asked.trained_length)
    session.load_weights()
    loaded = session.checkpoint
    journal = session.journal
    survey = prepare(
        loaded,
        corpus,
        _key_tokens(session, keys, corpus, keys.search(asked.trained_length), journal),
        lengths=lengths,
        methods=methods,
        reference=session.reference,
        trained_length=asked.trained_length,
        journal=journal,
        group=session.group,
    )
    session.measure(survey)
    session.finish(survey.result(), longppl_page)


def _key_tokens(
    session: Session, options: KeyOptions, corpus: Corpus, search: dict[str, Any], journal: Journal
) -> KeyTokens:
    """Read the key tokens of the file, or find them and keep them there before anything else is computed."""
    path = options.keys
    if path is not None and path.exists():
        kept = KeyTokens.load(path)
        for name, value in search.items():
            if getattr(kept, name) != value:
                raise InvalidParameterError(
                    f"{str(path)!r} holds key tokens found with {name}={getattr(kept, name)}, and {name}={value} is "
                    f"asked for. Leave it out, or name another file."
                )
        session.console.print(f"{kept.tokens:,} key tokens out of {path}, found by {kept.evaluator}.")
        return kept
    finder = session.load(options.evaluator) if options.evaluator else session.reference or session.checkpoint
    survey = prepare_search(finder, corpus, **search, measured=session.checkpoint, journal=journal, group=session.group)
    session.measure(survey)
    keys = survey.result()
    if path is not None and session.group.is_main:
        with explain_disk_error(path, what="key tokens"):
            write_whole(path, json.dumps(keys.to_dict(), indent=1) + "\n")
    where = f", kept in {path}" if path else ""
    session.console.print(f"{keys.tokens:,} key tokens found by {finder.name}{where}.")
    return keys


if __name__ == "__main__":
    run_script(main)
