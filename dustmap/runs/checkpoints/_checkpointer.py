"""The checkpointer of a run on disk: one file for each computation that has saved a state.

A state is of use only where the computations around it are where they were when it was saved: a
state of learning in round 3 must not be loaded in round 0. So every file has its place: for each
computation around it the state that one had saved last, and how many more places it had passed
since. A resumed run passes the same places again, and finds the file at the place it belongs to.

Ranks ask and save at the same places. The first has the files; whoever is asked to end ends all.
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
from dustmap.linalg import AbstractWorld, Alone
from dustmap.runs.checkpoints._state_file import read_state, token_of, write_state

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX = ".npz"
_SAVED, _END = "saved", "end"


class Notice(Protocol):
    """Whether somebody has asked the run to end, and how it ends then."""

    @property
    def pending(self) -> bool:
        """Whether a request waits for a state to be saved."""

    def patiently(self) -> AbstractContextManager[None]:
        """Make a request wait for the state that the block saves before long."""

    def end(self) -> NoReturn:
        """End the run."""


@final
class Undisturbed:
    """Without anybody who asks the run to end."""

    pending = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def end(self) -> NoReturn:
        """Fail: nobody has asked for an end."""
        raise AssertionError("nobody has asked the run to end")


@final
@dataclass
class DiskCheckpoints:
    """The files, the clock and the ranks that the checkpointers of one run share.

    folder: of their files; interval: seconds between two states; world: the ranks of the run;
    on_write: called with the scope of each state that is saved.
    """

    folder: Path
    interval: float
    notice: Notice = field(default_factory=Undisturbed)
    world: AbstractWorld = field(default_factory=Alone)
    on_write: Callable[[str], None] = lambda scope: None
    clock: Callable[[], float] = time.monotonic
    last: float = field(init=False)
    # Of each scope: the token of its last state, and the places passed since.
    passed: dict[str, tuple[str, int]] = field(default_factory=dict)
    # Scopes that have loaded a state, and passed no place since.
    fresh: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.last = self.clock()

    @property
    def due(self) -> bool:
        return self.clock() - self.last >= self.interval

    def checkpointer(self, scope: str) -> "DiskCheckpointer":
        return DiskCheckpointer(self, scope)

    def write(self, scope: str, state: State) -> None:
        token = write_state(self.path(scope), scope, self.place(scope), state)
        self.passed[scope] = (token, 0)
        self.fresh.discard(scope)
        self.last = self.clock()
        self.on_write(scope)

    def read(self, scope: str) -> State | None:
        """Return the state of the place that the computation is at now, if there is one."""
        self.passed[scope] = ("", 0)
        path = self.path(scope)
        if not path.is_file():
            return None
        saved = read_state(path, self.folder)
        if saved.scope != scope:
            raise UserError(
                f"{path} is the state of {saved.scope}, not of {scope}: delete "
                f"{self.folder} or start anew with --overwrite"
            )
        if saved.place != self.place(scope):
            return None
        self.passed[scope] = (saved.token, 0)
        self.fresh.add(scope)
        log.info("going on from what %s has kept", scope)
        return saved.state

    def pass_by(self, scope: str, make: Callable[[], State]) -> None:
        """Count a place where a state could be saved, and is not."""
        token, count = self.passed.get(scope, ("", 0))
        if scope in self.fresh:
            self.fresh.discard(scope)
            # Some loops ask at once whether to save the state that they have just loaded.
            if token_of(scope, self.place(scope), make()) == token:
                return
        self.passed[scope] = (token, count + 1)

    def place(self, scope: str) -> tuple[tuple[str, int], ...]:
        """Return where the computations around `scope` are."""
        parts = scope.split(".")
        around = (".".join(parts[:i]) for i in range(1, len(parts)))
        return tuple(self.passed.get(name, ("", 0)) for name in around)

    def forget_parts(self, scope: str) -> None:
        """Remove the states of the parts of a computation."""
        for path in self.folder.glob(f"{scope}.*{_SUFFIX}"):
            path.unlink()

    def path(self, scope: str) -> Path:
        return self.folder / f"{scope}{_SUFFIX}"

    @contextmanager
    def ending(self) -> Iterator[bool]:
        """Yield whether any rank is asked to end; all do after the block, which saves a state."""
        asked = _END if self.notice.pending else ""
        ending = _END in self.world.texts(asked)
        yield ending
        if ending or (self.world.size == 1 and self.notice.pending):
            # The state is safe before any rank ends.
            self.world.texts("")
            self.notice.end()


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
        shared, leads = self.checkpoints, self._leads
        state = shared.read(self.scope) if leads else None
        saved = shared.world.texts(_SAVED if state is not None else "")[0]
        if saved and not leads:
            return read_state(shared.path(self.scope), shared.folder).state
        return state

    def save_if_due(self, make: Callable[[], State]) -> None:
        shared = self.checkpoints
        with shared.ending() as ending:
            if self._leads and (ending or shared.due):
                shared.write(self.scope, make())
            elif self._leads:
                shared.pass_by(self.scope, make)

    def finish(self, result: State) -> None:
        with self.checkpoints.ending():
            if self._leads:
                self.checkpoints.write(self.scope, result)
                self.checkpoints.forget_parts(self.scope)

    @property
    def _leads(self) -> bool:
        return self.checkpoints.world.rank == 0


def has_states(folder: Path) -> bool:
    """Whether a computation has saved a state in a folder."""
    return any(folder.glob(f"*{_SUFFIX}"))
