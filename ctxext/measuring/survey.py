"""The one engine of all measurements: jobs, each kept when it is done, shared by processes, resumed after a stop."""

from __future__ import annotations

import abc
import atexit
import contextlib
import datetime
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from ctxext.errors import CtxextError, InvalidParameterError
from ctxext.files import JsonObject
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import Progress, forget_longest, pass_cost, ticking
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import Window
from ctxext.measuring.provenance import ExtensionRecord, Provenance
from ctxext.measuring.readings import Reader
from ctxext.measuring.statistics import check_finite
from ctxext.texts.corpus import Corpus, TokenisedDocument

# A process that is done waits for the slowest job of the others, which may take hours.
PATIENCE = datetime.timedelta(days=30)
LESS = "Ask for smaller lengths, or run the same command on a device with more memory."


@dataclass(frozen=True)
class ProcessGroup:
    """Rank, world size and device of one process of a distributed measurement.

    Args:
        process: Rank, from 0; process 0 is the main one, which talks and writes the report.
        device: Device of this process; None leaves it to the loading of the checkpoint.
    """

    process: int = 0
    processes: int = 1
    device: str | None = None

    @property
    def is_main(self) -> bool:
        """True in process 0."""
        return self.process == 0

    def gather(self, mine: Any = None) -> list[Any]:
        """Wait for all processes and return what each of them gives, in order."""
        shares = [mine] * self.processes
        if self.processes > 1:
            distributed.all_gather_object(shares, mine)
        return shares


def launched_processes() -> ProcessGroup:
    """Return the group that ``accelerate launch`` or ``torchrun`` started, a device for each; else a group of one.

    The processes only wait for each other, so they meet over gloo on any device: nothing spins on a GPU meanwhile.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return ProcessGroup()
    # Not accelerate's PartialState: on GPUs its processes wait over NCCL, which spins and gives up after minutes, and
    # an evaluation need not have accelerate (it comes with ctxext[train]).
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=PATIENCE)
        atexit.register(distributed.destroy_process_group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # or a build names an absent device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"{accelerator.type}:{local % torch.accelerator.device_count()}" if accelerator else "cpu"
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), device)


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of a job."""

    values: JsonObject
    losses: Float[Tensor, " positions"] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(abc.ABC):
    """One reader and one document or prompt: the smallest piece of work that is done, kept and resumed by itself.

    Args:
        key: Hash of all that the answer depends on, see ``Readings.key``; readers who see the same share one.
        cost: Cost in the units of ``pass_cost``.
        is_causal: True where no token may be seen before it is predicted.
    """

    key: str
    cost: float
    reader: Reader
    name: str
    is_causal: ClassVar[bool] = True

    @abc.abstractmethod
    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Measure with the reader's model, and report the job's whole cost."""


Work = TypeVar("Work", bound=Job)


@dataclass(eq=False)
class Survey(Generic[Work]):
    """A planned measurement: call ``begin``, then ``measure`` the pending jobs."""

    made_by: str
    checkpoint: Checkpoint
    jobs: Sequence[Work]
    corpus: Corpus | None = field(default=None, kw_only=True)
    journal: Journal = field(default_factory=lambda: Journal(None), kw_only=True)
    group: ProcessGroup = field(default_factory=ProcessGroup, kw_only=True)

    @property
    def keys(self) -> set[str]:
        """The keys of all jobs."""
        return {job.key for job in self.jobs}

    @property
    def finished(self) -> int:
        """The number of finished jobs, each key counted once."""
        return len(self.keys & self.journal.finished().keys())

    @property
    def done(self) -> str:
        """The finished share in words."""
        return f"{self.finished} of {len(self.keys)} jobs"

    @property
    def readers(self) -> list[Reader]:
        """All readers, in order."""
        return list(dict.fromkeys(job.reader for job in self.jobs))

    def begin(self) -> tuple[Work, ...]:
        """Claim the journal and return the jobs that this process has to do.

        Raises:
            ResultsError: the journal is of another measurement, or cannot be written.
        """
        if self.group.is_main:
            self.journal.claim(self._identity())
        self.group.gather()
        finished = self.journal.finished()
        self.group.gather()  # no process writes before all have read, so that all see the same jobs pending
        first = {job.key: job for job in reversed(self.jobs)}  # readers who see the same share an answer
        pending = [job for job in self.jobs if job.key not in finished and first[job.key] is job]
        return my_share(pending, self.group.process, self.group.processes)

    def measure(self, jobs: Sequence[Work], *, progress: Progress = lambda *_: None) -> None:
        """Do jobs and keep each at once, then wait for the other processes. Models are at the end what they were.

        Args:
            progress: Function that takes the name of the work and the cost done since the last call; the jobs' costs
                are the total.

        Raises:
            ResultsError: the journal cannot be written.
            InvalidParameterError: a job does not fit into memory.
            IncompatibleError: a model that reads ahead.
            CtxextError: as the jobs do; everything finished is kept.
        """
        for job in jobs:
            if job.is_causal:
                job.reader.readings.checkpoint.require_causal()
        for reader, mine in itertools.groupby(jobs, key=lambda job: job.reader):
            with reader.applied():
                for job in mine:
                    began = time.perf_counter()
                    with self._saying_what_is_kept(), explain_out_of_memory(job.name):
                        answer = job.ask(reader.model, progress)
                        if answer.losses is not None:
                            check_finite(answer.losses, job.name)
                    seconds = round(time.perf_counter() - began, 3)
                    about = {"key": job.key, "reading": reader.reading.name}
                    self.journal.keep(about | answer.values | {"seconds": seconds}, answer.losses)
        for answers in self.group.gather(self.journal.in_memory):
            self.journal.in_memory.update(answers)

    @contextlib.contextmanager
    def _saying_what_is_kept(self) -> Iterator[None]:
        """Say at the end of an error where finished jobs are kept; a journal in memory goes with the process."""
        try:
            yield
        except CtxextError as error:
            if self.journal.path is None:
                raise
            raise type(error)(f"{error} What is finished is kept in {self.journal.path}.") from error

    def trials(self) -> list[tuple[Reader, list[Trial]]]:
        """Return every reader's answers to prompts, in the order of the prompts."""
        lines = self.journal.finished()
        return [
            (reader, [lines[job.key]["trial"] for job in self.jobs if job.reader is reader]) for reader in self.readers
        ]

    def losses(self) -> dict[str, Float[Tensor, " positions"]]:
        """Return the losses of all finished jobs that give some, by the jobs' keys."""
        keys, finished = self.keys, self.journal.finished()
        lines = {key: line for key, line in finished.items() if {"file", "losses"} & line.keys()}
        return {key: self.journal.losses(line) for key, line in lines.items() if key in keys}

    def with_extensions(self, provenance: Provenance) -> Provenance:
        """Return a provenance that says how every reader reads."""
        readings = [reader.reading for reader in self.readers if reader.window is None]
        extensions = {
            reading.name: ExtensionRecord(
                method=reading.method, fingerprint=reading.fingerprint, attention=reading.attention
            )
            for reading in readings
        }
        trained = self.readers[0].readings.trained_length
        return replace(provenance, extensions=extensions, trained_length=trained)

    def _identity(self) -> JsonObject:
        """Say what the journal is of: another checkpoint or corpus needs another journal."""
        dtype = next(self.checkpoint.model.parameters()).dtype
        identity: JsonObject = {
            "made_by": self.made_by,
            "checkpoint": {"name": f"{self.checkpoint.name} in {dtype}", "sha256": self.checkpoint.sha256},
        }
        if self.corpus is not None:
            names = ", ".join(document.name for document in self.corpus.documents)
            identity["corpus"] = {"name": names, "sha256": self.corpus.sha256}
        return identity


@dataclass(frozen=True, eq=False, kw_only=True)
class LossJob(Job):
    """One reader and one text; some positions of the text are scored."""

    text: TokenisedDocument
    windows: tuple[Window, ...]
    turning_point: int
    cached: int | None

    @classmethod
    def of(
        cls,
        reader: Reader,
        text: TokenisedDocument,
        windows: Sequence[Window],
        *,
        name: str,
        turning_point: int,
        cached: int | None = None,
        key: str | None = None,
    ) -> LossJob:
        """Lay out a job; the arguments determine its cost, and its key where none is given."""
        return cls(
            key=key
            or reader.readings.key(
                reader.reading.identity,
                text=text.sha256,
                windows=[{name: value for name, value in asdict(window).items() if value != ()} for window in windows],
                cached=cached,
            ),
            cost=sum(pass_cost(window.positions, turning_point) for window in windows),
            reader=reader,
            name=name,
            text=text,
            windows=tuple(windows),
            turning_point=turning_point,
            cached=cached,
        )

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the losses of the scored positions, one window after the other."""
        parts = []
        for window in self.windows:
            calls = 1 if self.cached is None else -(-window.positions // self.cached)
            with ticking(model, self.name, pass_cost(window.positions, self.turning_point) / calls, progress):
                parts.append(window.losses(model, self.text.input_ids, cached=self.cached)[0])
        return Answer({"item": self.text.name}, torch.cat(parts))


# JSON values; each task defines their meaning.
Trial = JsonObject


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompt(abc.ABC):
    """One prompt with something hidden in it, and how to ask it.

    Args:
        identity: all that an answer depends on, except the reader, as JSON values.
        least: Tokens of the smallest window that shows some of the text.
        prefix: Special tokens in front, which every window keeps there.
    """

    name: str
    length: int
    identity: Any
    least: int
    prefix: int
    turning_point: int

    def cost(self, tokens: int) -> float:
        """Estimate the cost of reading so many tokens of it, in the units of ``pass_cost``."""
        return pass_cost(tokens, self.turning_point)

    def dropped(self, window: int | None) -> int:
        """Return the tokens behind the prefix that a window leaves no room for."""
        return 0 if window is None else max(0, self.length - window)

    @abc.abstractmethod
    def ask(self, model: nn.Module, window: int | None, name: str, progress: Progress) -> Trial:
        """Let the model answer, shown at most ``window`` tokens; None for all."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptJob(Job):
    """One reader and one prompt."""

    prompt: Prompt
    window: int | None

    @classmethod
    def of(cls, reader: Reader, prompt: Prompt) -> PromptJob:
        """Lay out a job; the arguments determine its key.

        Raises:
            InvalidParameterError: a window that has no room for the text.
        """
        window = reader.window if reader.window is not None and reader.window < prompt.length else None
        if window is not None and window < prompt.least:
            raise InvalidParameterError(
                f"{prompt.name}: a window of {window:,} tokens shows nothing of it: question and answer leave room "
                f"from {prompt.least:,} on. Ask for other tasks, or give another --trained-length."
            )
        reading = [reader.reading.method, reader.reading.fingerprint, window]
        return cls(
            key=reader.readings.key(reading, prompt=[prompt.length, prompt.identity]),
            cost=prompt.cost(window or prompt.length),
            reader=reader,
            name=f"{reader.reading.label}, {prompt.name}",
            prompt=prompt,
            window=window,
        )

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the reader's trial."""
        forget_longest(self.reader.readings.checkpoint.subject)
        return Answer({"trial": self.prompt.ask(model, self.window, self.name, progress)})


def jobs_of(readers: Sequence[Reader], prompts: Sequence[Prompt]) -> list[PromptJob]:
    """Lay out every reader and every prompt of a length at which it is asked."""
    pairs = itertools.product(readers, prompts)
    return [PromptJob.of(reader, prompt) for reader, prompt in pairs if prompt.length in reader.lengths]


def my_share(jobs: Sequence[Work], process: int, processes: int) -> tuple[Work, ...]:
    """Choose the jobs of one of several processes: about the same cost for each, the same split in each."""
    loads = [0.0] * processes
    mine = set()
    for job in sorted(jobs, key=lambda job: -job.cost):
        least = loads.index(min(loads))
        loads[least] += job.cost
        if least == process:
            mine.add(job.key)
    return tuple(job for job in jobs if job.key in mine)


@contextlib.contextmanager
def explain_out_of_memory(where: str, advice: str = LESS) -> Iterator[None]:
    """Turn an out-of-memory error into what the user has to know, and do: ``InvalidParameterError``."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):  # of a CPU
            raise
        raise InvalidParameterError(f"Out of memory at {where}. {advice}") from error
