"""The directory of a run on several ranks: the first writes, and all go on from the same states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from dustmap.config import Config
from dustmap.inference import AbstractCheckpointer, State
from dustmap.linalg import AbstractWorld
from dustmap.runs.checkpoints._checkpointer import DiskCheckpoints, Notice
from dustmap.runs.checkpoints._directory import RunDirectory
from dustmap.runs.checkpoints._file import read_state
from dustmap.runs.checkpoints._written import STATES

_READY, _FOUND, _END = "ready", "found", "end"


def as_leader(directory: RunDirectory, world: AbstractWorld) -> RunDirectory:
    """The directory as the first rank sees it; the others, who wait for it, may look at it now."""
    if world.size == 1:
        return directory
    assert isinstance(directory.checkpoints, DiskCheckpoints)
    world.texts(_READY)
    return replace(directory, checkpoints=RankCheckpoints(directory.checkpoints, world))


@contextmanager
def as_follower(
    path: Path, config: Config, notice: Notice, world: AbstractWorld
) -> Iterator[RunDirectory]:
    """The directory as the other ranks see it, once the first has made it; they write nothing."""
    world.texts(_READY)
    checkpoints = DiskCheckpoints(path / STATES, config.compute.checkpoint_seconds, notice)
    yield RunDirectory(path, RankCheckpoints(checkpoints, world), world.rank)


@final
@dataclass(frozen=True)
class RankCheckpoints:
    """own: the checkpoints of the run's directory; only the first rank's has a state."""

    own: DiskCheckpoints
    world: AbstractWorld

    @property
    def notice(self) -> Notice:
        return self.own.notice

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    def checkpointer(self, scope: str) -> "RankCheckpointer":
        return RankCheckpointer(self, scope)


@final
@dataclass(frozen=True)
class RankCheckpointer(AbstractCheckpointer):
    """All ranks ask and keep at the same places; whoever is asked to end ends all of them."""

    checkpoints: RankCheckpoints
    scope: str

    def child(self, name: str) -> "RankCheckpointer":
        part = self.checkpoints.own.checkpointer(self.scope).child(name)
        return RankCheckpointer(self.checkpoints, part.scope)

    def load(self) -> State | None:
        own, world = self.checkpoints.own, self.checkpoints.world
        if self.checkpoints.leads:
            found = own.checkpointer(self.scope).load()
            world.texts(_FOUND if found is not None else "")
            return found
        if world.texts("")[0] != _FOUND:
            return None
        return read_state(own.path(self.scope), own.folder).state

    def save_if_due(self, make: Callable[[], State]) -> None:
        ending = self._ending()
        if self.checkpoints.leads:
            own = self.checkpoints.own
            if ending or own.due:
                own.write(self.scope, make())
            else:
                own.passes(self.scope, make)
        self._end_if(ending)

    def finish(self, result: State) -> None:
        ending = self._ending()
        if self.checkpoints.leads:
            self.checkpoints.own.write(self.scope, result)
            self.checkpoints.own.forget_parts(self.scope)
        self._end_if(ending)

    def _ending(self) -> bool:
        """Whether any rank was asked to end, before this exchange."""
        asked = _END if self.checkpoints.notice.pending else ""
        return _END in self.checkpoints.world.texts(asked)

    def _end_if(self, ending: bool) -> None:
        if ending:
            # The state is safe before any rank ends.
            self.checkpoints.world.texts("")
            self.checkpoints.notice.end()
