"""One fit of `paper_scale`, timed, and its peak memory in a process of its own."""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.inference import scores
from pipelines.reproduce._experiment import Value
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.paper_scale import _engine as engine
from pipelines.reproduce.paper_scale import _sky as skies


@final
@dataclass(frozen=True)
class Task:
    """A fit to measure: the first `stars` of the sky in a file, on `shape` nodes."""

    sky: Path
    truth: skies.SkySettings
    shape: tuple[int, int, int]
    stars: int
    plan: engine.Plan
    threads: int = 1
    with_maps: bool = False


@final
@dataclass(frozen=True, eq=False)
class Maps:
    """Density in the plane z = 0 at the nodes of the truth: truth, posterior mean and std."""

    truth: Tensor
    mean: Tensor
    std: Tensor


Found = tuple[dict[str, Value], Maps | None]


def in_fresh_process(task: Task) -> Found:
    """`measure` in a new process, so that nothing else counts in its peak memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, task).result()


def draw_to_file(settings: skies.SkySettings, path: Path, *, fresh: bool) -> None:
    """Writes a sky, in a new process if `fresh`."""
    if not fresh:
        skies.save(skies.draw(settings), path)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(draw_to_file, settings, path, fresh=False).result()


def measure(task: Task) -> Found:
    """The fit and its scores. peak_gib is that of the whole process until now."""
    torch.set_num_threads(task.threads)
    sky = skies.load(task.sky)
    grid = RegularGrid.from_bounds(skies.LOWER, skies.UPPER, task.shape)
    fitted, seconds = stopwatch(lambda: engine.fit(sky.batch(task.stars), grid, task.plan))
    found, predict_s = stopwatch(lambda: held_out(sky, fitted.posterior))
    row: dict[str, Value] = {
        "N": task.stars,
        "M": grid.size,
        "samples": task.plan.samples,
        "predict_s": predict_s,
        "seconds": seconds + predict_s,
        "peak_gib": peak_gib(),
        **fitted.report,
        **found,
    }
    return row, maps(sky, task.truth, fitted.posterior) if task.with_maps else None


def held_out(sky: skies.Sky, posterior: AbstractPosterior) -> dict[str, Value]:
    """Scores of the noise-free extinctions of the held-out stars."""
    prediction = posterior.predict(sky.test())
    found = scores(sky.test_extinction, prediction.mean, prediction.variance).as_dict()
    chosen = ("rmse", "loglike", "chi2", "coverage68", "coverage95")
    std = float(prediction.variance.double().sqrt().mean())
    return {**{f"held_out_{key}": found[key] for key in chosen}, "held_out_mean_std": std}


def maps(sky: skies.Sky, truth: skies.SkySettings, posterior: AbstractPosterior) -> Maps:
    """The plane z = 0, where the truth has a layer of nodes."""
    x, y, z = truth.truth_grid().axes()
    middle = int(z.abs().argmin())
    plane = torch.cartesian_prod(x, y, z[middle : middle + 1])
    prediction = posterior.predict(PointValues(plane))
    shape = (len(x), len(y))
    return Maps(
        sky.truth[:, :, middle], prediction.mean.reshape(shape), prediction.std.reshape(shape)
    )


def peak_gib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
