"""Nothing is lost: kill -9 at random moments, and the outputs of runs that went on after it.

A small simulated sky with parallaxes, a log-normal density, every state kept
(`compute.checkpoint = 0`). An undisturbed run is timed; then `dustmap run --resume` is killed at
seeded random moments of its ingest, fit, sampling and export, and started again:

    run       every file to be seen after the kill is whole; after `--resume` all arrays of zarr,
              FITS and npz files, the report without its times and the hyperparameters are those of
              the undisturbed run, to the bit; nothing half written is left
    ingest    the same for `dustmap ingest`: its target is absent or whole, and the next one clears
              what the killed one has left
"""

import logging
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dustmap.runs import status_of
from dustmap.runs.checkpoints._state_file import read_state
from dustmap.sky.simulation import SkyModel, simulate, write_sky
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.kills import _figure as figure
from pipelines.reproduce.kills import _process as process
from pipelines.reproduce.kills._process import Window
from tests.run_outputs import differences, left_over, opened

_log = logging.getLogger(__name__)

SEED, STARS, SIZE, SPACING = 5, 400, (160.0, 160.0, 80.0), 20.0
#: Stars of the catalog that is ingested, so that it takes seconds.
INGEST_STARS = 100_000
KILLS, INGEST_KILLS = 50, 10
QUICK_KILLS, QUICK_INGEST_KILLS = 4, 2
CONFIG = f"""
[data]
catalog = "sky.fits"
holdout = 0.1
[grid]
size = {list(SIZE)}
spacing = {SPACING}
[model]
kernel = "matern32"
noise = "gaussian"
length = 40
[fit]
samples = 8
distance_rounds = 1
[export]
samples = 4
figures = ["slice", "above"]
[compute]
checkpoint = "0 s"
threads = 1
"""
_KILLED = "run-killed"
_RESUME = ("run", "run.toml", "--resume", "--output")
_INGEST = ("ingest", "many.fits", "--output")


def run(request: Request) -> Outcome:
    """50 kills of runs and 10 of ingests; quick is 4 and 2."""
    kills = QUICK_KILLS if request.quick else KILLS
    ingests = QUICK_INGEST_KILLS if request.quick else INGEST_KILLS
    chosen = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*_runs(folder, kills, chosen), *_ingests(folder, ingests, chosen)]
    return Outcome(settings(kills, ingests), rows, goals(rows), figure.draw(rows))


def settings(kills: int, ingests: int) -> Row:
    """What defines the experiment."""
    return {
        "stars": STARS,
        "size_pc": list(SIZE),
        "spacing_pc": SPACING,
        "seed": SEED,
        "kills_of_runs": kills,
        "kills_of_ingests": ingests,
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Nothing is lost, and the kills were kills."""
    total = {
        name: sum(number(row, name) for row in rows)
        for name in ("unreadable", "differences", "left_over", "killed")
    }
    return [
        Goal.at_most("files half written after a kill", 0.0, total["unreadable"]),
        Goal.at_most("outputs other than undisturbed", 0.0, total["differences"]),
        Goal.at_most("leftovers", 0.0, total["left_over"]),
        Goal.at_least("share of kills that met a process", 0.9, total["killed"] / len(rows)),
    ]


def _runs(folder: Path, kills: int, chosen: random.Random) -> list[Row]:
    write_sky(folder / "sky.fits", simulate(SkyModel(size=SIZE), STARS, SEED))
    (folder / "run.toml").write_text(CONFIG, encoding="utf-8")
    process.run(folder, [*_RESUME, "run"])
    found = process.windows(folder / "run")
    _log.info("undisturbed: %s", ", ".join(f"{w.name} {w.seconds:.2f} s" for w in found))
    return [
        _killed_run(folder, i, found[i % len(found)], chosen.uniform(0.0, 0.95))
        for i in range(kills)
    ]


def _killed_run(folder: Path, index: int, window: Window, part: float) -> Row:
    path, arguments = folder / _KILLED, [*_RESUME, _KILLED]
    killed = process.kill(folder, arguments, window, part)
    unreadable = _unreadable(path)
    before = status_of(path) if path.exists() else None
    seconds = process.run(folder, arguments)
    row: Row = {
        "part": "run",
        "kill": index,
        "stage": window.name,
        "after_s": part * window.seconds,
        "killed": int(killed),
        "state": "absent" if before is None else before.state,
        "a_state_was_kept": before is not None and before.kept is not None,
        "seconds_to_go_on": seconds,
        "unreadable": len(unreadable),
        "differences": len(differences(folder / "run", path)),
        "left_over": len(left_over(folder)),
    }
    _log.info("%s", row)
    shutil.rmtree(path)
    return row


def _unreadable(path: Path) -> list[str]:
    """Files of a run that was killed which cannot be read; hidden names are nobody's to read."""
    found = []
    files = [p for p in path.glob("*") if not p.name.startswith(".")]
    files += [p for p in (path / "checkpoint").rglob("*.*") if not p.name.startswith(".")]
    for file in files:
        try:
            if file.parent.name == "kept":
                read_state(file)
            else:
                opened(file)
        except Exception as error:
            _log.warning("%s: %s", file, error)
            found.append(str(file))
    return found


def _ingests(folder: Path, kills: int, chosen: random.Random) -> list[Row]:
    write_sky(folder / "many.fits", simulate(SkyModel(size=SIZE), INGEST_STARS, SEED))
    # Most of it is the start of Python, before anything is written.
    seconds = process.timed(folder, [*_INGEST, "whole.zarr"], _writes)
    whole = opened(folder / "whole.zarr")
    window = Window("ingest", _writes, seconds)
    _log.info("undisturbed: dustmap ingest writes for %.2f s", seconds)
    rows: list[Row] = []
    for i in range(kills):
        part, target = chosen.uniform(0.0, 0.95), folder / "stars.zarr"
        killed = process.kill(folder, [*_INGEST, "stars.zarr"], window, part)
        while not killed and part > 0.01:
            # It was done before: machines that others use keep no time.
            shutil.rmtree(target)
            part *= 0.5
            killed = process.kill(folder, [*_INGEST, "stars.zarr"], window, part)
        there = target.exists()
        unreadable = there and opened(target) != whole
        again = process.run(folder, [*_INGEST, "stars.zarr", "--overwrite"])
        row: Row = {
            "part": "ingest",
            "kill": i,
            "stage": "ingest",
            "after_s": part * window.seconds,
            "killed": int(killed),
            "state": "whole" if there else "absent",
            "a_state_was_kept": False,
            "seconds_to_go_on": again,
            "unreadable": int(unreadable),
            "differences": int(opened(target) != whole),
            "left_over": len(left_over(folder)),
        }
        _log.info("%s", row)
        rows.append(row)
        shutil.rmtree(target)
    return rows


def _writes(folder: Path) -> bool:
    return any(folder.glob(".partial-*"))
