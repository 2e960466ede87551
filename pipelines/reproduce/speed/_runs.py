"""Runs of `dustmap run` in processes of their own: seconds, memory and scores."""

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from pipelines.reproduce._experiment import Request, Row
from pipelines.reproduce._results import environment
from pipelines.reproduce._versions import ROOT, dustmap

#: A box of hyperparameters that are known, or where learning starts.
BOX = """
[data]
system = "A_V"
[grid]
size = {size}
spacing = {spacing}
[model]
kernel = "matern32"
noise = "gaussian"
length = 60
std = 1.0
mean_density = 0.001
learn = {learn}
[fit]
samples = 32
"""
_LEARNED = ["length", "std", "mean", "noise"]
#: Real directions and parallaxes, extinctions of a published map; all else as it comes.
SEMIREAL = """
[data]
system = "E(B-V)"
[grid]
size = [1200, 1200, 240]
spacing = 20
"""


@final
@dataclass(frozen=True)
class Case:
    """A run, of a simulated catalog (arguments of `dustmap simulate`) or of a data file.

    settings: beside those of the configuration. It is repeated, on so many threads, by turns with
    the earlier version where it is compared.
    """

    part: str
    config: str
    simulated: tuple[str, ...] = ()
    file: str = ""
    settings: tuple[str, ...] = ()
    repeats: int = 1
    threads: int = 1
    is_compared: bool = False


def cases(quick: bool) -> tuple[Case, ...]:
    """The embedded example; 20,000 stars on 600,000 nodes, known hyperparameters and learned ones;
    the paper's sample; many stars."""
    bare = ("export.formats=[]", "export.figures=[]")
    single = (*bare, "data.refit=false")
    coarse = ("grid.spacing=40pc", "fit.samples=4") if quick else ()
    nodes = {"size": [990, 990, 432], "spacing": 18 if quick else 9}
    fine, learned = (BOX.format(**nodes, learn=names) for names in ([], _LEARNED))
    known = BOX.format(size=[1000, 1000, 400], spacing=50 if quick else 20, learn=[])
    fewer = 100 if quick else 1

    def stars(count: int) -> tuple[str, ...]:
        return ("--stars", str(count // fewer))

    return (
        Case(
            "demo",
            _of_pipeline("demo"),
            ("--stars", "300" if quick else "5000"),
            settings=(*coarse, *single),
            repeats=1 if quick else 3,
            is_compared=True,
        ),
        Case("grid", fine, stars(20_000), settings=(*coarse[1:], *single), is_compared=True),
        Case("learned", learned, stars(20_000), settings=(*coarse[1:], *single), is_compared=True),
        Case(
            "ananke",
            _of_pipeline("ananke"),
            file="ananke_train.csv",
            settings=(*coarse, *single),
            repeats=1 if quick else 3,
            is_compared=not quick,
        ),
        Case("semireal", SEMIREAL, file="semireal_train.csv.gz", settings=coarse, threads=2),
        Case("many", known, stars(200_000), settings=(*coarse[1:], *single), threads=2),
        Case("millions", known, stars(2_000_000), settings=(*coarse[1:], *single), threads=2),
    )


def _of_pipeline(name: str) -> str:
    text = (ROOT / "pipelines" / f"{name}.toml").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("catalog"))


def measured(case: Case, request: Request, before: Path | None) -> Row:
    """Medians over the repeats of this version, and of the one in `before`, by turns."""
    versions = {"now": ROOT}
    if case.is_compared and before is not None:
        versions["before"] = before
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        catalog = _catalog(case, request, folder)
        (folder / "run.toml").write_text(case.config, encoding="utf-8")
        for _ in range(case.repeats):
            for name, tree in versions.items():
                found[name].append(_run(case, tree, folder, catalog))
    row: dict[str, Any] = {"part": case.part, "repeats": case.repeats, "threads": case.threads}
    row["cpu"] = environment(0.0)["cpu"]
    for name, taken in found.items():
        row |= {f"{key}_{name}": statistics.median(one[key] for one in taken) for key in taken[0]}
    if "before" in versions:
        row["ratio"] = row["cpu_s_before"] / row["cpu_s_now"]
    return row


def _catalog(case: Case, request: Request, folder: Path) -> Path:
    if case.file:
        return request.file(case.file).resolve()
    sky = folder / "sky.fits"
    arguments = [*case.simulated, "--seed", "3", "--error", "0.02", "--output", str(sky)]
    dustmap(ROOT, ["simulate", *arguments], 1)
    return sky


def _run(case: Case, tree: Path, folder: Path, catalog: Path) -> dict[str, float]:
    """One run of one version; the earlier one has no second fit of all stars."""
    own = [each for each in case.settings if tree == ROOT or not each.startswith("data.refit")]
    settings = [f"data.catalog={catalog}", f"compute.threads={case.threads}", *own]
    options = [part for each in settings for part in ("--set", each)]
    output = folder / "run"
    command = ["run", f"{folder}/run.toml", "--output", str(output), "--overwrite", *options]
    taken = dustmap(tree, command, case.threads)
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    scores = report["held_out_stars"]
    return taken | {key: float(scores[key]) for key in ("rmse", "coverage68")}
