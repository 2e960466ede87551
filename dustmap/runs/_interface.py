"""The interface of a run of any kind before and after it is executed, and its plan."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.config import Config
from dustmap.engines import MIB, MemoryPlan, shown, table_of
from dustmap.errors import UserError
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import Products, machine_bytes
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Check, Report, Stage
from dustmap.sky import SchemaCard


@final
@dataclass(frozen=True)
class Plan:
    """Counts and settings of a run to come, and what it holds in memory in which chunks.

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
        """Whether the checks that are known before the run passed."""
        return all(check.passed for check in self.checks)

    @property
    def bytes_needed(self) -> int:
        """The bytes of the part of the run that holds the most."""
        return self.memory.peak

    def check(self) -> None:
        """Refuse a plan that does not fit, before anything large is allocated."""
        if self.bytes_needed <= self.bytes_allowed:
            return
        largest = self.memory.largest
        remedies, machine = self.remedies, machine_bytes()
        if self.bytes_needed <= machine:
            remedies = (*remedies, f"--memory {math.ceil(self.bytes_needed / MIB)}MiB")
        remedy = f"it would fit with {' or '.join(remedies)}" if remedies else "take less at once"
        if self.bytes_needed > machine:
            remedy += f"; this machine has {shown(machine)} in all"
        raise UserError(
            f"the run needs {shown(self.bytes_needed)} and compute.memory allows "
            f"{shown(self.bytes_allowed)}; the largest part is {largest.name} with "
            f"{shown(largest.bytes)} ({largest.what}); {remedy}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "plan": dict(self.counts),
            "components": [component.as_dict() for component in self.memory.components],
            "chunks": dict(self.memory.chunks),
            "bytes_needed": self.bytes_needed,
            "bytes_allowed": self.bytes_allowed,
            "checks": [check.as_dict() for check in self.checks],
        }

    def lines(self) -> list[str]:
        """Return counts, a table of what takes memory, and chunks, for people to read."""
        return [
            *(f"{name}: {_joined(value)}" for name, value in self.counts.items()),
            "",
            *table_of(self.memory.components),
            "",
            f"at most {shown(self.bytes_needed)} at a time, beside the program itself; "
            f"{shown(self.bytes_allowed)} are allowed",
            *(f"{name}: {size}" for name, size in self.memory.chunks.items()),
            *(f"check {check}" for check in self.checks),
        ]


def _joined(value: object) -> str:
    return " × ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def split_rows(
    config: Config, n: int, kind: str = "stars", least: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose rows of n to fit, `least` of them, and rows to hold out, ascending: the same ones for
    the same seed."""
    shuffled = np.random.default_rng(config.fit.seed).permutation(n)
    held = round(config.data.holdout * n)
    if n - held < least:
        raise UserError(
            f"data.holdout = {config.data.holdout:g} leaves {n - held or 'none'} of {n} {kind} to "
            f"fit; expected at least {least}"
        )
    return np.sort(shuffled[held:]), np.sort(shuffled[:held])


class AbstractRun(ABC):
    """A run whose input has been read and checked; nothing has been written yet."""

    @abstractmethod
    def plan(self) -> Plan:
        """Plan what `execute` would do."""

    @abstractmethod
    def seconds(self) -> float:
        """Estimate how long `execute` takes, roughly."""

    @abstractmethod
    def products(self) -> Products:
        """Make products as a run on the CPU computes them over and over, to be timed."""

    @abstractmethod
    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        """Compute as far as `until`, write every output but the report, and return that."""


class AbstractFinishedRun(ABC):
    """A run that an earlier command has finished, with its posterior."""

    @abstractmethod
    def evaluate(
        self,
        catalog: Path,
        card: SchemaCard | str = "",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Score the measurements in another catalog, which a card or its name describes.

        truth_column: of noise-free values, which have scores of their own; system: that of the
        extinctions. Either is empty for what the catalog says.
        """

    @abstractmethod
    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Write the catalog with columns of predictions; return counts of its rows."""
