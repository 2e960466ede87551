"""Regression of a column on one to three others: the run of data.kind = "regression"."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from dustmap import config as configuration
from dustmap.config import Config, ModelConfig
from dustmap.engines import MOST_DENSE
from dustmap.errors import UserError
from dustmap.estimators import HIPGPRegressor
from dustmap.gp import RegularGrid
from dustmap.inference import State
from dustmap.linalg import AbstractWorld, unwatched
from dustmap.runs import _machine, reports
from dustmap.runs._interface import AbstractFinishedRun, AbstractRun, Plan, split_rows
from dustmap.runs.checkpoints import STATES, RunDirectory
from dustmap.runs.regression import _model
from dustmap.runs.regression._field import GriddedField, plot_field, predict_field, write_field
from dustmap.runs.regression._model import (
    LeftOut,
    Rows,
    grid_of,
    inputs_of,
    map_grid,
    read_rows,
)
from dustmap.runs.reports import Progress, Report, Stage
from dustmap.sky import Provenance, SchemaCard, save_figure
from dustmap.tables import (
    read_tables,
    refuse_taken,
    replacing,
    table_format,
    write_table,
)

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint/model"
#: The model without the held-out rows, until the run with that of all rows is finished.
LEARNED = f"{STATES}/learned"
ROWS = "checkpoint/rows.npz"
PICTURE = "plots/regression.png"
#: Rows of the matrix that threads are timed by, at most.
_TRIAL_ROWS = 600
#: Seconds of a run that is not learning: imports, predictions on a grid and pictures.
_OVERHEAD = 10.0


@final
@dataclass(frozen=True, eq=False)
class RegressionRun(AbstractRun):
    """Rows to learn from and rows held out, out of all rows; grid: the user's, if there is one."""

    config: Config
    rows: Rows
    train: Rows
    holdout: Rows
    left_out: LeftOut
    grid: RegularGrid | None

    @property
    def refits(self) -> bool:
        """Whether predictions are made from all rows, by a second fit."""
        return self.config.data.refit and len(self.holdout) > 0

    @property
    def mapped(self) -> Rows:
        """The rows that predictions are made from."""
        return self.rows if self.refits else self.train

    def plan(self) -> Plan:
        memory = _model.memory_of(self.config, self.mapped, self.grid, len(self.train))
        dim = self.train.X.shape[1]
        counts = {"engine": self.config.fit.engine, "device": "cpu", "inputs": dim}
        return Plan(counts | self.counts(), memory, self.config.compute.memory_bytes)

    def counts(self) -> dict[str, Any]:
        """Count the rows of the table by what became of them."""
        left_out = self.left_out.counts()
        return {
            "rows": len(self.rows) + sum(left_out.values()),
            "rows_fitted": len(self.train),
            "rows_held_out": len(self.holdout),
            "rows_in_the_map": len(self.mapped),
            **left_out,
        }

    def seconds(self) -> float:
        """Estimate the run, dense in the rows that learn, to an order of magnitude."""
        n = len(self.train)
        seconds = _OVERHEAD + _machine.dense_seconds(min(n, self.config.fit.learn_rows))
        if _model.may_be_dense(self.config, n):
            cubes = n**3 + (len(self.rows) ** 3 if self.refits else 0)
            seconds += cubes * _machine.seconds_per_operation()
        return _machine.rounded(seconds)

    def products(self) -> _machine.Products:
        return ((_machine.dense_trial(min(len(self.train), _TRIAL_ROWS)), 1.0),)

    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        del until  # it has one stage
        config, watch = self.config, reports.Stopwatch(on_stage=directory.record)
        model = self._learned(directory, watch, progress)
        with watch.stage("evaluate"):
            held_out = _model.score(model, self.holdout) if len(self.holdout) else None
        mapping = self._refitted(directory, watch, progress, model) if self.refits else model
        log.info("predicting on a grid")
        with watch.stage("map"):
            field = predict_field(mapping, config, map_grid(config, self.mapped))
        with watch.stage("export"):
            outputs = self._export(directory, field)
        learning = model.report_["learning"]
        objective = learning.get("start", learning).pop("objective", [])
        for step, value in enumerate(objective):
            directory.record(stage="learn", step=step, objective_per_row=value)
        directory.record(stage="fit", **_model.evidence_of(model))
        sections = _model.sections_of(model) | {
            "counts": self.counts(),
            "held_out_rows": {}
            if held_out is None
            else reports.labelled(held_out, reports.MEASURED),
            "refit": _model.refit_section(mapping) if self.refits else {},
            "stages": watch.as_dict(),
            "compute": {
                "device": "cpu",
                "dtype": "float64" if model.engine_ == "exact" else config.compute.dtype,
                "threads": torch.get_num_threads(),
                "memory": config.compute.memory,
            },
            "outputs": outputs,
        }
        picture = reports.Picture(PICTURE, "Prediction, its standard deviation, and the data")
        checks = _model.checks_of(model, held_out)
        if self.refits:
            checks += tuple(check.of_refit() for check in _model.checks_of_solver(mapping))
        return Report(configuration.sha256(config), sections, checks, (picture,))

    def _learned(
        self, directory: RunDirectory, watch: reports.Stopwatch, progress: Progress
    ) -> HIPGPRegressor:
        """Fit the rows that are not held out once, and load the model as later commands do."""
        name = LEARNED if self.refits else CHECKPOINT
        path = directory.path / name
        if not path.exists():
            model = _model.estimator_of(self.config, self.train, self.grid)
            log.info("fitting %d rows, engine %s", len(self.train), self.config.fit.engine)
            with watch.stage("fit"):
                model.fit(
                    self.train.X,
                    self.train.y,
                    noise_std=self.train.error,
                    progress=progress,
                    checkpointer=directory.checkpointer("learn"),
                )
            with watch.stage("checkpoint"):
                self._save(directory, model, name)
            del model  # two would be in memory
            directory.checkpointer("fit").finish(State({"model": name}))
        return HIPGPRegressor.load(path)

    def _refitted(
        self,
        directory: RunDirectory,
        watch: reports.Stopwatch,
        progress: Progress,
        learned: HIPGPRegressor,
    ) -> HIPGPRegressor:
        """Condition on all rows at the learned kernel and noise, once."""
        path = directory.path / CHECKPOINT
        if not path.exists():
            log.info("fitting all %d rows, for the map", len(self.rows))
            with watch.stage("refit"):
                model = learned.refit(
                    self.rows.X, self.rows.y, noise_std=self.rows.error, progress=progress
                )
            with watch.stage("checkpoint"):
                self._save(directory, model, CHECKPOINT)
            del model  # two would be in memory
        return HIPGPRegressor.load(path)

    def _save(self, directory: RunDirectory, model: HIPGPRegressor, name: str) -> None:
        """Write a model whole or not at all, after the rows of the map."""
        path = directory.path / name
        path.parent.mkdir(exist_ok=True)
        directory.write_arrays(ROWS, self.mapped.arrays())
        with replacing(path, False) as partial:
            model.save(partial)

    def _export(self, directory: RunDirectory, field: GriddedField) -> dict[str, str]:
        """Write maps and picture; return their names by what they are."""
        outputs = {form: f"map.{form}" for form in self.config.export.formats}
        made = provenance_of(self.config)
        for form, name in outputs.items():
            # What is there is whole: it was written before the run was interrupted.
            if not (directory.path / name).exists():
                write_field(directory.path / name, form, field, made, False)
        path = directory.path / PICTURE
        printed = [path.with_suffix(".pdf")] if self.config.export.pdf else []
        for file in (path, *printed):
            if not file.exists():
                save_figure(plot_field(field, self.mapped), file, history=made.history())
        return outputs | {"picture": PICTURE}


@final
@dataclass(frozen=True, eq=False)
class RegressionResult(AbstractFinishedRun):
    """The run's configuration, its fitted model, the rows it was fitted to, and what made it."""

    config: Config
    model: HIPGPRegressor
    rows: Rows
    made: Provenance

    def evaluate(
        self,
        catalog: Path,
        card: SchemaCard | str = "",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Score measured targets; rows outside the box by the run's policy, counted.

        Columns are those of the configuration: the card of stars says nothing of them. Rows that
        lack a value are left out and counted, too.
        """
        del card, progress
        if truth_column:
            raise UserError(
                f'--truth-column {truth_column} is for data.kind = "stars"; a regression is scored '
                "by its target"
            )
        if system:
            raise UserError(
                f'--system {system} is for data.kind = "stars"; a regression has no extinctions'
            )
        rows, left_out = read_rows((catalog,), self.config)
        scores = reports.labelled(_model.score(self.model, rows), reports.MEASURED)
        return scores | left_out.counts()

    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Add target_mean and target_std (of f, without noise); the inputs alone are needed.

        Rows that lack one, or have one that is not finite, get NaN, and are counted.
        """
        del card, progress
        table_format(output)  # before anything is computed
        table = read_tables(catalog)
        refuse_taken(table, ("target_mean", "target_std"))
        X = inputs_of(table, self.config.data)
        whole = np.isfinite(X).all(axis=1)
        predicted = np.full((2, len(X)), np.nan)
        if whole.any():
            predicted[:, whole] = self.model.predict(X[whole], return_std=True)
        table["target_mean"], table["target_std"] = predicted
        write_table(output, table, overwrite)
        counts = {"rows": len(table), "rows_without_inputs": int((~whole).sum())}
        return {**counts, "output": str(output)}

    def export(self, kind: str, output: Path, overwrite: bool) -> Mapping[str, Any]:
        """Write mean and standard deviation on the run's grid."""
        field = self.field()
        write_field(output, kind, field, self.made, overwrite)
        return {"output": str(output), "nodes": list(field.grid.shape)}

    def plot(self, slice_: str, output: Path, overwrite: bool, history: Sequence[str]) -> None:
        """Draw the picture of the run; slice_: `NAME=VALUE` of the third input, or empty."""
        inputs, height = self.config.data.inputs, None
        if slice_ and len(inputs) < 3:
            raise UserError(f"--slice {slice_}: a fit of {len(inputs)} inputs is drawn whole")
        if slice_:
            name, _, value = slice_.partition("=")
            try:
                height = float(value) if name == inputs[2] else None
            except ValueError:
                height = None
            if height is None:
                raise UserError(f"--slice {slice_}: expected {inputs[2]}=NUMBER, the third input")
        save_figure(plot_field(self.field(), self.rows, height), output, overwrite, history)

    def field(self) -> GriddedField:
        """Evaluate the posterior on the grid of the run's maps."""
        return predict_field(self.model, self.config, map_grid(self.config, self.rows))


def prepare_regression(
    config: Config, earlier: Path | None = None, world: AbstractWorld = _machine.ALONE
) -> RegressionRun:
    """Read and check all that the run needs; write nothing.

    earlier: of the same run, which has its model alone; the rows are read again.
    """
    del earlier
    if world.size > 1:
        raise UserError(
            f'data.kind = "regression" runs in one process, not on {world.size} ranks: start one'
        )
    if config.compute.device == "cuda":
        raise UserError('compute.device = "cuda": regression runs on the CPU; use "auto" or "cpu"')
    rows, left_out = read_rows(config.data.catalog, config)
    train, holdout = split_rows(config, len(rows), "rows", least=2)
    run = RegressionRun(config, rows, rows[train], rows[holdout], left_out, grid_of(config))
    _check_fit(config, len(run.mapped), run.grid)
    _model.estimator_of(config, run.train, run.grid)
    length = config.model.length
    if "length" not in config.model.learn and length == ModelConfig.length:
        log.warning(
            "model.length = %g, the default, is held for every input, for model.learn has no "
            '"length": name one in the units of the inputs, or have it learned',
            length,
        )
    return run


def open_regression(directory: RunDirectory, config: Config) -> RegressionResult:
    """Read the fitted model back; config: the run's, computing where and how it is now asked."""
    if config.compute.device == "cuda":
        raise UserError("--device cuda: a regression runs on the CPU; leave it out")
    model = HIPGPRegressor.load(directory.path / CHECKPOINT)
    rows = Rows.of_arrays(directory.read_arrays(ROWS))
    return RegressionResult(config, model, rows, provenance_of(directory.config()))


def provenance_of(config: Config) -> Provenance:
    """Return what the maps of a run carry in their headers."""
    return Provenance(configuration.sha256(config), (f"engine {config.fit.engine}",))


def _check_fit(config: Config, n: int, grid: RegularGrid | None) -> None:
    """Refuse settings of [fit] that a regression of n rows cannot have."""
    fit, dim = config.fit, len(config.data.inputs)
    if fit.epochs > 0:
        raise UserError(
            f"fit.epochs = {fit.epochs} is for stars: regression is solved in closed form; "
            f"leave it out or at 0"
        )
    if fit.engine == "exact" and n > MOST_DENSE:
        raise UserError(
            f'fit.engine = "exact" takes at most {MOST_DENSE:,} rows, and {n:,} are to be fitted: '
            f'use fit.engine = "auto", which takes what is next best'
        )
    if fit.engine not in _model.ON_GRID and grid is not None:
        log.info('fit.engine = "%s" needs no grid: [grid] says where maps are made', fit.engine)
    if fit.block and len(fit.block) != dim:
        raise UserError(
            f"fit.block = {list(fit.block)}: expected {dim} whole numbers, one for each of "
            f"data.inputs, or none"
        )
