"""dustmap status: how far runs are."""

import argparse
import json
import time
from pathlib import Path

from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import Commands, new
from dustmap.cli._tell import write

ABOUT = """\
running, finished, pre-empted, failed or interrupted (killed); its stage, the last numbers, when a
state was kept last, the time of each stage, and the status of its report. It reads metrics.jsonl
and report.json in RUN, and disturbs no run."""


def add(commands: Commands) -> None:
    command = new(
        commands,
        "status",
        "tell how far runs are",
        "status run1",
        "status array/run*            one line each",
        "status run1 --json",
        about=ABOUT,
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run")
    command.add_argument("--json", action="store_true", help="one JSON object a run, on stdout")


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import status_of

    with checking_input():
        found = [status_of(Path(run)) for run in options.runs]
    now = time.time()
    if options.json:
        lines = [json.dumps(status.as_dict()) for status in found]
    elif len(found) == 1:
        lines = found[0].lines(now)
    else:
        lines = [status.line(now) for status in found]
    write("\n".join(lines) + "\n")
    return DONE
