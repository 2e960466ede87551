"""`python -m pipelines.reproduce NAME`: run an experiment, write its table and figure.

Exit codes: 0 all goals met, 2 unknown experiment or missing data, 3 finished but a goal missed.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pipelines.reproduce import _results
from pipelines.reproduce._experiment import Experiment, Goal, MissingData, Request
from pipelines.reproduce._table import EXPERIMENTS, UnknownExperiment, find, find_full
from pipelines.reproduce._timing import stopwatch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
#: Reduced runs go here unless told otherwise, so that they never replace committed results.
TRIALS = ROOT / ".bench" / "reproduce"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.list or options.name is None:
        _say("\n".join(f"{e.name:16s} {e.description}" for e in EXPERIMENTS))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(options.threads)
    folder = options.output or (TRIALS if options.quick else RESULTS)
    try:
        experiment = (find_full if options.full else find)(options.name)
        only = tuple(options.only.split(",")) if options.only else ()
        earlier = _results.earlier_rows(folder, experiment.name) if only else ()
        request = Request(options.quick, options.data, only, earlier, options.limit)
        return _run(experiment, request, folder)
    except (UnknownExperiment, MissingData) as error:
        _complain(str(error))
        return 2


def _run(experiment: Experiment, request: Request, folder: Path) -> int:
    outcome, seconds = stopwatch(lambda: experiment.run(request))
    found = _results.document(experiment.name, request, outcome, seconds)
    paths = _results.write(folder, experiment.name, found, outcome)
    _say("\n".join([*(_sentence(goal) for goal in outcome.goals), *(str(p) for p in paths)]))
    return 0 if all(goal.met for goal in outcome.goals) else 3


def _sentence(goal: Goal) -> str:
    reached = "not measured" if goal.reached is None else f"{goal.reached:.4g}"
    return f"{'met   ' if goal.met else 'MISSED'} {goal.name}: {reached} (wanted {goal.wanted})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pipelines.reproduce", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment of --list")
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--quick", action="store_true", help="a reduced run of seconds")
    parser.add_argument(
        "--full",
        action="store_true",
        help="with the paper's own settings, for a GPU and hours; writes NAME-full.json",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=ROOT.parent / "shared" / "data",
        help="folder of the real data (default: ../shared/data beside the repository)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write (default: pipelines/reproduce/results, with --quick .bench/reproduce)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PART,..",
        help="of an experiment in parts, those to measure; the rows of the others stay",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="with --full: fits that would take longer are timed over a few steps",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
