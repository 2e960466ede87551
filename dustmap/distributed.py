"""The ranks of one job as one world: the only module that knows torch.distributed.

    dustmap run --ranks K ...                           on one machine
    torchrun --nproc-per-node K -m dustmap run ...      on any; srun does, too

NCCL carries tensors on GPUs and gloo those on CPUs. A rank that ends before the others ends the
job: whoever waits for it raises `RankLost`, which names it.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dustmap.errors import UserError
from dustmap.linalg import AbstractWorld, Alone

#: Seconds for which a rank may keep the others waiting.
TIMEOUT = 1800.0
#: Seconds between two signs of life of a rank, and for which one without is looked at.
_BEAT, _WATCH = 1.0, 3.5
#: The last words of a rank that others have left.
_CUT_OFF = "cut off from the others"
#: Gather equal parts into one tensor; before torch 2.13 it has its first name.
_gather: Callable[[Tensor, Tensor], object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


class _Store(Protocol):
    """The key-value store that all ranks see."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class RankLost(ConnectionError):
    """A rank ended, or kept the others waiting for too long."""


@contextmanager
def world_from_environment(timeout: float = TIMEOUT, gpu: bool = True) -> Iterator[AbstractWorld]:
    """The ranks that the environment speaks of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or
    this process alone.

    timeout: in seconds. gpu: whether to compute on GPUs where there are any; every rank takes
    that of its LOCAL_RANK, and more ranks than GPUs on a node are refused.

    Examples
    --------
    >>> with world_from_environment() as world:  # one process, unless a launcher has started more
    ...     world.rank, world.size, world.total(torch.tensor([1.0, 2.0]))
    (0, 1, tensor([1., 2.]))
    """
    size = _launched("WORLD_SIZE", 1)
    if size == 1:
        yield Alone()
        return
    if not timeout > 0:
        raise UserError(
            f"compute.timeout: expected more than 0 s of several ranks, got {timeout:g} s"
        )
    on_gpus = gpu and torch.cuda.is_available()
    if on_gpus:
        _take_gpu()
    world = _joined(_launched("RANK"), size, timeout)
    try:
        if on_gpus:
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            check_own_gpus(world, f"{socket.gethostname()}: GPU {device.uuid}")
        yield world
    except RankLost:
        world.leave(_CUT_OFF)
        raise
    except BaseException as error:
        world.leave(f"{type(error).__name__}: {error}")
        raise
    else:
        world.part()


def _launched(name: str, alone: int | None = None) -> int:
    """A number that a launcher of ranks has set in the environment; alone: where there is none."""
    written = os.environ.get(name)
    if written is None and alone is not None:
        return alone
    if written is None or not written.isdecimal():
        raise UserError(
            f"{name} = {written!r} in the environment: expected a whole number, as torchrun sets "
            "it beside WORLD_SIZE; unset WORLD_SIZE for one process"
        )
    return int(written)


def check_agreement(world: AbstractWorld, facts: Mapping[str, str]) -> None:
    """Refuses ranks that differ in any of these facts, saying which and how."""
    for name, mine in facts.items():
        said = world.texts(mine)
        for rank, other in enumerate(said):
            if other != said[0]:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {name}: {other} instead of {said[0]}; "
                    "start all ranks with the same command, files and version of dustmap"
                )


def check_own_gpus(world: AbstractWorld, gpu: str) -> None:
    """Refuses ranks that share a GPU, which NCCL waits for without end; gpu: this rank's."""
    said = world.texts(gpu)
    for rank, other in enumerate(said):
        if (first := said.index(other)) != rank:
            raise UserError(
                f"rank {rank} has the GPU of rank {first} ({other}), but every rank needs its own: "
                "start no more ranks on a node than it has GPUs, with LOCAL_RANK 0, 1, .. on each, "
                "or compute without GPUs: --device cpu"
            )


def _take_gpu() -> None:
    """Take the GPU of the LOCAL_RANK, which NCCL does not let two ranks share."""
    count, rank = torch.cuda.device_count(), _launched("LOCAL_RANK", 0)
    ranks = _launched("LOCAL_WORLD_SIZE", 1)
    if ranks > count:
        raise UserError(
            f"expected a GPU for each of the {ranks} ranks on this node, got {count} in all; start "
            f"no more than --nproc-per-node {count}, or compute without GPUs: --device cpu"
        )
    # A launcher that shows every rank only its own GPU calls each of them 0.
    torch.cuda.set_device(rank % count)


def _joined(rank: int, size: int, timeout: float) -> "ProcessGroup":
    wait = timedelta(seconds=timeout)
    # Ranks that never start are waited for as long as those that stop.
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=wait))
    except ValueError as error:
        raise UserError(
            f"{error}: start ranks by torchrun, srun or --ranks, which set it"
        ) from None
    store.set_timeout(wait)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} of {size} cannot join the others, one of which has ended or is out of "
            f"reach ({_cause_of(error)}); start the job again"
        ) from error
    return ProcessGroup(rank, size, store, timeout)


def _cause_of(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else "no reason given"


@final
class ProcessGroup(AbstractWorld):
    """Ranks that are processes of one torch.distributed group."""

    def __init__(self, rank: int, size: int, store: _Store, timeout: float) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._signs = _SignsOfLife(store, rank, size)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def total(self, part: Tensor) -> Tensor:
        assert not part.requires_grad, "sums over ranks have no derivative"
        # One layout on all ranks: that of batches of vectors, neighbours side by side.
        result = part.movedim(-1, 0) if part.ndim > 1 else part
        result = result.clone(memory_format=torch.contiguous_format)
        with self._naming_the_lost():
            dist.all_reduce(result)
        return result.movedim(0, -1) if part.ndim > 1 else result

    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        assert not part.requires_grad, "what ranks gather has no derivative"
        if counts is None:
            mine = torch.tensor([part.shape[-1]])
            counts = self.gathered(mine, [1] * self._size).tolist()
        rows, most = part.movedim(-1, 0), max(counts)
        if most == 0:
            return part
        # All ranks send as much: a row more or less, unless data have been picked.
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_empty(most - len(rows), *rows.shape[1:])])
        received = rows.new_empty(self._size * most, *rows.shape[1:])
        with self._naming_the_lost():
            _gather(received, rows.contiguous())
        if min(counts) < most:
            parts = zip(torch.split(received, most), counts, strict=True)
            received = torch.cat([part[:n] for part, n in parts])
        return received.movedim(0, -1)

    def part(self) -> None:
        """The end of this rank's part; others may go on alone."""
        self._signs.stop()
        dist.destroy_process_group()

    def leave(self, reason: str) -> None:
        """The end of this rank alone, before the others."""
        self._signs.stop(reason)
        # Threads of a group that is still there abort the interpreter when it ends.
        with suppress(RuntimeError):
            dist.destroy_process_group()

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        self._signs.exchanges += 1
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self._explained(error)) from error

    def _explained(self, error: RuntimeError) -> str:
        lost = {rank: reason for rank, reason in self._signs.others().items() if reason}
        here = f"rank {self._rank} of {self._size}"
        if lost:
            ends = "; ".join(f"rank {rank} {reason}" for rank, reason in lost.items())
            return (
                f"{here} cannot go on: {ends}; start the job again, with --resume where a "
                "checkpoint has been written"
            )
        late = [str(rank) for rank in self._signs.behind()]
        return (
            f"{here} waited {self._timeout:g} s for rank {', '.join(late) or '(unknown)'}, alive "
            f"but late, or lost the connection ({_cause_of(error)}); raise "
            "compute.timeout if a rank may be that slow"
        )


@final
class _SignsOfLife:
    """A thread that tells the others, through the store of the group, that this rank is alive, and
    how many exchanges it has begun."""

    def __init__(self, store: _Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.exchanges = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self, reason: str = "") -> None:
        """The last sign of this rank: why it ends, if there is something to say."""
        self._ended.set()
        self._thread.join(_WATCH)
        if reason:
            with suppress(RuntimeError):
                self._store.set(f"dustmap/ended/{self._rank}", reason)

    def others(self) -> dict[int, str]:
        """Return why each other rank ended, "" where it gives signs of life; takes some seconds."""
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        try:
            before = {rank: self._read(f"beat/{rank}") for rank in ranks}
            threading.Event().wait(_WATCH)
            return {rank: self._end(rank, before[rank]) for rank in ranks}
        except RuntimeError:
            # The store is with rank 0 where torchrun does not keep it.
            return {0: "has ended, and with it what the ranks knew of each other"}

    def behind(self) -> list[int]:
        """Ranks that have begun fewer exchanges than this one."""
        with suppress(RuntimeError):
            said = {rank: self._read(f"beat/{rank}") for rank in range(self._size)}
            counts = {rank: int(beat.split()[1]) for rank, beat in said.items() if beat}
            return [rank for rank, count in counts.items() if count < self.exchanges]
        return []

    def _beat(self) -> None:
        count = 0
        while not self._ended.is_set():
            try:
                self._store.set(f"dustmap/beat/{self._rank}", f"{count} {self.exchanges}")
            except RuntimeError:
                return  # nobody is left to tell
            count += 1
            self._ended.wait(_BEAT)

    def _end(self, rank: int, before: str) -> str:
        reason = self._read(f"ended/{rank}")
        if reason == _CUT_OFF:
            return ""
        if reason or self._read(f"beat/{rank}") != before:
            return reason and f"has ended ({reason})"
        return "has ended without a word (killed, or out of memory?)"

    def _read(self, key: str) -> str:
        name = f"dustmap/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else ""
