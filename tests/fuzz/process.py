"""Runs inputs in a process of its own, which may crash or hang without an end to the others."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import final

import torch

from tests.fuzz.kinds import KINDS
from tests.fuzz.oracle import PATIENCE, Finding, Verdict, Watch, judge


@final
@dataclass(frozen=True)
class Input:
    """The input `number` of a kind: all that is needed to make it again."""

    kind: int
    number: int

    @property
    def seed(self) -> str:
        return f"{KINDS[self.kind].name}/{self.number}"


def inputs(total: int) -> list[list[Input]]:
    """At least one of each kind, and `total` together; the last kinds take what is left over."""
    parts = sum(kind.share for kind in KINDS)
    counts = [max(1, total * kind.share // parts) for kind in KINDS]
    counts[0] += max(0, total - sum(counts))
    return [[Input(kind, i) for i in range(count)] for kind, count in enumerate(counts)]


@final
@dataclass(frozen=True)
class Judged:
    """An input, the mutation that made it, and what came of it."""

    given: Input
    mutation: str
    finding: Finding


def judged(given: Input, samples: Path, sandbox: Path, watch: Watch) -> Judged:
    """Makes an input below `sandbox` and uses it, in this process."""
    random, kind = Random(given.seed), KINDS[given.kind]
    mutation = kind.prepare(samples, sandbox, random)
    return Judged(given, mutation, judge(lambda: kind.run(sandbox, random), sandbox, watch))


def judged_apart(inputs: Sequence[Input], samples: Path, sandbox: Path) -> Iterator[Judged]:
    """The same of many inputs in another process; a new one takes over where one ends early."""
    context, left = multiprocessing.get_context("fork"), list(inputs)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, left, samples, sandbox)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sender.close()
        for given in list(left):
            found = _received(receiver)
            left.pop(0)
            yield found or Judged(given, "?", Finding(Verdict.CRASH, "", float(PATIENCE)))
            if found is None:
                process.kill()
                break
        process.join()


def _received(receiver: Connection) -> Judged | None:
    try:
        return receiver.recv() if receiver.poll(PATIENCE + 20) else None
    except EOFError:
        return None


def _work(sender: Connection, inputs: Sequence[Input], samples: Path, sandbox: Path) -> None:
    torch.set_num_threads(1)
    watch = Watch().install()
    # What is left in the folder of temporary files is litter, too.
    os.environ["TMPDIR"] = tempfile.tempdir = str(sandbox / "out")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C libraries speak there
    for given in inputs:
        sender.send(judged(given, samples, sandbox, watch))
