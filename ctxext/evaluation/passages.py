"""Passage retrieval: does an embedding model find the one long document that names a person?

Every document of a length is the same noise, or a stretch of the same text, with one sentence in it that gives a
person's pass key; a query asks for one person's key. The document nearest to the query should be that person's. Only
the one sentence tells documents apart, so what an embedding keeps of a single sentence is what counts, and where in the
document it stood.

Whoever has no longer context has two simple ways, and they are measured beside every extension: to embed the first
tokens of the trained window and drop the rest, or to cut a document into windows and embed each, then to average the
embeddings (one vector a document, as an index wants it) or to let the nearest window count (a vector a window).

Source of the task: Zhu et al., arXiv:2404.12096, section 3 (personalised passkey retrieval); wording and construction
are our own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, UnknownNameError, require_package
from ctxext.files import digest
from ctxext.measuring.checkpoint import DTYPES, Checkpoint, checked_device
from ctxext.measuring.forward import Progress
from ctxext.measuring.provenance import Provenance, Report, from_json
from ctxext.measuring.readings import Reader, Reading, Readings, chosen_methods, require_reached
from ctxext.measuring.statistics import PairedDifference, score_difference, wilson_interval
from ctxext.measuring.survey import Answer, Job, Survey
from ctxext.measuring.truncation import TRUNCATED
from ctxext.texts.haystack import Haystack, nearest_boundary, noise, split_sentences

AVERAGED, NEAREST = "chunks, averaged", "chunks, nearest"
BASELINES = (TRUNCATED, AVERAGED, NEAREST)
"""Ways to read with the unextended model: its first window, and all windows, averaged or each by itself."""

DOCUMENTS = 50
LEAST = 2  # documents, of which one is to be found
MARGIN = 4  # tokens by which a text may grow when it is written out and read again
FIRST = ("Alma", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
LAST = ("Adler", "Baker", "Carver", "Fisher", "Glover", "Hunter", "Miller", "Porter", "Sawyer", "Tanner", "Weaver")
SENTENCE = " The pass key of {name} is {key}. Remember that {key} is the pass key of {name}."
QUERY = "What is the pass key of {name}?"


@dataclass(frozen=True, eq=False)
class Embedder:
    """An embedding model of sentence-transformers, of which ctxext extends the transformer.

    Args:
        encoder: the whole ``SentenceTransformer``: pooling, normalisation and prompts are its own.
    """

    checkpoint: Checkpoint
    encoder: Any
    _of_chunks: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def embed(self, texts: Sequence[str], tokens: int, *, query: bool = False) -> Float[Tensor, "texts size"]:
        """Return unit vectors in float32, on the CPU."""
        before = self.encoder.max_seq_length
        self.encoder.max_seq_length = tokens
        try:
            encode = self.encoder.encode_query if query else self.encoder.encode_document
            # One text at a time: padding would decide which kernel computes it, and memory stays that of one text.
            vectors = encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=False)
        finally:
            self.encoder.max_seq_length = before
        return torch.nn.functional.normalize(vectors.float().cpu(), dim=-1)

    def embed_chunks(self, text: str, window: int) -> Float[Tensor, "chunks size"]:
        """Embed the pieces of a text with the unextended model; the result is kept, since two baselines read it."""
        if text not in self._of_chunks:
            self._of_chunks[text] = self.embed(_chunks(self.checkpoint.tokenizer, text, window), window)
        return self._of_chunks[text]


def load_embedder(
    source: str, *, dtype: str = "auto", device: str | torch.device | None = None, trust_remote_code: bool = False
) -> Embedder:
    """Load an embedding model with sentence-transformers.

    Raises:
        InvalidParameterError: sentence-transformers is not installed, or there is no such device.
        CheckpointError: nothing that it can load.
        UnknownNameError: an unknown dtype.
    """
    require_package("sentence_transformers", "embed", "Embedding models need")
    from sentence_transformers import SentenceTransformer

    if dtype not in ("auto", *DTYPES):
        raise UnknownNameError.of("dtype", dtype, ["auto", *DTYPES])
    chosen = "fp32" if dtype == "auto" else dtype
    place = checked_device(device)
    try:
        encoder = SentenceTransformer(
            source,
            device=str(place),
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": DTYPES[chosen]},
        )
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"Cannot load an embedding model from {source}: {error}") from error
    model = getattr(encoder[0], "auto_model", None)
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"{source} begins with {type(encoder[0]).__name__}, not with a transformer whose positions could be "
            f"extended."
        )
    name = source.rstrip("/").rsplit("/", 1)[-1]
    return Embedder(Checkpoint(name, model.eval(), encoder.tokenizer, chosen), encoder)


@dataclass(frozen=True, eq=False)
class PassageSet:
    """Documents of one length, and a question for each.

    Args:
        length: tokens of each document, special tokens included; a few fewer where the tokenizer needs room.
        queries: that the document of the same number answers.
        depths: where in each document its sentence stands, from 0 to 1.
    """

    length: int
    documents: tuple[str, ...]
    queries: tuple[str, ...]
    depths: tuple[float, ...]
    haystack: str

    @property
    def sha256(self) -> str:
        """The first 12 hexadecimal digits of a hash of all texts."""
        return digest("\0".join((*self.documents, *self.queries)))


def make_passages(
    tokenizer: Any, *, length: int, documents: int = DOCUMENTS, seed: int = 0, haystack: Haystack | None = None
) -> PassageSet:
    """Documents of just so many tokens, their sentences at depths that are spread evenly.

    Args:
        length: tokens, special ones included; at least what the sentence and some noise need.
        documents: how many, from 2 to the number of names (132).

    Raises:
        InvalidParameterError: a number of documents or a length out of range, or a text that is too short.
    """
    haystack = haystack or noise(tokenizer)
    names = [f"{first} {last}" for first, last in itertools.product(FIRST, LAST)]
    if not LEAST <= documents <= len(names):
        raise InvalidParameterError(f"documents must be from {LEAST} to {len(names)}, found {documents}.")
    generator = random.Random(f"passages {seed} {length} {documents}")
    generator.shuffle(names)
    depths = [place / (documents - 1) for place in range(documents)]
    generator.shuffle(depths)
    texts = [
        _document(tokenizer, haystack, length, depth, name, generator)
        for name, depth in zip(names, depths, strict=False)
    ]
    queries = [QUERY.format(name=name) for name in names[:documents]]
    return PassageSet(length, tuple(texts), tuple(queries), tuple(depths), haystack.name)


def _document(
    tokenizer: Any, haystack: Haystack, length: int, depth: float, name: str, generator: random.Random
) -> str:
    sentence = SENTENCE.format(name=name, key=generator.randrange(10_000, 100_000))
    tokens = len(tokenizer(sentence, add_special_tokens=False).input_ids)
    room = length - tokens - tokenizer.num_special_tokens_to_add() - MARGIN
    least = haystack.tokens if haystack.repeated else 1
    if room < least:
        raise InvalidParameterError(
            f"A document needs at least {length - room + least} tokens with this tokenizer, found length={length}."
        )
    sentences = haystack.take(room, generator)
    before = nearest_boundary(sentences, depth)
    head, tail = (
        tokenizer.decode(list(itertools.chain.from_iterable(part))) for part in (sentences[:before], sentences[before:])
    )
    return f"{head}{sentence} {tail}".strip()


@dataclass(frozen=True, eq=False, kw_only=True)
class PassageJob(Job):
    """One reader and one set of documents."""

    embedder: Embedder
    passages: PassageSet

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Find for each question whether the document that answers it is the nearest."""
        passages, kind = self.passages, self.reader.reading.name
        window = self.reader.readings.trained_length
        progress(self.name, 0.0)
        queries = self.embedder.embed(passages.queries, window, query=True)
        nearness = []
        for text in passages.documents:
            if kind in (AVERAGED, NEAREST):
                chunks = self.embedder.embed_chunks(text, window)
                whole = torch.nn.functional.normalize(chunks.mean(dim=0), dim=-1)
                nearness.append(queries @ whole if kind == AVERAGED else (queries @ chunks.T).amax(dim=1))
            else:
                nearness.append(queries @ self.embedder.embed([text], min(self.reads, passages.length))[0])
            progress(self.name, self.cost / len(passages.documents))
        scores = torch.stack(nearness, dim=1)
        if not scores.isfinite().all():
            raise IncompatibleError(f"The model computes embeddings that are no numbers: {self.name}.")
        right = scores.diagonal()
        # Two documents that cannot be told apart are not found: a tie counts as lost.
        is_nearest = (scores >= right[:, None]).sum(dim=1) == 1
        trial = {"length": passages.length, "depths": list(passages.depths), "found": is_nearest.tolist()}
        return Answer({"trial": trial})

    @property
    def reads(self) -> int:
        """Tokens that the reader reads at most."""
        trained = self.reader.readings.trained_length
        return trained if self.reader.reading.name == TRUNCATED else self.reader.reading.reach or trained


def _chunks(tokenizer: Any, text: str, window: int) -> list[str]:
    """Cut a text into few pieces of about equal length that a window holds, between sentences.

    Of equal length, since a rest of a few words would count as much as a whole window.
    """
    room = window - tokenizer.num_special_tokens_to_add() - MARGIN
    sentences = [tokenizer(piece, add_special_tokens=False).input_ids for piece in split_sentences(text)]
    # A sentence that no window holds is cut.
    parts = [piece[at : at + room] for piece in sentences for at in range(0, len(piece), room)]
    whole = sum(map(len, parts))
    target = whole / -(-whole // room)
    chunks: list[list[int]] = [[]]
    for part in parts:
        if chunks[-1] and (len(chunks[-1]) >= target or len(chunks[-1]) + len(part) > room):
            chunks.append([])
        chunks[-1] += part
    return [tokenizer.decode(piece) for piece in chunks]


def passage_readers(
    embedder: Embedder,
    *,
    methods: Sequence[str] = (),
    factors: Sequence[float] = (),
    lengths: Sequence[int] = (),
    trained_length: int | None = None,
) -> tuple[Reader, ...]:
    """Find the readers of documents: the unextended model in three ways, then each method up to its reach.

    Raises:
        InvalidParameterError: a length that nobody is meant for.
        IncompatibleError: a method that cannot be right on this model.
        UnknownNameError: an unknown method.
    """
    of_checkpoint = Readings(embedder.checkpoint, trained_length=trained_length, windows=())
    trained = of_checkpoint.trained_length
    needed = (max(lengths, default=trained) / trained,)
    wanted = chosen_methods(of_checkpoint.model, methods, factors or needed) if methods else ()
    _, candidates = of_checkpoint.extensions(wanted)
    reaches = {reading.reach for reading in candidates if reading.reach is not None}
    all_lengths = tuple(sorted({*lengths} or {trained, *reaches}))
    require_reached(all_lengths[-1], reaches, trained)
    labels = {TRUNCATED: f"first {trained:,}"}
    simple = [
        Reader(Reading(name=name, label=labels.get(name, name)), of_checkpoint, all_lengths) for name in BASELINES
    ]
    extended = [
        Reader(reading, of_checkpoint, tuple(length for length in all_lengths if length <= (reading.reach or 0)))
        for reading in candidates
    ]
    return (*simple, *extended)


def passage_jobs(embedder: Embedder, readers: Sequence[Reader], sets: Sequence[PassageSet]) -> list[PassageJob]:
    """Make a job for every reader and every set of documents that it is meant for."""
    return [
        PassageJob(
            key=reader.readings.key(
                [reader.reading.name, reader.reading.method, reader.reading.fingerprint], shelf=passages.sha256
            ),
            cost=float(passages.length * len(passages.documents)),
            reader=reader,
            name=f"{reader.reading.label}, {passages.length:,} tokens",
            embedder=embedder,
            passages=passages,
        )
        for reader in readers
        for passages in sets
        if passages.length in reader.lengths
    ]


@dataclass(frozen=True)
class PassageTrial:
    """All questions about the documents of one length.

    Args:
        depths: where in its document each sentence stood, 0 to 1.
    """

    length: int
    depths: tuple[float, ...]
    found: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """The share of questions whose document was the nearest."""
        return sum(self.found) / len(self.found)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 percent confidence interval of the accuracy (Wilson)."""
        return wilson_interval(self.accuracy, len(self.found))


@dataclass(frozen=True)
class PassageResult:
    """One way to read, at every length that it is meant for.

    Args:
        reading: ``truncated``, ``chunks, averaged``, ``chunks, nearest``, or how the model was extended.
    """

    reading: str
    label: str
    trials: tuple[PassageTrial, ...]

    def at(self, length: int) -> PassageTrial | None:
        """Return the trial of a length; None if the reading is not meant for it."""
        return next((trial for trial in self.trials if trial.length == length), None)

    def beyond(self, other: PassageResult, length: int) -> PairedDifference | None:
        """Compare the shares of documents found by this reading and another, over the same questions.

        The mean is a difference of shares, above 0 where this reading is the better one.
        """
        trials = self.at(length), other.at(length)
        sides = [tuple(map(float, trial.found)) for trial in trials if trial is not None]
        if len(sides) < 2:
            return None
        return score_difference([mine - theirs for mine, theirs in zip(*sides, strict=True)], over="questions")


@dataclass(frozen=True, kw_only=True)
class PassageReport(Report):
    """A whole measurement."""

    TITLE, KIND, FORMAT = "a passage report", "passages", 1

    readings: tuple[PassageResult, ...]
    trained_length: int
    haystack: str
    provenance: Provenance

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths, increasing."""
        return tuple(sorted({trial.length for reading in self.readings for trial in reading.trials}))

    def best_baseline(self, length: int) -> PassageResult:
        """Return the baseline that finds most at a length."""
        simple = [reading for reading in self.readings if reading.reading in BASELINES]

        def accuracy(reading: PassageResult) -> float:
            trial = reading.at(length)
            return -1.0 if trial is None else trial.accuracy

        return max(simple, key=accuracy)


def passage_report(survey: Survey[PassageJob], haystack: str, provenance: Provenance) -> PassageReport:
    """Summarise a finished survey."""
    readings = [
        PassageResult(
            reader.reading.name,
            reader.reading.label,
            tuple(from_json(PassageTrial, trial) for trial in trials),
        )
        for reader, trials in survey.trials()
    ]
    return PassageReport(
        readings=tuple(readings),
        trained_length=survey.readers[0].readings.trained_length,
        haystack=haystack,
        provenance=survey.with_extensions(provenance),
    )
