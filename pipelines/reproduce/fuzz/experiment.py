"""Ten thousand broken inputs: each is read, or refused in one line, and nothing else happens.

Files of every format, star stores, maps, runs, configurations, schema cards and command lines are
damaged at random: bits, bytes, blocks, numbers, words, JSON, nesting, files that are missing or
exchanged, links that lead out, pipes. An input fails that ends with an exception other than a
ValueError or an OSError of one line (for commands: exit code 2 and one line), takes more than 10 s
or 2 GiB, crashes, writes or leaves a file where none should be, starts a program, opens a
connection or unpickles anything. Every input can be made again from its kind and its number.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row
from pipelines.reproduce.fuzz import _figure as figure
from tests.fuzz.kinds import KINDS
from tests.fuzz.oracle import PATIENCE, ROOM, SECONDS, Verdict
from tests.fuzz.process import Input, Judged, inputs, judged_apart
from tests.fuzz.samples import make_samples

INPUTS, QUICK = 10_000, 120

log = logging.getLogger(__name__)


def run(request: Request) -> Outcome:
    """All kinds, in parts by their shares; quick is 120 inputs. As many at a time as torch has
    threads, each in a process of its own."""
    total, processes = QUICK if request.quick else INPUTS, torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="dustmap-fuzz-") as scratch:
        samples = Path(scratch, "samples")
        make_samples(samples)
        with ThreadPoolExecutor(processes) as pool:
            # The last take longest.
            waiting = [
                pool.submit(_of_kind, given, samples, Path(scratch))
                for given in reversed(inputs(total))
            ]
            found = [one for part in reversed(waiting) for one in part.result()]
    rows = [*_by_kind(found), *_failures(found)]
    settings: Row = {
        "inputs": len(found),
        "processes": processes,
        "seconds_at_most": SECONDS,
        "seconds_at_most_by_the_clock": PATIENCE,
        "bytes_at_most": ROOM,
    }
    return Outcome(settings, rows, goals(found, total), figure.draw(_by_kind(found)))


def _of_kind(given: Sequence[Input], samples: Path, scratch: Path) -> list[Judged]:
    with tempfile.TemporaryDirectory(dir=scratch) as sandbox:
        found = [_told(one) for one in judged_apart(given, samples, Path(sandbox))]
    log.info("%d inputs, %s", len(found), KINDS[given[0].kind].name)
    return found


def goals(found: Sequence[Judged], total: int) -> list[Goal]:
    """As many inputs as were wanted, and no failure."""
    failures = sum(not one.finding.verdict.good for one in found)
    slowest = max(one.finding.seconds for one in found)
    return [
        Goal.at_least("inputs", total, len(found)),
        Goal.at_most("failures of any kind", 0, failures),
        Goal.at_most("seconds of the slowest input", SECONDS, slowest),
    ]


def _told(one: Judged) -> Judged:
    if not one.finding.verdict.good:
        log.warning("%s %s: %s", one.given.seed, one.finding.verdict.value, one.finding.words[:300])
    return one


def _by_kind(found: Sequence[Judged]) -> list[Row]:
    rows: list[Row] = []
    for i, kind in enumerate(KINDS):
        mine = [one for one in found if one.given.kind == i]
        counts = Counter(one.finding.verdict for one in mine)
        seconds = [one.finding.seconds for one in mine]
        rows.append(
            {
                "part": "kinds",
                "kind": kind.name,
                "inputs": len(mine),
                **{verdict.value: counts[verdict] for verdict in Verdict},
                "failures": sum(n for verdict, n in counts.items() if not verdict.good),
                "mean_ms": 1000.0 * sum(seconds) / len(seconds),
                "slowest_s": max(seconds),
                "mutations": len({one.mutation for one in mine}),
            }
        )
    return rows


def _failures(found: Sequence[Judged]) -> list[Row]:
    """One row each, with what is needed to make the input again."""
    return [
        {
            "part": "failures",
            "input": one.given.seed,
            "mutation": one.mutation,
            "verdict": one.finding.verdict.value,
            "words": one.finding.words[:300],
        }
        for one in found
        if not one.finding.verdict.good
    ]
