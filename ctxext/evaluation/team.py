"""The processes that share an evaluation: one, or as many as a launcher started."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

__all__ = ["Team", "team_of_launcher"]

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
