"""How long runs of stars take, beside an earlier version and beside what a product needs at least.

Runs are `dustmap run` in processes of their own, on one thread, by turns: this tree, then the
earlier version from the repository's history. The limit of a Gram product of 8 vectors is the time
to read the rows and their transpose once at the bandwidth of a copy, and a real transform and its
inverse of every vector at the speed of transforms on their own.
"""

import functools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from matplotlib.figure import Figure

from dustmap.gp import GridPrior
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern12
from dustmap.linalg import SparseOperator
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._timing import time_together
from pipelines.reproduce.beyond_memory._sky import Sky

_log = logging.getLogger(__name__)

#: The version that runs are held beside, in the history of the repository.
BEFORE = "3f1bfc2"
#: Parts of the experiment: runs, and products.
PARTS = ("demo", "grid", "products")
#: Vectors of a product.
_VECTORS = 8
_ROOT = Path(__file__).resolve().parents[3]

GRID = """
[data]
catalog = "sky.fits"
system = "A_V"
[grid]
size = [990, 990, 432]
spacing = {spacing}
[model]
kernel = "matern32"
noise = "gaussian"
length = 60
std = 1.0
mean_density = 0.001
learn = []
[fit]
samples = 32
[compute]
threads = 1
[export]
formats = []
figures = []
"""


@final
@dataclass(frozen=True)
class Case:
    """A simulated sky, its configuration, and repeats of both versions."""

    part: str
    simulated: tuple[str, ...]
    config: str
    settings: tuple[str, ...]
    repeats: int


@final
@dataclass(frozen=True)
class Products:
    """Stars and spacing of the nodes in the box of `Sky`."""

    stars: int
    spacing: float


def cases(quick: bool) -> tuple[Case, ...]:
    """The embedded example, and 20,000 stars on 600,000 nodes."""
    demo = (_ROOT / "pipelines" / "demo.toml").read_text(encoding="utf-8")
    demo = demo.replace("../demo_output/sky.fits", "sky.fits")
    stars, many, spacing = ("300", "300", 18) if quick else ("5000", "20000", 9)
    coarse = ("grid.spacing=40pc", "fit.samples=4") if quick else ()
    figures = ("export.formats=[]", "export.figures=[]")
    return (
        Case("demo", ("--stars", stars), demo, (*coarse, *figures), 1 if quick else 3),
        Case("grid", ("--stars", many), GRID.format(spacing=spacing), coarse[1:], 1),
    )


def run(request: Request) -> Outcome:
    """Runs of both versions, and products beside their limits."""
    wanted = request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    with _earlier_tree() as before:
        for case in cases(request.quick):
            if case.part in wanted:
                rows.append(compared(case, before))
                _log.info("%s", rows[-1])
    if "products" in wanted:
        sizes = [Products(500, 40.0)] if request.quick else _sizes()
        rows += [product(size) for size in sizes]
    settings: Row = {"before": BEFORE, "vectors": _VECTORS, "threads": torch.get_num_threads()}
    return Outcome(settings, rows, goals(rows), draw(rows))


def _sizes() -> list[Products]:
    return [Products(5_000, 20.0), Products(80_000, 20.0), Products(20_000, 8.0)]


@contextmanager
def _earlier_tree() -> Iterator[Path | None]:
    """The earlier version in a folder of its own; None where the history does not reach it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "-C", str(_ROOT), "archive", BEFORE]
        made = subprocess.run(archive, capture_output=True)
        if made.returncode != 0:
            _log.warning("%s is not in the history of this repository", BEFORE)
            yield None
            return
        subprocess.run(["tar", "-x", "-C", folder], input=made.stdout, check=True)
        yield Path(folder)


def compared(case: Case, before: Path | None) -> Row:
    """CPU seconds of runs, by turns, and their scores."""
    versions = {"now": _ROOT} | ({} if before is None else {"before": before})
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as folder:
        sky = ["--seed", "3", "--error", "0.02", "--output", f"{folder}/sky.fits"]
        dustmap(_ROOT, ["simulate", *case.simulated, *sky])
        (Path(folder) / "run.toml").write_text(case.config, encoding="utf-8")
        for _ in range(case.repeats):
            for name, tree in versions.items():
                found[name].append(_run(case, tree, Path(folder)))
    row: dict[str, Any] = {"part": case.part, "repeats": case.repeats}
    for name, taken in found.items():
        row |= {f"{key}_{name}": statistics.median(one[key] for one in taken) for key in taken[0]}
    if before is not None:
        row["ratio"] = row["cpu_s_before"] / row["cpu_s_now"]
    return row


def _run(case: Case, tree: Path, folder: Path) -> dict[str, float]:
    """One fit of one version: without a second one of all stars, which the earlier has not."""
    settings = [*case.settings, *(("data.refit=false",) if tree == _ROOT else ())]
    options = [part for each in settings for part in ("--set", each)]
    output = folder / "run"
    cpu = dustmap(
        tree, ["run", f"{folder}/run.toml", "--output", str(output), "--overwrite", *options]
    )
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    scores = report["held_out_stars"]
    kept = {key: float(scores[key]) for key in ("rmse", "coverage68")}
    return {"cpu_s": cpu, **kept}


def dustmap(tree: Path, arguments: Sequence[str]) -> float:
    """CPU seconds of `dustmap ARGUMENTS` of a tree, on one thread; code 3 is no error."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    start = os.times()
    command = [sys.executable, "-m", "dustmap", *arguments]
    done = subprocess.run(command, env=os.environ | one, cwd=tree, capture_output=True, text=True)
    end = os.times()
    if done.returncode not in (0, 3):
        raise RuntimeError(f"dustmap {' '.join(arguments)}: {done.stderr[-2000:]}")
    return end.children_user + end.children_system - start.children_user - start.children_system


@torch.no_grad()
def product(case: Products) -> Row:
    """Seconds of L x, Lᵀ y and K x of 8 vectors, and of what they need at least."""
    sky = Sky(case.stars, (1000.0, 1000.0, 400.0), spacing=case.spacing)
    grid, half = sky.grid(), 0.5 * torch.tensor(sky.size, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    ends = half * (2.0 * torch.rand(case.stars, 3, dtype=torch.float64, generator=random) - 1.0)
    rows = interpolation(LineIntegrals.from_observer(ends), grid, memory=2**34)
    assert isinstance(rows, SparseOperator)
    prior = GridPrior.padded(Matern12(60.0, 1.0, dim=3), grid, dtype=torch.float32)
    x, y = torch.randn(_VECTORS, grid.size), torch.randn(_VECTORS, case.stars)
    torus = torch.randn(prior.torus_shape)
    source = torch.randn(2**26)
    target = torch.empty_like(source)
    calls = {
        "rows": functools.partial(rows.matmul, x),
        "transposed": functools.partial(rows.rmatmul, y),
        "covariance": functools.partial(prior.covariance().matmul, x),
        "copy": functools.partial(target.copy_, source),
        "transforms": functools.partial(_there_and_back, torus),
    }
    times = {name: timing.median for name, timing in time_together(calls).items()}
    bandwidth = 2.0 * source.numel() * source.itemsize / times["copy"]
    # The transforms of a box in the torus have no padding to transform: 1 + m/L + (m/L)² of 3 axes.
    parts = [m / length for m, length in zip(grid.shape, prior.torus_shape, strict=True)]
    share = (1.0 + parts[0] + parts[0] * parts[1]) / 3.0
    limit = rows.bytes / bandwidth + _VECTORS * share * times["transforms"]
    taken = times["rows"] + times["transposed"] + times["covariance"]
    return {
        "part": "products",
        "stars": case.stars,
        "nodes": grid.size,
        "torus": math.prod(prior.torus_shape),
        "entries": len(rows.matrix.values()),
        "rows_s": times["rows"] + times["transposed"],
        "covariance_s": times["covariance"],
        "bandwidth_gb_s": bandwidth / 1e9,
        "limit_s": limit,
        "fraction": limit / taken,
    }


def _there_and_back(x: torch.Tensor) -> torch.Tensor:
    back: torch.Tensor = torch.fft.irfftn(torch.fft.rfftn(x), x.shape)
    return back


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Four times less CPU time than the earlier version, and products at 60 % of their limit."""
    made = []
    for row in rows:
        if row["part"] == "products":
            name = f"fraction of the limit, {row['stars']:,} stars on {row['nodes']:,} nodes"
            made.append(Goal.at_least(name, 0.6, number(row, "fraction")))
        else:
            ratio = number(row, "ratio") if "ratio" in row else None
            made.append(Goal.at_least(f"{row['part']}: CPU time before / now", 4.0, ratio))
    return made


def draw(rows: Sequence[Row]) -> Figure:
    """CPU seconds of both versions."""
    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    axes = figure.add_subplot()
    runs = [row for row in rows if row["part"] != "products"]
    places = np.arange(len(runs))
    for shift, name, label in ((-0.2, "before", BEFORE), (0.2, "now", "this version")):
        bars = [number(row, f"cpu_s_{name}") if f"cpu_s_{name}" in row else 0.0 for row in runs]
        drawn = axes.bar(places + shift, bars, 0.38, label=label)
        axes.bar_label(drawn, fmt="%.0f")
    axes.set_xticks(places, [str(row["part"]) for row in runs])
    axes.set_ylabel("CPU seconds of a run on one thread")
    axes.legend()
    return figure
