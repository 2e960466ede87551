"""Two scenes of land temperature by `HIPGPRegressor()`, beside kriging with 30 neighbours.

The data of the competition of Heaton et al. (2019, JABES 24, 398): MODIS temperatures (`sat`) and
a simulated twin (`sim`), 105,569 observed cells each. Of these, cloud-shaped patches with gaps as
wide as those of the missing cells are held out; the rest is fitted by the regressor without any
argument. Kriging predicts with the same kernel, hyperparameters and noise from the nearest data.
"""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from dustmap import HIPGPRegressor
from dustmap.gp import Prediction
from dustmap.inference import scores
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce._watched import measured
from pipelines.reproduce.heaton import _figure as figure
from pipelines.reproduce.heaton._kriging import LocalKriging
from pipelines.reproduce.heaton._problem import SEED, SHAPE, SHARE, Scene, load

_log = logging.getLogger(__name__)

SCENES = ("sat", "sim")
OURS = "HIPGPRegressor()"
#: Wanted: RMSE and CRPS in °C, coverage of the 95 % interval, RMSE over kriging's, and the cost of
#: a fit over that of one whose kernel is given.
RMSE: Mapping[str, float] = {"sat": 1.40, "sim": 0.83}
CRPS: Mapping[str, float] = {"sat": 0.76}
COVERAGE, RATIO, COST = (0.93, 0.97), 1.03, 2.0
#: RMSE of the competition's own hold-out, which is another one than here: context only.
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "sat": {
        "SPDE": 1.53,
        "LatticeKrig": 1.68,
        "periodic embedding": 1.79,
        "gapfill": 1.86,
        "laGP": 2.08,
    },
    "sim": {
        "SPDE": 0.86,
        "LatticeKrig": 0.87,
        "periodic embedding": 0.91,
        "gapfill": 1.00,
        "laGP": 1.11,
    },
}
_SCORES = ("n", "rmse", "mae", "crps", "loglike", "chi2", "coverage68", "coverage95")
#: Quantiles of the distances to the nearest datum.
_QUANTILES = (0.25, 0.5, 0.75, 0.9)


def run(request: Request) -> Outcome:
    """Both scenes, or those of `only`; quick is a corner of 40 × 60 cells."""
    wanted = request.wanted(SCENES)
    rows = [row for row in request.earlier if row["data"] not in wanted]
    maps: list[figure.Maps] = []
    for name in wanted:
        scene = load(request, name)
        small = HIPGPRegressor(n_learn=200, samples=8)
        found, picture = measure(scene, small if request.quick else HIPGPRegressor())
        rows += found
        maps.append(picture)
    return Outcome(settings_of(), rows, goals(rows), figure.draw(maps))


def measure(scene: Scene, estimator: HIPGPRegressor) -> tuple[list[Row], figure.Maps]:
    """The table of a scene, the estimator and kriging; and its maps."""
    x, y = scene.x.numpy(), scene.y.numpy()
    fitted, taken = measured(lambda: estimator.fit(x, y))
    everywhere = scene.places(torch.ones_like(scene.held_out)).numpy()
    (mean, std), predict_s = stopwatch(lambda: fitted.predict(everywhere, return_std=True))
    mean, std = torch.from_numpy(mean), torch.from_numpy(std)
    sigma, held = noise_of(fitted), scene.held_out.flatten()
    report, chosen = fitted.report_, fitted.kernel_choice_
    assert chosen is not None
    kernel_s = sum(candidate.seconds for candidate in chosen.candidates)
    given_s = report["seconds"]["learning"] + report["seconds"]["posterior"]
    own: Row = {
        **{"data": scene.name, "part": OURS, "engine": fitted.engine_, "n_train": len(y)},
        **scored(scene, sigma, Prediction(mean[held], std[held].square())),
        **taken.as_row(),
        **{"predict_s": predict_s, "kernel_choice_s": kernel_s, "cost": 1.0 + kernel_s / given_s},
        **{key: report[key] for key in ("grid_shape", "torus_shape", "solve") if key in report},
        **{"kernel": chosen.name, "hyperparameters": report["hyperparameters"]},
        **{"gaps": gaps(scene, scene.held_out), "gaps_of_the_missing": gaps(scene, None)},
    }
    rows = [own, *kriging_rows(scene, fitted)]
    for row in rows:
        _log.info("%s", row)
    shape = scene.values.shape
    return rows, figure.Maps(scene, mean.reshape(shape), std.reshape(shape))


def gaps(scene: Scene, which: Tensor | None) -> list[float]:
    """Quantiles of the distances in cells to the nearest datum, of cells held out or missing."""
    missing = ~scene.values.isfinite()
    hidden, asked = (missing, missing) if which is None else (missing | which, which)
    distances = distance_transform_edt(hidden.numpy())[asked.numpy()]
    return [float(v) for v in np.quantile(distances, _QUANTILES)] if len(distances) else []


def noise_of(fitted: HIPGPRegressor) -> float:
    """The learned standard deviation of the noise."""
    assert fitted.noise_std_ is not None
    return float(fitted.noise_std_)


def kriging_rows(scene: Scene, fitted: HIPGPRegressor) -> list[Row]:
    """Simple and ordinary kriging of the held-out cells."""
    sigma = noise_of(fitted)
    kriging = LocalKriging(fitted.kernel_, sigma, scene.x, scene.y)
    places, mean = scene.places(scene.held_out), float(fitted.mean_[0])
    calls = {
        "simple kriging": lambda: kriging.simple(places, mean),
        "ordinary kriging": lambda: kriging.ordinary(places),
    }
    rows: list[Row] = []
    for part, call in calls.items():
        prediction, seconds = stopwatch(call)
        found = scored(scene, sigma, prediction)
        rows.append({"data": scene.name, "part": part, **found, "seconds": seconds})
    return rows


def scored(scene: Scene, sigma: float, latent: Prediction) -> dict[str, float]:
    """Scores of the held-out temperatures, noise included."""
    found = scores(scene.y_test, latent.mean, latent.variance + sigma**2).as_dict()
    return {key: found[key] for key in _SCORES}


def goals(rows: list[Row]) -> list[Goal]:
    """Errors, coverage, and the cost of an open kernel."""
    found = []
    for name in SCENES:
        parts = {str(row["part"]): row for row in rows if row["data"] == name}
        if OURS not in parts:
            continue
        own = parts[OURS]
        found.append(Goal.at_most(f"{name}: RMSE", RMSE[name], number(own, "rmse")))
        if name in CRPS:
            found.append(Goal.at_most(f"{name}: CRPS", CRPS[name], number(own, "crps")))
        covered = f"{name}: coverage of the 95 % interval"
        found.append(Goal.at_least(covered, COVERAGE[0], number(own, "coverage95")))
        found.append(Goal.at_most(covered, COVERAGE[1], number(own, "coverage95")))
        best = min(number(parts[f"{kind} kriging"], "rmse") for kind in ("simple", "ordinary"))
        label = f"{name}: RMSE over that of kriging with 30 neighbours"
        found.append(Goal.at_most(label, RATIO, number(own, "rmse") / best))
        label = f"{name}: cost of a fit over that of one with the kernel given"
        found.append(Goal.at_most(label, COST, number(own, "cost")))
    return found


def settings_of() -> Row:
    """Everything that defines the experiment."""
    return {
        "cells": list(SHAPE),
        "held_out": "pattern of the missing cells, mirrored and shifted onto observed ones",
        "share_held_out": list(SHARE),
        "seed": SEED,
        "gaps": f"quantiles {_QUANTILES} of distances to the nearest datum, in cells",
        "threads": torch.get_num_threads(),
        "published_rmse": PUBLISHED,
        "published": "on the competition's hold-out, other patches than here: context only",
    }
