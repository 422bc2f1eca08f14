"""Ask every reader every prompt that is not yet answered."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import distributed, nn

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import Progress
from ctxext.evaluation.journal import TrialStore
from ctxext.evaluation.provenance import ExtensionRecord, Provenance
from ctxext.evaluation.retrieval.readers import Panel, Reader

__all__ = ["Prompt", "Survey", "Team", "Trial", "share_of", "team_of_launcher", "told_of_memory"]

Item = TypeVar("Item")
Found = TypeVar("Found")
# A process that is done waits for the slowest cell of the others, which may take hours.
PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True, eq=False)
class Team:
    """What one process knows of the others.

    Args:
        process: its number, from 0; process 0 is the main one, which talks and writes the report.
        processes: how many there are.
        device: where this process computes; None leaves it to the loading of the checkpoint.
        meet: returns when every process has called it.
    """

    process: int = 0
    processes: int = 1
    device: str | None = None
    meet: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.process == 0

    def spread(self, items: Sequence[Item], work: Callable[[Item], Found]) -> list[Found]:
        """Every process does its share of the items; all get what all found, in order."""
        mine = {number: work(items[number]) for number in range(self.process, len(items), self.processes)}
        shares: list[Any] = [mine]
        if self.processes > 1:
            shares = [None] * self.processes
            distributed.all_gather_object(shares, mine)
        found: dict[int, Found] = {number: one for share in shares for number, one in share.items()}
        return [found[number] for number in range(len(items))]


def team_of_launcher() -> Team:
    """The team that ``accelerate launch`` or ``torchrun`` started, each with a device of its own; else a team of one.

    The processes only wait for each other, so they meet over gloo on any device: nothing spins on a GPU meanwhile.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Team()
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=PATIENCE)
        atexit.register(distributed.destroy_process_group)
    found = torch.accelerator.current_accelerator()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"{found.type}:{local % torch.accelerator.device_count()}" if found else "cpu"
    meet: Callable[[], None] = distributed.barrier
    return Team(distributed.get_rank(), distributed.get_world_size(), device, meet)


# JSON values; what they mean is the task's.
Trial = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt and how to ask it.

    Args:
        name: to show.
        length: tokens that it and the reply fit into.
        identity: all that an answer depends on beside who reads, as JSON values.
        cost: of reading ``length`` tokens, see ``pass_cost``.
        ask: takes the model, the tokens that it is shown at most (None for all), and where to report the cost done.
    """

    name: str
    length: int
    identity: Any
    cost: Callable[[int], float]
    ask: Callable[[nn.Module, int | None, Progress, str], Trial]


@dataclass(frozen=True, eq=False)
class Job:
    """One reader and one prompt."""

    key: str
    cost: float
    reader: Reader
    prompt: Prompt
    window: int | None


class Survey:
    """A measurement before anything of it is measured; ``begin`` it, ``measure`` what is pending, take its ``trials``.

    Args:
        made_by: the command, for the file of trials.
        checkpoint: what is measured.
        panel: who reads.
        prompts: what is read.
        store: where trials are kept.
        team: the processes that share the work.
    """

    def __init__(
        self,
        made_by: str,
        checkpoint: Checkpoint,
        panel: Panel,
        prompts: Sequence[Prompt],
        *,
        store: TrialStore | None = None,
        team: Team | None = None,
    ) -> None:
        self.made_by = made_by
        self.checkpoint = checkpoint
        self.panel = panel
        self.store = store or TrialStore(None)
        self.team = team or Team()
        self.jobs = [_job(one, prompt) for one in panel.readers for prompt in prompts if prompt.length in one.lengths]

    @property
    def keys(self) -> set[str]:
        """Of all trials; readers who see the same of a prompt share one."""
        return {job.key for job in self.jobs}

    def begin(self) -> list[Job]:
        """Claim the file of trials and return the jobs that this process has to do.

        Raises:
            ResultsError: the file holds other trials, or cannot be written.
        """
        if self.team.is_main:
            name = f"{self.checkpoint.name} in {next(self.checkpoint.model.parameters()).dtype}"
            self.store.claim(self.made_by, {"name": name, "sha256": self.checkpoint.sha256})
        self.team.meet()
        finished = self.store.finished()
        self.team.meet()  # nobody writes before everybody has read, so that all see the same jobs pending
        pending = {job.key: job for job in reversed(self.jobs) if job.key not in finished}
        in_order = [job for job in self.jobs if pending.get(job.key) is job]
        return list(share_of(in_order, self.team.process, self.team.processes))

    def measure(self, jobs: Sequence[Job], *, progress: Progress = lambda *_: None) -> None:
        """Do jobs and keep each trial at once, then wait for the other processes. Models are at the end what they were.

        Args:
            jobs: from ``begin``.
            progress: called with what is being done and the cost done since the last call; the jobs' costs are the
                total.

        Raises:
            InvalidParameterError: a prompt does not fit into memory.
            CtxextError: as the task does; every finished trial is kept.
        """
        for reader in self.panel.readers:
            mine = [job for job in jobs if job.reader is reader]
            if not mine:
                continue
            with reader.wearing():
                for job in mine:
                    name = f"{reader.reading.label}, {job.prompt.name}"
                    with told_of_memory(name):
                        trial = job.prompt.ask(reader.model, job.window, progress, name)
                    self.store.add(job.key, reader.reading.name, trial)
        self.team.meet()

    def trials(self) -> list[tuple[Reader, list[Trial]]]:
        """What every reader answered, in the order of the prompts."""
        finished = self.store.finished()
        return [
            (reader, [finished[job.key] for job in self.jobs if job.reader is reader]) for reader in self.panel.readers
        ]

    def with_extensions(self, provenance: Provenance) -> Provenance:
        """The same, with how every reader reads."""
        found = {
            one.reading.name: ExtensionRecord(
                method=one.reading.method, fingerprint=one.reading.fingerprint, attention=one.reading.attention
            )
            for one in self.panel.readers
            if one.window is None
        }
        return Provenance(**{**provenance.__dict__, "extensions": found, "trained_length": self.panel.trained_length})


def _job(reader: Reader, prompt: Prompt) -> Job:
    window = reader.window if reader.window is not None and reader.window < prompt.length else None
    depends = {
        "setting": reader.setting,
        "trained_length": reader.wardrobe.trained_length,
        "reading": [reader.reading.method, reader.reading.fingerprint, window],
        "prompt": [prompt.length, prompt.identity],
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
    return Job(key, prompt.cost(window or prompt.length), reader, prompt, window)


@runtime_checkable
class Costed(Protocol):
    """A piece of work that one process does."""

    @property
    def key(self) -> str:
        """Its name, unlike every other's."""

    @property
    def cost(self) -> float:
        """In the units of ``pass_cost``."""


Piece = TypeVar("Piece", bound=Costed)


def share_of(cells: Sequence[Piece], process: int, processes: int) -> tuple[Piece, ...]:
    """The cells that one of several processes computes: about the same cost for each, the same split in each.

    Args:
        cells: those that are not finished, the same in every process.
        process: number of this one, from 0.
        processes: how many there are.
    """
    loads = [0.0] * processes
    mine = set()
    for cell in sorted(cells, key=lambda cell: -cell.cost):
        least = loads.index(min(loads))
        loads[least] += cell.cost
        if least == process:
            mine.add(cell.key)
    return tuple(cell for cell in cells if cell.key in mine)


@contextlib.contextmanager
def told_of_memory(where: str) -> Iterator[None]:
    """Turn an out-of-memory error into what the user has to know: ``InvalidParameterError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidParameterError(
            f"Out of memory at {where}. What is finished is kept; ask for smaller lengths, or run the same command on "
            f"a device with more memory."
        ) from error
