"""Regression of a column on one to three others: the run of data.kind = "regression"."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.engines import MOST_DENSE
from dustmap.errors import UserError
from dustmap.estimators import HIPGPRegressor
from dustmap.gp import RegularGrid
from dustmap.gp.kernels import kernel_named
from dustmap.inference import Scores, State, scores
from dustmap.linalg import AbstractWorld
from dustmap.runs._machine import ALONE, dense_seconds, rounded
from dustmap.runs._run import AbstractRun, Plan
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.regression._data import Rows, grid_of, rows_of, within
from dustmap.runs.regression._field import GriddedField, plot_field, write_field
from dustmap.runs.regression._memory import regression_memory
from dustmap.runs.reports import (
    Check,
    Picture,
    Progress,
    Report,
    Stage,
    Stopwatch,
    coverage_check,
)
from dustmap.sky import Provenance, save_figure
from dustmap.tables import read_tables, replacing

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint/model"
ROWS = "checkpoint/rows.npz"
PICTURE = "plots/regression.png"
# Nodes per axis of the maps of a run without a [grid], by the number of inputs.
MAP_NODES = {1: 500, 2: 120, 3: 32}
POINTS_AT_ONCE = 4096


@final
@dataclass(frozen=True, eq=False)
class RegressionRun(AbstractRun):
    """Rows to learn from and rows held out; grid: the user's, if there is one."""

    config: Config
    train: Rows
    holdout: Rows
    dropped: int
    grid: RegularGrid | None

    def plan(self) -> Plan:
        memory = regression_memory(self.config, self.train, self.grid)
        dim = self.train.X.shape[1]
        counts = {"engine": self.config.fit.engine, "device": "cpu", "inputs": dim}
        return Plan(counts | self.counts(), memory, self.config.compute.memory_bytes)

    def counts(self) -> dict[str, Any]:
        """What became of the rows of the table."""
        return {
            "rows": len(self.train) + len(self.holdout) + self.dropped,
            "rows_fitted": len(self.train),
            "rows_held_out": len(self.holdout),
            "rows_dropped_outside_the_box": self.dropped,
        }

    def check_until(self, until: Stage) -> None:
        if until is not Stage.EXPORT:
            raise UserError(
                f'--until {until.value}: a run with data.kind = "regression" has no such stage; '
                "leave it out"
            )

    def seconds(self) -> float:
        """Of the fit, dense in the rows that learn: an order of magnitude."""
        n = len(self.train) if self.config.fit.engine == "exact" else self.config.fit.learn_rows
        return rounded(dense_seconds(min(n, len(self.train))))

    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        del until, progress  # it has one stage, of seconds
        watch = Stopwatch(tell=directory.record)
        model = self._model(directory, watch)
        with watch.stage("evaluate"):
            held_out = score(model, self.holdout) if len(self.holdout) else None
        log.info("predicting on a grid")
        with watch.stage("map"):
            field = predict_field(model, self.config, self.map_grid())
        with watch.stage("export"):
            outputs = self.export(directory, field)
        objective = model.report_["learning"].pop("objective", [])
        for step, value in enumerate(objective):
            directory.record(stage="learn", step=step, objective_per_row=value)
        directory.record(stage="fit", **_evidence(model))
        sections = _sections(model) | {
            "counts": self.counts(),
            "held_out_rows": {} if held_out is None else held_out.as_dict(),
            "stages": watch.as_dict(),
            "compute": _compute(self.config),
            "outputs": outputs,
        }
        return Report(
            configuration.sha256(self.config),
            sections,
            _checks(model, held_out),
            (Picture(PICTURE, "Prediction, its standard deviation, and the data"),),
        )

    def _model(self, directory: RunDirectory, watch: Stopwatch) -> HIPGPRegressor:
        """The fitted model, as later commands will see it: what it has kept, read back."""
        kept = directory.path / CHECKPOINT
        if not kept.exists():
            model = estimator_of(self.config, self.train, self.grid)
            log.info("fitting %d rows, engine %s", len(self.train), self.config.fit.engine)
            with watch.stage("fit"):
                model.fit(self.train.X, self.train.y, noise_std=self.train.error)
            with watch.stage("checkpoint"):
                self.save(directory, model)
            directory.checkpointer("fit").finish(State({"model": CHECKPOINT}))
        return HIPGPRegressor.load(kept)

    def save(self, directory: RunDirectory, model: HIPGPRegressor) -> None:
        """The rows that pictures show, and the model, which is there when it is whole."""
        arrays = {"X": self.train.X, "y": self.train.y}
        if self.train.error is not None:
            arrays["error"] = self.train.error
        directory.write_arrays(ROWS, arrays)
        with replacing(directory.path / CHECKPOINT, False) as partial:
            model.save(partial)

    def map_grid(self) -> RegularGrid:
        """The nodes of the run's maps."""
        return map_grid(self.grid, self.train)

    def export(self, directory: RunDirectory, field: GriddedField) -> dict[str, str]:
        """Writes maps and picture; their names by what they are."""
        outputs = {}
        for kind in self.config.export.formats:
            outputs[kind] = f"map.{kind}"
            path = directory.path / outputs[kind]
            # What is there is whole: it was written before the run was interrupted.
            if not path.exists():
                write_field(path, kind, field, provenance(self.config), False)
        outputs["picture"] = PICTURE
        if not (directory.path / PICTURE).exists():
            history = provenance(self.config).history()
            save_figure(plot_field(field, self.train), directory.path / PICTURE, history=history)
        return outputs


def prepare_regression(
    config: Config, earlier: Path | None = None, world: AbstractWorld = ALONE
) -> RegressionRun:
    """Reads and checks all that the run needs; writes nothing.

    earlier: of the same run, which keeps its model alone; the rows are read again.
    """
    del earlier
    if world.size > 1:
        raise UserError(
            f'data.kind = "regression" runs in one process, not on {world.size} ranks: start one'
        )
    if config.compute.device == "cuda":
        raise UserError('compute.device = "cuda": regression runs on the CPU; use "auto" or "cpu"')
    found = rows_of(read_tables(*config.data.catalog), config.data)
    grid = grid_of(config.grid, len(config.data.inputs))
    rows = within(found, grid, config)
    train, holdout = _split(config, len(rows))
    run = RegressionRun(config, rows[train], rows[holdout], len(found) - len(rows), grid)
    _check_engine(config, len(train), grid)
    _check_block(config)
    estimator_of(config, run.train, grid)
    return run


def _split(config: Config, n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows to learn from and rows to hold out: the same ones for the same seed."""
    shuffled = np.random.default_rng(config.fit.seed).permutation(n)
    held_out = round(config.data.holdout * n)
    if n - held_out < 2:
        raise UserError(
            f"data.holdout = {config.data.holdout:g} leaves {n - held_out} of {n} rows to fit; "
            f"expected at least two"
        )
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def _check_engine(config: Config, n: int, grid: RegularGrid | None) -> None:
    if config.fit.epochs > 0:
        raise UserError(
            f"fit.epochs = {config.fit.epochs} is for stars: regression is solved in closed form; "
            f"leave it out or at 0"
        )
    if config.fit.engine != "exact":
        return
    if n > MOST_DENSE:
        raise UserError(
            f'fit.engine = "exact" takes at most {MOST_DENSE:,} rows, and {n:,} are left to fit: '
            f'use fit.engine = "global", which solves on a grid'
        )
    if grid is not None:
        log.info('fit.engine = "exact" needs no grid: [grid] says where the maps are made')


def _check_block(config: Config) -> None:
    dim = len(config.data.inputs)
    if config.fit.block and len(config.fit.block) != dim:
        raise UserError(
            f"fit.block = {list(config.fit.block)}: expected {dim} whole numbers, one for each of "
            f"data.inputs, or none"
        )


def estimator_of(config: Config, rows: Rows, grid: RegularGrid | None) -> HIPGPRegressor:
    """The estimator that a configuration describes."""
    model, fit = config.model, config.fit
    if "mean" not in model.learn:
        raise UserError(
            f'model.learn = {list(model.learn)}: a regression always learns its mean; add "mean"'
        )
    names = {"length": "length", "std": "variance", "noise": "noise", "mean": "mean"}
    on_grid = fit.engine in ("hip", "global")
    return HIPGPRegressor(
        _kernel(config, rows),
        engine=fit.engine,
        grid=grid if on_grid and grid is not None else "auto",
        family=fit.family,
        block=fit.block or None,
        rank=fit.rank,
        whitening=fit.whitening,
        noise=_noise(config),
        learn=tuple(names[name] for name in model.learn),
        n_learn=fit.learn_rows,
        max_steps=fit.max_steps,
        samples=fit.samples,
        dtype=config.compute.dtype,
        max_memory=config.compute.memory_bytes,
        random_state=fit.seed,
    )


def _kernel(config: Config, rows: Rows) -> Any:
    """A name where all is learned, from the data's own scales; else model.length and model.std."""
    model = config.model
    if {"length", "std"} <= set(model.learn):
        return model.kernel
    lengths = [model.length] * rows.X.shape[1]
    if "length" in model.learn:
        lengths = [float(spread) or 1.0 for spread in rows.X.std(axis=0)]
    std = float(rows.y.std()) or 1.0 if "std" in model.learn else model.std
    return kernel_named(model.kernel, lengths, std**2)


def _noise(config: Config) -> str:
    learned = "noise" in config.model.learn
    if config.data.error:
        return "scale" if learned else "given"
    if not learned:
        raise UserError(
            f"model.learn = {list(config.model.learn)} without data.error: expected a column of "
            f'standard errors, or "noise" among what is learned'
        )
    return "learn"


def score(model: HIPGPRegressor, rows: Rows) -> Scores:
    """Scores of measurements, whose noise is part of the predicted variance."""
    mean, std = model.predict(rows.X, return_std=True, include_noise=True, noise_std=rows.error)
    return scores(*(torch.from_numpy(values) for values in (rows.y, mean, std**2)))


def map_grid(grid: RegularGrid | None, rows: Rows) -> RegularGrid:
    """The user's grid, or one over the data."""
    if grid is not None:
        return grid
    lower, upper = rows.X.min(axis=0), rows.X.max(axis=0)
    flat = upper <= lower
    upper = np.where(flat, lower + 1.0, upper)  # a constant input still has an axis
    shape = (MAP_NODES[rows.X.shape[1]],) * rows.X.shape[1]
    return RegularGrid.from_bounds(lower.tolist(), upper.tolist(), shape)


def predict_field(model: HIPGPRegressor, config: Config, grid: RegularGrid) -> GriddedField:
    """Mean and standard deviation of f at the nodes."""
    points = grid.points().numpy()
    parts = []
    for start in range(0, len(points), POINTS_AT_ONCE):
        log.debug("map: %d of %d nodes", start, len(points))
        parts.append(model.predict(points[start : start + POINTS_AT_ONCE], return_std=True))
    mean, std = (np.concatenate(values).reshape(grid.shape) for values in zip(*parts, strict=True))
    return GriddedField(grid, mean, std, config.data.inputs, config.data.target)


def provenance(config: Config) -> Provenance:
    """Where the maps of a run come from."""
    return Provenance(configuration.sha256(config), (f"engine {config.fit.engine}",))


def _evidence(model: HIPGPRegressor) -> dict[str, float]:
    """What the engine knows of ln p(y); the global one knows its gradient only."""
    names = {"exact": ("log_evidence", "log_evidence_"), "hip": ("evidence_lower_bound", "elbo_")}
    if model.engine_ not in names:
        return {}
    name, attribute = names[model.engine_]
    return {name: float(getattr(model, attribute))}


def _sections(model: HIPGPRegressor) -> dict[str, dict[str, Any]]:
    """The estimator's report, flat enough for a table."""
    report = dict(model.report_)
    learned = dict(report.pop("hyperparameters"))
    (term,) = learned.pop("kernel")  # a configuration names one kernel
    nested = {name: report.pop(name) for name in list(report) if isinstance(report[name], dict)}
    nested["seconds_of_the_fit"] = nested.pop("seconds")
    return {
        "hyperparameters": term | learned,
        "fit": report | _evidence(model),
        **{name: section for name, section in nested.items() if section},
    }


def _checks(model: HIPGPRegressor, held_out: Scores | None) -> tuple[Check, ...]:
    found = []
    status = model.report_["learning"]["status"]
    # An input that does not matter has a length scale without bound, which is no failure.
    learned = float(status in ("converged", "at_bound", "nothing to learn"))
    advice = f"learning ended as {status}: raise fit.max_steps, or start from another seed"
    found.append(Check("learning converged", learned, 1.0, 1.0, advice))
    if model.engine_ in ("hip", "global"):
        report = model.report_
        solved = float(report["solve"]["status"] == "converged")
        told = "; ".join(report["advice"]) or "nothing to do"
        found.append(Check("solver converged", solved, 1.0, 1.0, told))
        ratio = report["residual_ratio"]
        found.append(Check("unexplained variance over noise", ratio, 0.0, 1.0, told))
    if held_out is not None:
        advice = "the noise or the kernel does not describe the data; see chi2"
        found.append(coverage_check("held-out rows", held_out, advice))
    return tuple(found)


def _compute(config: Config) -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float64" if config.fit.engine == "exact" else config.compute.dtype,
        "threads": torch.get_num_threads(),
        "memory": config.compute.memory,
    }


def stored_rows(path: Path) -> Rows:
    """What `RegressionRun.save` kept."""
    with np.load(path, allow_pickle=False) as stored:
        error = stored["error"] if "error" in stored.files else None
        return Rows(stored["X"], stored["y"], error)
