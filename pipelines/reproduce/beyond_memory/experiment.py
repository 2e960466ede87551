"""Catalogs larger than memory, and millions of stars in one fit.

    ingest     20 million stars from Parquet files, cut and brought into the order of the sky
    pass       all of them once through Wᵀ Σ⁻¹ (y − W u), a chunk at a time
    sharing    rows of rays with cells of their own, in the order of the sky and in none, and
               through beams that they share: entries, bytes, times of products, errors
    fit        200,000 and 2 million stars from catalog to map by `dustmap run`

Every step is a process of its own; `--only PART,..` repeats some and keeps the rows of the others.
Catalogs and stores stay in .bench/beyond_memory (4 GB) and are used again.
"""

import functools
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import torch

from dustmap.sky.stars import open_star_store
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._watched import dustmap, in_fresh_process, measured, report_of
from pipelines.reproduce.beyond_memory import _figure as figure
from pipelines.reproduce.beyond_memory import _sky as skies
from pipelines.reproduce.beyond_memory._rows import Way, one_pass, sharing
from pipelines.reproduce.beyond_memory._sky import Sky

T = TypeVar("T")
_log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parents[3] / ".bench" / "beyond_memory"
PARTS = ("ingest", "pass", "sharing", "fit")
MINUTES, FIT_GIB, STREAM_GIB, DIFFERENCE = 15.0, 8.0, 2.0, 1e-5
CHI2 = 0.1
#: Curved, each of them costs as much as the mode.
SAMPLES = 4


@final
@dataclass(frozen=True)
class Scale:
    """Stars that are streamed, of `sharing`, and of every fit with the nside of its beams."""

    streamed: Sky
    shared: int
    fitted: tuple[tuple[Sky, int], ...]
    stride: int = 10


_SMALL, _LARGE = Sky(200_000, seed=1), Sky(2_000_000, files=2, seed=1)
FULL = Scale(
    Sky(20_000_000, margin=0.1, files=20),
    200_000,
    ((_SMALL, 0), (_SMALL, _SMALL.nside), (_LARGE, _LARGE.nside)),
)
_BOX = (200.0, 200.0, 100.0)
QUICK = Scale(
    Sky(3000, _BOX, spacing=20.0, margin=0.1, files=2, nside=8),
    500,
    ((Sky(400, _BOX, spacing=20.0, seed=1), 8),),
    stride=1,
)


def run(request: Request) -> Outcome:
    """The parts that are asked for, after the rows of an earlier run for the others."""
    scale = QUICK if request.quick else FULL
    wanted = request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    if request.quick:
        with tempfile.TemporaryDirectory() as folder:
            rows += _measure(scale, wanted, Path(folder), fresh=False)
    else:
        rows += _measure(scale, wanted, FOLDER, fresh=True)
    rows.sort(key=lambda row: PARTS.index(str(row["part"])))
    return Outcome(settings(scale), rows, goals(rows), figure.draw(rows))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        "streamed": scale.streamed.as_row(),
        "fitted": [sky.as_row() for sky, _ in scale.fitted],
        "samples": SAMPLES,
    }


def _measure(scale: Scale, parts: Sequence[str], folder: Path, fresh: bool) -> list[Row]:
    sky, place = scale.streamed, folder / "streamed"
    found: list[Row] = []
    store = place / "stars.zarr"
    if "ingest" in parts or (set(parts) - {"fit"} and not store.exists()):
        row = _told(ingest(sky, place, store))
        found += [row] if "ingest" in parts else []
    for way in _ways(scale) if "pass" in parts else ():
        work = functools.partial(one_pass, str(store), sky, way)
        found.append(_told(_called(fresh, work)))
    if "sharing" in parts:
        found += map(
            _told, _called(fresh, functools.partial(sharing, str(store), sky, scale.shared))
        )
    if "fit" in parts:
        found += [_told(fit(sky, nside, folder)) for sky, nside in scale.fitted]
    return found


def _ways(scale: Scale) -> list[Way]:
    return [
        Way("log-normal, beams", 1),
        Way("log-normal, own cells", scale.stride),
        Way("Gaussian, weights of order 2", 1),
    ]


def _called(fresh: bool, work: Callable[[], T]) -> T:
    return (in_fresh_process(work, torch.get_num_threads()) if fresh else measured(work))[0]


def _told(row: Row) -> Row:
    _log.info("%s", row)
    return row


def ingest(sky: Sky, folder: Path, store: Path) -> Row:
    """`dustmap ingest` of the files of a sky."""
    files = [str(path) for path in skies.write(sky, folder, processes=2 if sky.files > 1 else 1)]
    command = ["ingest", *files, "--schema", str(folder / "card.toml"), "--output", str(store)]
    taken = dustmap([*command, "--overwrite"])
    counts = open_star_store(store).attributes["catalog"]["counts"]
    return {
        "part": "ingest",
        "stars": counts["rows"],
        "cut": sum(counts["cuts"].values()),
        "kept": counts["kept"],
        **taken.as_row(),
        "stars_per_s_and_core": counts["rows"] / taken.cpu,
        "gib_of_files": sum(Path(file).stat().st_size for file in files) / 2**30,
        "gib_of_store": sum(file.stat().st_size for file in store.rglob("*")) / 2**30,
    }


def fit(sky: Sky, nside: int, folder: Path, *options: str) -> Row:
    """`dustmap ingest`, then `dustmap run` from the store to the map; hyperparameters known.

    options: more of them for the run.
    """
    place = folder / f"fitted{sky.stars}"
    store, run = place / "stars.zarr", place / f"run{nside}"
    if not store.exists():
        ingest(sky, place, store)
    threads = torch.get_num_threads()
    keys = {key: getattr(sky, key) for key in ("spacing", "length", "std", "median")}
    size = ", ".join(f"{length:g}" for length in sky.size)
    (place / "run.toml").write_text(
        skies.RUN.format(store=store, size=size, samples=SAMPLES, **keys) + f"threads = {threads}\n"
    )
    beams = ["--set", f"fit.beams={nside}"]
    command = ["run", str(place / "run.toml"), *beams, "--output", str(run), "--overwrite"]
    taken = dustmap([*command, *options], threads)
    report = report_of(run)
    held_out, rounds = report["held_out_stars"], report["fit"]
    peaks = [stage.get("peak_device_gib", 0.0) for stage in report["stages"]["stages"]]
    return {
        "part": "fit",
        "rows_of": f"beams, nside {nside}" if nside else "own cells",
        "stars": sky.stars,
        "columns": sky.grid().size,
        "threads": threads,
        **taken.as_row(),
        **({"peak_device_gib": max(peaks)} if any(peaks) else {}),
        **{f"{name}_s": seconds for name, seconds in report["seconds"].items()},
        "gauss_newton_and_mean_rounds": rounds["rounds"],
        "most_cg_steps_of_a_round": rounds["cg_steps"],
        "solver": rounds["solver"],
        **{f"held_out_{name}": held_out[name] for name in ("rmse", "chi2", "coverage68", "n")},
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Time, memory, agreement with products in memory, and a calibrated map."""
    streamed = [row for row in rows if row["part"] in ("ingest", "pass")]
    passes = [row for row in rows if row["part"] == "pass"]
    fits = [row for row in rows if row["part"] == "fit"]
    fits.sort(key=lambda row: number(row, "stars"))
    return [
        Goal.at_most("peak of ingest and pass, GiB", STREAM_GIB, _most(streamed, "peak_gib")),
        Goal.at_most("difference of a pass from memory", DIFFERENCE, _most(passes, "difference")),
        Goal.at_most("minutes of the longest ingest or pass", MINUTES, _minutes(streamed)),
        Goal.at_most("minutes of the largest fit", MINUTES, _minutes(fits[-1:])),
        Goal.at_most("peak of the largest fit, GiB", FIT_GIB, _most(fits[-1:], "peak_gib")),
        Goal.at_most(
            "|chi2 - 1| of its held-out stars",
            CHI2,
            max((abs(number(row, "held_out_chi2") - 1.0) for row in fits[-1:]), default=None),
        ),
    ]


def _most(rows: Sequence[Row], key: str) -> float | None:
    return max((number(row, key) for row in rows), default=None)


def _minutes(rows: Sequence[Row]) -> float | None:
    most = _most(rows, "seconds")
    return None if most is None else most / 60.0
