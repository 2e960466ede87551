"""A finished map of the dust: its posterior answers for any star, place or grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from astropy import units as u
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, PointValues
from dustmap.runs._directory import RunDirectory
from dustmap.runs._engines import engine_of
from dustmap.runs._run import AbstractFinishedRun
from dustmap.runs._star_fit import Hyperparameters, StarFit
from dustmap.runs._stars import (
    ARCHIVE,
    HYPERPARAMETERS,
    POSTERIOR,
    WRITERS,
    StarRun,
    assemble,
    predict_map,
    score,
)
from dustmap.sky import Provenance, cartesian, observe, read_archive, read_places, read_stars
from dustmap.sky import write_table as write_catalog

# Column -> unit of what `predict` adds.
PREDICTED = {
    "extinction_mean": u.mag,
    "extinction_std": u.mag,
    "density_mean": u.mag / u.pc,
    "density_std": u.mag / u.pc,
}


@final
@dataclass(frozen=True, eq=False)
class StarMap(AbstractFinishedRun):
    """The run, as it was, and the posterior at the hyperparameters it had learned."""

    run: StarRun
    fit: StarFit

    @property
    def device(self) -> torch.device:
        return self.run.observed.batch.y.device

    def evaluate(self, catalog: Path) -> Mapping[str, Any]:
        """Scores of measured extinctions; stars outside the box by the run's policy, counted."""
        stars = read_stars([catalog], self.run.stars.system)
        policy = OutsidePolicy(self.run.config.grid.outside)
        observed = observe(stars, self.run.grid, policy, torch.float64, self.device)
        return score(self.fit, observed.batch).as_dict() | {
            "rays_truncated_at_the_box": observed.counts.truncated,
            "stars_dropped_outside_the_box": observed.counts.dropped,
        }

    def predict(self, catalog: Path, output: Path, overwrite: bool) -> Mapping[str, Any]:
        table, positions = read_places(catalog)
        columns = self.at(positions)
        for name, values in columns.items():
            table[name] = values * PREDICTED[name]
        write_catalog(output, table, overwrite)
        outside = int(np.isnan(columns["density_mean"]).sum())
        return {"rows": len(table), "rows_outside_the_box": outside, "output": str(output)}

    def query(self, l: float, b: float, distance: float) -> Mapping[str, float]:
        """Predictions at one place, in degrees and pc."""
        values = self.at(cartesian([l], [b], [distance]))
        if np.isnan(values["density_mean"][0]):
            raise ValueError(
                f"l = {l:g}, b = {b:g}, distance = {distance:g} pc is outside the box "
                f"{self.run.grid.lower} to {self.run.grid.upper} pc"
            )
        return {name: float(column[0]) for name, column in values.items()}

    def at(self, positions: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Extinctions to and densities at X, Y, Z in pc (N, 3); NaN where a ray leaves the box."""
        places = torch.from_numpy(positions).to(self.device)
        rays, inside, _ = LineIntegrals.from_observer(places).clipped(
            self.run.grid.lower, self.run.grid.upper, OutsidePolicy.DROP
        )
        columns = {name: np.full(len(positions), np.nan) for name in PREDICTED}
        if len(rays) > 0:
            rows = inside.cpu().numpy()
            extinction = self.fit.posterior.predict(rays)
            density = self.fit.posterior.predict(PointValues(places[inside]))
            answers = (extinction.mean, extinction.std, density.mean, density.std)
            for name, values in zip(PREDICTED, answers, strict=True):
                columns[name][rows] = values.cpu().double().numpy()
        return columns

    def export(
        self, kind: str, output: Path, overwrite: bool, grid: RegularGrid | None
    ) -> Mapping[str, Any]:
        """Writes mean and standard deviation on `grid`, or on the run's."""
        density, clamped = predict_map(
            self.fit, grid or self.run.grid, self.run.grid, self.run.stars.system, self.device
        )
        provenance = Provenance(configuration.sha256(self.run.config), ("exported from a run",))
        WRITERS[kind](output, density, provenance, overwrite)
        return {"output": str(output), "nodes": list(density.grid.shape), "clamped": clamped}

    def grid(self, box: Sequence[float] | None, step: float | None) -> RegularGrid:
        """Voxel centres from X0 to X1, Y0 to Y1, Z0 to Z1, `step` apart; the run's by default."""
        mine = self.run.grid
        step = mine.spacing[0] if step is None else step
        faces = list(zip(mine.lower, mine.upper, strict=True))
        if box is not None:
            faces = [(box[0], box[1]), (box[2], box[3]), (box[4], box[5])]
        shape = []
        for axis, (low, high), mine_low, mine_high in zip(
            "XYZ", faces, mine.lower, mine.upper, strict=True
        ):
            if not mine_low - 1e-6 <= low < high <= mine_high + 1e-6:
                raise ValueError(
                    f"--box along {axis}: expected {mine_low:g} <= {axis}0 < {axis}1 <= "
                    f"{mine_high:g} pc, the box of the run, got {low:g} and {high:g}"
                )
            cells = (high - low) / step
            if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
                raise ValueError(f"--step {step:g}: expected a part of {high - low:g} pc on {axis}")
            shape.append(round(cells) + 1)
        return RegularGrid(tuple(low for low, _ in faces), (step,) * 3, tuple(shape))


def reopen_star_map(directory: RunDirectory) -> StarMap:
    """The posterior of the run, brought back from its checkpoint; seconds, not minutes."""
    config = directory.config()
    run = assemble(config, read_archive(directory.path / ARCHIVE), None)
    at = Hyperparameters(**directory.read_json(HYPERPARAMETERS))
    arrays = directory.read_arrays(POSTERIOR)
    return StarMap(run, engine_of(config).reopen(config, run.data(run.train), at, arrays))
