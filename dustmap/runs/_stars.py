"""From a star catalog to a map of the dust: the run of data.kind = "stars"."""

import logging
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.gp import AbstractPosterior, Batch, Prediction, RegularGrid
from dustmap.gp.functionals import OutsidePolicy, PointValues
from dustmap.inference import Scores, scores
from dustmap.runs._directory import RunDirectory
from dustmap.runs._engines import engine_of
from dustmap.runs._grid import grid_of
from dustmap.runs._report import Check, Report, coverage_check
from dustmap.runs._run import AbstractRun, Plan, device_of
from dustmap.runs._stages import Stopwatch
from dustmap.runs._star_fit import Learning, StarFit
from dustmap.sky import (
    DustMap,
    Observations,
    Provenance,
    StarTable,
    observe,
    plot_slice,
    read_stars,
    save_figure,
    write_archive,
    write_map_fits,
    write_map_zarr,
)

log = logging.getLogger(__name__)

ARCHIVE = "stars.zarr"
HYPERPARAMETERS = "checkpoint/hyperparameters.json"
POSTERIOR = "checkpoint/posterior.npz"
NODES_AT_ONCE = 4096
#: What an engine may report -> the most that is sound, and what to do beyond.
LIMITS = {
    "cg_residual": (1e-3, "the posterior mean is not solved for: take float64 or a coarser grid"),
    "cg_columns_unconverged": (0.0, "raise fit.max_steps, take float64, or loosen fit.tolerance"),
    "wrap_error": (0.15, "length scale near the size of the box: take a larger box (grid.size)"),
    "rows_unconverged": (0.0, "raise fit.pcg_steps, take float64 or a coarser grid"),
    "residual_variance_over_noise": (1.0, "the grid leaves more than the noise: take a finer one"),
}
WRITERS = {"zarr": write_map_zarr, "fits": write_map_fits}


@final
@dataclass(frozen=True, eq=False)
class StarRun(AbstractRun):
    """Stars seen through the box, split into those to learn from and those held out.

    train, holdout: indices into the observations; truth: the density they were simulated from.
    """

    config: Config
    stars: StarTable
    grid: RegularGrid
    observed: Observations
    train: torch.Tensor
    holdout: torch.Tensor
    truth: DustMap | None

    def plan(self) -> Plan:
        counts = {
            "engine": self.config.fit.engine,
            "density": self.config.density,
            "device": str(device_of(self.config.compute)),
            **self.counts(),
        }
        needed = engine_of(self.config).bytes_needed(self.config, len(self.train), self.grid)
        return Plan(counts, needed, self.config.compute.memory_bytes)

    def counts(self) -> dict[str, Any]:
        """What became of the rows of the catalog, and the size of the map."""
        return {
            "stars": len(self.stars),
            "stars_fitted": len(self.train),
            "stars_held_out": len(self.holdout),
            "rays_truncated_at_the_box": self.observed.counts.truncated,
            "stars_dropped_outside_the_box": self.observed.counts.dropped,
            "nodes": list(self.grid.shape),
        }

    def execute(self, directory: RunDirectory) -> Report:
        watch = Stopwatch()
        write_archive(directory.path / ARCHIVE, self.stars)
        log.info("fitting %d stars, engine %s", len(self.train), self.config.fit.engine)
        with watch.stage("fit"):
            fit = engine_of(self.config).fit(self.config, self.data(self.train), None)
        _record_fit(directory, fit)
        with watch.stage("evaluate"):
            held_out = self.score(fit)
        with watch.stage("map"):
            density, clamped = predict_map(
                fit, self.grid, self.grid, self.stars.system, device_of(self.config.compute)
            )
        with watch.stage("export"):
            outputs = self.export(directory, density)
        sections: dict[str, dict[str, Any]] = {
            "counts": self.counts() | {"variances_clamped_to_zero": clamped},
            "hyperparameters": fit.hyperparameters.as_dict(),
            "fit": fit.summary | _learning(fit.learning),
            "held_out_stars": {} if held_out is None else held_out.as_dict(),
            "truth": {} if self.truth is None else truth_scores(density, self.truth),
            "stages": watch.as_dict(),
            "compute": _compute(self.config),
            "outputs": outputs,
        }
        return Report(configuration.sha256(self.config), sections, _checks(fit, held_out))

    def data(self, index: torch.Tensor) -> Batch:
        return self.observed.batch[index]

    def score(self, fit: StarFit) -> Scores | None:
        """Scores of the held-out stars, noise included; None if there are none."""
        if len(self.holdout) == 0:
            return None
        return score(fit, self.data(self.holdout))

    def export(self, directory: RunDirectory, density: DustMap) -> dict[str, str]:
        """Writes map and picture; their names by what they are."""
        provenance = Provenance(
            configuration.sha256(self.config),
            (f"engine {self.config.fit.engine}", f"{len(self.train)} stars fitted"),
        )
        outputs = {}
        for name in self.config.export.formats:
            WRITERS[name](directory.path / f"map.{name}", density, provenance)
            outputs[name] = f"map.{name}"
        height = density.axes()[2][density.nearest_slice(self.config.grid.center[2])]
        outputs["slice"] = f"plots/slice_z{height:+.0f}.png"
        save_figure(plot_slice(density, height, self.truth), directory.path / outputs["slice"])
        return outputs


def prepare_stars(config: Config) -> StarRun:
    """Reads and checks all that the run needs; writes nothing."""
    engine = engine_of(config)
    stars = read_stars(config.data.catalog, config.data.system or "A_V")
    truth = DustMap.open(config.data.truth) if config.data.truth else None
    run = assemble(config, stars, truth)
    if len(run.train) > engine.most_rows:
        raise ValueError(
            f'fit.engine = "{config.fit.engine}" takes at most {engine.most_rows:,} stars, and '
            f"{len(run.train):,} are left to fit; raise data.holdout or take a part of the catalog"
        )
    return run


def assemble(config: Config, stars: StarTable, truth: DustMap | None) -> StarRun:
    """Observations and split; the same configuration and stars give the same split."""
    grid = grid_of(config.grid)
    policy = OutsidePolicy(config.grid.outside)
    # The exact engine works in float64 whatever compute.dtype says.
    observed = observe(stars, grid, policy, torch.float64, device_of(config.compute))
    shuffled = np.random.default_rng(config.fit.seed).permutation(len(observed))
    held_out = round(config.data.holdout * len(observed))
    if held_out == len(observed):
        raise ValueError(
            f"data.holdout = {config.data.holdout:g} leaves none of {len(observed)} stars to fit"
        )
    holdout, train = np.sort(shuffled[:held_out]), np.sort(shuffled[held_out:])
    return StarRun(
        config, stars, grid, observed, torch.from_numpy(train), torch.from_numpy(holdout), truth
    )


def predict_map(
    fit: StarFit, grid: RegularGrid, own: RegularGrid, system: str, device: torch.device
) -> tuple[DustMap, int]:
    """Mean and standard deviation at the nodes, and how many variances were clamped to zero.

    own: the grid of the run, whose nodes an engine may have at hand.
    """
    at_hand = fit.at_nodes if grid == own else None
    parts = _predicted(fit.posterior, grid, device) if at_hand is None else [at_hand()]
    mean, std = (
        torch.cat([getattr(part, name) for part in parts]).cpu().double().numpy()
        for name in ("mean", "std")
    )
    return DustMap.from_nodes(grid, mean, std, system), sum(part.clamped for part in parts)


def _predicted(
    posterior: AbstractPosterior, grid: RegularGrid, device: torch.device
) -> list[Prediction]:
    """Densities at the nodes, a few thousand at a time."""
    points = grid.points(device=device)
    parts = []
    for start in range(0, len(points), NODES_AT_ONCE):
        log.info("map: %d of %d nodes", start, len(points))
        parts.append(posterior.predict(PointValues(points[start : start + NODES_AT_ONCE])))
    return parts


def score(fit: StarFit, data: Batch) -> Scores:
    """Scores of measured extinctions, whose noise is part of the predicted variance."""
    predicted = fit.posterior.predict(data.functional)
    assert data.noise_variance is not None
    noise = fit.hyperparameters.noise_variance(data.noise_variance)
    return scores(data.y, predicted.mean, predicted.variance + noise)


def truth_scores(density: DustMap, truth: DustMap) -> dict[str, Any]:
    """Scores of the true density at the nodes inside the truth's box, and the correlation."""
    true = truth.mean_at(density.grid.points().numpy())
    inside = np.isfinite(true)
    assert density.std is not None
    # Back from (z, y, x) to the order of the nodes.
    mean, std = (values.transpose().ravel()[inside] for values in (density.mean, density.std))
    correlation = float(np.corrcoef(mean, true[inside])[0, 1])
    columns = (torch.from_numpy(v.astype(np.float64)) for v in (true[inside], mean, std**2))
    return scores(*columns).as_dict() | {"correlation": correlation}


def _record_fit(directory: RunDirectory, fit: StarFit) -> None:
    directory.write_json(HYPERPARAMETERS, fit.hyperparameters.as_dict())
    directory.write_arrays(POSTERIOR, fit.arrays)
    for step, values in enumerate(() if fit.learning is None else fit.learning.trace):
        directory.record(stage="learn", step=step, **values)
    directory.record(stage="fit", **fit.summary, **fit.hyperparameters.as_dict())


def _learning(learning: Learning | None) -> dict[str, Any]:
    if learning is None:
        return {"learning": "none"}
    return {
        "learning": learning.status,
        "learning_evaluations": len(learning.trace),
        "learning_stars": learning.n_data,
        **learning.summary,
    }


def _checks(fit: StarFit, held_out: Scores | None) -> tuple[Check, ...]:
    found = []
    if fit.learning is not None:
        converged = float(fit.learning.converged)
        found.append(Check("learning converged", converged, 1.0, 1.0, fit.learning.remedy))
    for key, (most, advice) in LIMITS.items():
        if key in fit.summary:
            found.append(Check(key, float(fit.summary[key]), 0.0, most, advice))
    if held_out is not None:
        advice = "the errors of the catalog or the prior do not describe the data; see chi2"
        found.append(coverage_check("held-out stars", held_out, advice))
    return tuple(found)


def _compute(config: Config) -> dict[str, Any]:
    return asdict(config.compute) | {
        "device": str(device_of(config.compute)),
        "dtype": "float64" if config.fit.engine == "exact" else config.compute.dtype,
        "threads": torch.get_num_threads(),
    }
