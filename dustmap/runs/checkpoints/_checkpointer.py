"""The checkpointer of a run on disk: one file for each computation that has kept something.

A state is of use only where the computations around it are where they were when it was kept: a
climb of round 3 must not go on in round 0. So every file has its place: for each computation
around it the state that one had kept last, and how many more places it had passed since. Going on
from there passes the same places again, and finds the file when it gets to where it belongs.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, final

from dustmap.errors import UserError
from dustmap.inference import AbstractCheckpointer, State
from dustmap.runs.checkpoints._file import read_state, token_of, write_state

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX = ".npz"


class Notice(Protocol):
    """Whether somebody has asked the run to end, and how it ends then."""

    @property
    def pending(self) -> bool:
        """Asked, and waiting for a state to be kept."""

    def patiently(self) -> AbstractContextManager[None]:
        """Inside, a state will be kept before long: what is asked waits for it."""

    def end(self) -> NoReturn:
        """Ends the run."""


@final
class Undisturbed:
    """Nobody asks."""

    pending = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        yield

    def end(self) -> NoReturn:
        raise AssertionError("nobody has asked the run to end")


class Checkpoints(Protocol):
    """Gives the checkpointers of one run, and knows who may ask the run to end."""

    @property
    def notice(self) -> Notice: ...

    def checkpointer(self, scope: str) -> AbstractCheckpointer: ...


@final
@dataclass
class DiskCheckpoints:
    """What the checkpointers of one run share.

    folder: of their files; interval: seconds between two states; told: hears of each that is kept.
    """

    folder: Path
    interval: float
    notice: Notice = field(default_factory=Undisturbed)
    told: Callable[[str], None] = lambda scope: None
    clock: Callable[[], float] = time.monotonic
    last: float | None = None
    # Of each scope: the token of its last state, and the places passed since.
    passed: dict[str, tuple[str, int]] = field(default_factory=dict)
    # Scopes that have gone on from a state, and passed no place since.
    fresh: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.last is None:
            self.last = self.clock()

    @property
    def due(self) -> bool:
        assert self.last is not None
        return self.notice.pending or self.clock() - self.last >= self.interval

    def checkpointer(self, scope: str) -> "DiskCheckpointer":
        return DiskCheckpointer(self, scope)

    def write(self, scope: str, state: State) -> None:
        token = write_state(self.path(scope), scope, self.place(scope), state)
        self.passed[scope] = (token, 0)
        self.fresh.discard(scope)
        self.last = self.clock()
        self.told(scope)

    def read(self, scope: str) -> State | None:
        """The state kept for the place that the computation is at now, if there is one."""
        self.passed[scope] = ("", 0)
        path = self.path(scope)
        if not path.is_file():
            return None
        found = read_state(path, self.folder)
        if found.scope != scope:
            raise UserError(
                f"{path} is the state of {found.scope}, not of {scope}: delete "
                f"{self.folder} or start anew with --overwrite"
            )
        if found.place != self.place(scope):
            return None
        self.passed[scope] = (found.token, 0)
        self.fresh.add(scope)
        return found.state

    def passes(self, scope: str, make: Callable[[], State]) -> None:
        """The computation could have kept a state here, and has not."""
        token, count = self.passed.get(scope, ("", 0))
        if scope in self.fresh:
            self.fresh.discard(scope)
            # Some loops ask at once whether to keep the state that they have gone on from.
            if token_of(scope, self.place(scope), make()) == token:
                return
        self.passed[scope] = (token, count + 1)

    def place(self, scope: str) -> tuple[tuple[str, int], ...]:
        """Where the computations around `scope` are."""
        parts = scope.split(".")
        around = (".".join(parts[:i]) for i in range(1, len(parts)))
        return tuple(self.passed.get(name, ("", 0)) for name in around)

    def forget_parts(self, scope: str) -> None:
        """Removes what the parts of a computation have kept."""
        for path in self.folder.glob(f"{scope}.*{_SUFFIX}"):
            path.unlink()

    def path(self, scope: str) -> Path:
        return self.folder / f"{scope}{_SUFFIX}"


@final
@dataclass(frozen=True)
class DiskCheckpointer(AbstractCheckpointer):
    """scope: the name of the computation, after those it is a part of: `fit.round-0.climb`."""

    checkpoints: DiskCheckpoints
    scope: str

    def child(self, name: str) -> "DiskCheckpointer":
        if _NAME.fullmatch(name) is None:
            raise UserError(f"a part is called {name!r}; expected letters, digits, - and _")
        return DiskCheckpointer(self.checkpoints, f"{self.scope}.{name}")

    def load(self) -> State | None:
        found = self.checkpoints.read(self.scope)
        if found is not None:
            log.info("going on from what %s has kept", self.scope)
        return found

    def save_if_due(self, make: Callable[[], State]) -> None:
        if not self.checkpoints.due:
            self.checkpoints.passes(self.scope, make)
            return
        self.checkpoints.write(self.scope, make())
        if self.checkpoints.notice.pending:
            self.checkpoints.notice.end()

    def finish(self, result: State) -> None:
        self.checkpoints.write(self.scope, result)
        self.checkpoints.forget_parts(self.scope)
        if self.checkpoints.notice.pending:
            self.checkpoints.notice.end()


def last_saved(folder: Path) -> float | None:
    """When a state was kept last, in seconds since 1970; None where there is none."""
    times = [path.stat().st_mtime for path in folder.glob(f"*{_SUFFIX}")]
    return max(times, default=None)
