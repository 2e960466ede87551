"""What every kind of run offers to the command line."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from dustmap.config import ComputeConfig
from dustmap.engines import MIB, MemoryPlan, shown, table_of
from dustmap.errors import UserError
from dustmap.linalg import Progress, unwatched
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Check, Report, Stage
from dustmap.sky import SchemaCard


@final
@dataclass(frozen=True)
class Plan:
    """What a run is about to do: counts and settings, what it holds in memory, and in which chunks.

    remedies: settings of the configuration with which it would fit, for one that does not; checks:
    those of the report that are known before anything is computed. The program itself, some 0.5 GiB
    of libraries, is not counted.
    """

    counts: Mapping[str, Any]
    memory: MemoryPlan
    bytes_allowed: int
    remedies: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def bytes_needed(self) -> int:
        """Of the part of the run that holds the most."""
        return self.memory.peak

    def check(self) -> None:
        """Refuses a plan that does not fit, before anything large is allocated."""
        if self.bytes_needed <= self.bytes_allowed:
            return
        largest = self.memory.largest
        remedies, machine = self.remedies, machine_bytes()
        if self.bytes_needed <= machine:
            remedies = (*remedies, f"--memory {math.ceil(self.bytes_needed / MIB)}MiB")
        told = f"it would fit with {' or '.join(remedies)}" if remedies else "take less at once"
        if self.bytes_needed > machine:
            told += f"; this machine has {shown(machine)} in all"
        raise UserError(
            f"the run needs {shown(self.bytes_needed)} and compute.memory allows "
            f"{shown(self.bytes_allowed)}; the largest part is {largest.name} with "
            f"{shown(largest.bytes)} ({largest.what}); {told}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "plan": dict(self.counts),
            "components": [component.as_dict() for component in self.memory.components],
            "chunks": dict(self.memory.chunks),
            "bytes_needed": self.bytes_needed,
            "bytes_allowed": self.bytes_allowed,
            "checks": [check.as_dict() for check in self.checks],
        }

    def lines(self) -> list[str]:
        """For people: what is planned, a table of what takes memory, and the chunks."""
        return [
            *(f"{name}: {_told(value)}" for name, value in self.counts.items()),
            "",
            *table_of(self.memory.components),
            "",
            f"at most {shown(self.bytes_needed)} at a time, beside the program itself; "
            f"{shown(self.bytes_allowed)} are allowed",
            *(f"{name}: {size}" for name, size in self.memory.chunks.items()),
            *(f"check {check}" for check in self.checks),
        ]


def _told(value: object) -> str:
    return " × ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class AbstractRun(ABC):
    """A run whose input has been read and found good; nothing has been written yet."""

    @abstractmethod
    def plan(self) -> Plan:
        """What `execute` would do."""

    @abstractmethod
    def check_until(self, until: Stage) -> None:
        """Refuses a stage that a run of this kind cannot end with."""

    @abstractmethod
    def seconds(self) -> float:
        """A rough estimate of how long `execute` takes."""

    @abstractmethod
    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        """Computes as far as `until`, writes every output but the report, and returns that."""


class AbstractFinishedRun(ABC):
    """A run that an earlier command has finished, with its posterior."""

    @abstractmethod
    def evaluate(
        self,
        catalog: Path,
        card: SchemaCard | str = "generic",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Scores of the measurements in another catalog, by a card or its name; and of the
        noise-free values in `truth_column`, unless it is empty. system: that of the extinctions,
        empty for what the catalog says."""

    @abstractmethod
    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Writes the catalog with columns of predictions; counts of its rows."""


def machine_bytes() -> int:
    """Memory of this machine: the processors', or that of a GPU where it has more."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = range(torch.cuda.device_count())
    return max(host, *(torch.cuda.get_device_properties(i).total_memory for i in gpus), 0)


def device_of(compute: ComputeConfig) -> torch.device:
    """The device that compute.device asks for."""
    available = torch.cuda.is_available()
    if compute.device == "cuda" and not available:
        raise UserError('compute.device = "cuda": torch finds no CUDA device here; use "cpu"')
    use_cuda = available and compute.device != "cpu"
    return torch.device("cuda" if use_cuda else "cpu")


def dtype_of(compute: ComputeConfig) -> torch.dtype:
    """The type of fields and products."""
    return {"float32": torch.float32, "float64": torch.float64}[compute.dtype]
