"""A finished regression: its posterior answers for any rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.estimators import HIPGPRegressor
from dustmap.linalg import Progress, unwatched
from dustmap.runs._run import AbstractFinishedRun
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.regression._data import Rows, grid_of, inputs_of, rows_of, within
from dustmap.runs.regression._field import GriddedField, plot_field, write_field
from dustmap.runs.regression._run import (
    CHECKPOINT,
    ROWS,
    map_grid,
    predict_field,
    score,
    stored_rows,
)
from dustmap.sky import Provenance, SchemaCard, save_figure
from dustmap.tables import read_tables, table_format, write_table


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
        card: SchemaCard | str = "generic",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Score measured targets; rows outside the box by the run's policy, counted.

        Columns are those of the configuration: the card of stars says nothing of them.
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
        every = rows_of(read_tables(catalog), self.config.data)
        rows = within(every, grid_of(self.config.grid, len(self.config.data.inputs)), self.config)
        scores = score(self.model, rows).as_dict()
        return scores | {"rows_dropped_outside_the_box": len(every) - len(rows)}

    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Add target_mean and target_std (of f, without noise); the inputs alone are needed."""
        del card, progress
        table_format(output)  # before anything is computed
        table = read_tables(catalog)
        X = inputs_of(table, self.config.data)
        table["target_mean"], table["target_std"] = self.model.predict(X, return_std=True)
        write_table(output, table, overwrite)
        return {"rows": len(table), "output": str(output)}

    def export(self, kind: str, output: Path, overwrite: bool) -> Mapping[str, Any]:
        """Write mean and standard deviation on the run's grid."""
        field = self.field()
        write_field(output, kind, field, self.made, overwrite)
        return {"output": str(output), "nodes": list(field.grid.shape)}

    def plot(self, slice_: str, output: Path, overwrite: bool, history: Sequence[str]) -> None:
        """Draw the picture of the run; slice_: `NAME=VALUE` of the third input."""
        name, equals, value = slice_.partition("=")
        inputs = self.config.data.inputs
        height = None
        if len(inputs) == 3 and equals and name == inputs[2]:
            height = float(value)
        save_figure(plot_field(self.field(), self.rows, height), output, overwrite, history)

    def field(self) -> GriddedField:
        """Evaluate the posterior on the grid of the run's maps."""
        grid = grid_of(self.config.grid, len(self.config.data.inputs))
        return predict_field(self.model, self.config, map_grid(grid, self.rows))


def open_regression(directory: RunDirectory, config: Config) -> RegressionResult:
    """Read the fitted model back; config: the run's, computing where and how it is now asked."""
    if config.compute.device == "cuda":
        raise UserError("--device cuda: a regression runs on the CPU; leave it out")
    path, own = directory.path, directory.config()
    made = Provenance(configuration.sha256(own), (f"engine {own.fit.engine}",))
    model = HIPGPRegressor.load(path / CHECKPOINT)
    return RegressionResult(config, model, stored_rows(path / ROWS), made)
