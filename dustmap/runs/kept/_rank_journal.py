"""The directory of a run on several ranks: the first writes, and all go on from the same states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from dustmap.config import Config
from dustmap.inference import AbstractJournal, Kept
from dustmap.linalg import AbstractWorld
from dustmap.runs.kept._directory import RunDirectory
from dustmap.runs.kept._file import read_kept
from dustmap.runs.kept._journal import Keeper, Notice
from dustmap.runs.kept._written import KEPT

_READY, _FOUND, _END = "ready", "found", "end"


def led(directory: RunDirectory, world: AbstractWorld) -> RunDirectory:
    """The directory as the first rank sees it; the others, who wait for it, may look at it now."""
    if world.size == 1:
        return directory
    assert isinstance(directory.keeper, Keeper)
    world.texts(_READY)
    return replace(directory, keeper=RankKeeper(directory.keeper, world))


@contextmanager
def following(
    path: Path, config: Config, notice: Notice, world: AbstractWorld
) -> Iterator[RunDirectory]:
    """The directory as the other ranks see it, once the first has made it; they write nothing."""
    world.texts(_READY)
    keeper = Keeper(path / KEPT, config.compute.checkpoint_seconds, notice)
    yield RunDirectory(path, RankKeeper(keeper, world), world.rank)


@final
@dataclass(frozen=True)
class RankKeeper:
    """own: the keeper of the run's directory; only the first rank's has a state."""

    own: Keeper
    world: AbstractWorld

    @property
    def notice(self) -> Notice:
        return self.own.notice

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    def journal(self, scope: str) -> "RankJournal":
        return RankJournal(self, scope)


@final
@dataclass(frozen=True)
class RankJournal(AbstractJournal):
    """All ranks ask and keep at the same places; whoever is asked to end ends all of them."""

    keeper: RankKeeper
    scope: str

    def within(self, name: str) -> "RankJournal":
        part = self.keeper.own.journal(self.scope).within(name)
        return RankJournal(self.keeper, part.scope)

    def latest(self) -> Kept | None:
        own, world = self.keeper.own, self.keeper.world
        if self.keeper.leads:
            found = own.journal(self.scope).latest()
            world.texts(_FOUND if found is not None else "")
            return found
        if world.texts("")[0] != _FOUND:
            return None
        return read_kept(own.path(self.scope), own.folder).kept

    def keep(self, make: Callable[[], Kept]) -> None:
        ending = self._ending()
        if self.keeper.leads:
            own = self.keeper.own
            if ending or own.due:
                own.write(self.scope, make())
            else:
                own.passes(self.scope, make)
        self._end_if(ending)

    def finish(self, result: Kept) -> None:
        ending = self._ending()
        if self.keeper.leads:
            self.keeper.own.write(self.scope, result)
            self.keeper.own.forget_parts(self.scope)
        self._end_if(ending)

    def _ending(self) -> bool:
        """Whether any rank was asked to end, before this exchange."""
        asked = _END if self.keeper.notice.pending else ""
        return _END in self.keeper.world.texts(asked)

    def _end_if(self, ending: bool) -> None:
        if ending:
            # The state is safe before any rank ends.
            self.keeper.world.texts("")
            self.keeper.notice.end()
