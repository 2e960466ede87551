"""A finished map of the dust: its posterior answers for any star, place or grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from astropy import units as u
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import Config, DataConfig, load
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy, PointValues
from dustmap.inference import scores
from dustmap.runs._run import AbstractFinishedRun
from dustmap.runs.engines import engine_of, reopened
from dustmap.runs.kept import RunDirectory
from dustmap.runs.models import Hyperparameters, StarFit
from dustmap.runs.reports import comparison_of
from dustmap.runs.stars._input import (
    StarInput,
    from_store,
    in_system,
    places_of,
    prior_of,
    read_stars,
    read_truth,
)
from dustmap.runs.stars._run import (
    ARCHIVE,
    DISTANCES,
    HYPERPARAMETERS,
    POSTERIOR,
    StarRun,
    assemble,
    predictions,
)
from dustmap.sky import Provenance, cartesian, galactic, table_format, write_table
from dustmap.sky.catalogs import Places, card_named
from dustmap.sky.figures import Comparison
from dustmap.sky.maps import AbstractDensityField
from dustmap.sky.observations import (
    NothingSeen,
    Observations,
    observe,
    predict_extinction,
    sight_lines,
)
from dustmap.sky.stars import AbstractDistances, ExactDistances, open_star_store
from dustmap.sky.systems import conversion, system_named

# Column -> unit of what `predict` adds.
PREDICTED = {
    "extinction_mean": u.mag,
    "extinction_std": u.mag,
    "density_mean": u.mag / u.pc,
    "density_std": u.mag / u.pc,
}


#: Of the card's sets of cuts, the one for catalogs that a run is judged by.
CUTS = "default"


@final
@dataclass(frozen=True, eq=False)
class StarMap(AbstractFinishedRun):
    """The run, as it was, the posterior at the hyperparameters it had learned, and what made it:
    the configuration of its fit, wherever it now computes."""

    run: StarRun
    fit: StarFit
    made: Provenance

    @property
    def device(self) -> torch.device:
        return self.run.device

    def field(self) -> AbstractDensityField:
        """The density, for exports and queries."""
        return self.run.field(self.fit)

    def held_out(self) -> Comparison:
        """The stars that the run held out beside their predictions, noise included."""
        if len(self.run.holdout) == 0:
            raise ValueError("the run held out no stars (data.holdout = 0): nothing to compare")
        found = predictions(self.fit, self.run.observed, self.run.holdout)
        return comparison_of(self.run.stars, found)

    def evaluate(
        self, catalog: Path, schema: str = "generic", truth_column: str = "", system: str = ""
    ) -> Mapping[str, Any]:
        """Scores of measured extinctions, and of noise-free ones in the column `truth_column`.

        With the cuts that the card has by default; stars outside the box by the run's policy,
        counted. system: of the catalog's extinctions where neither its header nor its card says;
        scores are in the run's.
        """
        data, card = self.run.config.data, card_named(schema)
        named = system_named(system) if system else None
        read = read_stars(data, (catalog,), card, named, CUTS, prior_of(self.run.stars))
        given = replace(read, stars=in_system(read.stars, self.run.stars.system))
        observed = self._observed(given)
        everything = torch.arange(len(observed))
        told: dict[str, Any] = predictions(self.fit, observed, everything).scores().as_dict()
        if truth_column:
            truth = read_truth(data, catalog, card, read.stars, truth_column, CUTS)
            factor = conversion(read.stars.system, self.run.stars.system)
            told["truth"] = self._truth(observed, factor * truth)
        return told | {
            "rows": given.provenance["counts"],
            "rays_truncated_at_the_box": observed.counts.truncated,
            "stars_dropped_outside_the_box": observed.counts.dropped,
        }

    def _observed(self, given: StarInput) -> Observations:
        """With the variance that uncertain distances add at the density found."""
        policy = OutsidePolicy(self.run.config.grid.outside)
        observed = observe(given.stars, self.run.grid, policy, torch.float64, self.device)
        if observed.spread is None:
            return observed
        return observed.with_added(observed.spread.added_variance(self.fit.for_many_rays()))

    def _truth(self, observed: Observations, truth: NDArray[np.float64]) -> Mapping[str, float]:
        """Of noise-free extinctions: the predicted variance has no noise in it."""
        predicted = self.fit.posterior.predict(observed.batch.functional)
        variance = predicted.variance
        if observed.spread is not None:
            variance = variance + observed.spread.added_variance(self.fit.for_many_rays())
        y = torch.from_numpy(truth[observed.rows]).to(variance)
        return scores(y, predicted.mean, variance).as_dict()

    def predict(
        self, catalog: Path, schema: str, output: Path, overwrite: bool
    ) -> Mapping[str, Any]:
        table_format(output)  # before anything is computed
        places = places_of(self.run.config.data, catalog, schema, prior_of(self.run.stars))
        table = places.table
        columns = self.at_stars(places.l, places.b, places.distances)
        for name, values in columns.items():
            table[name] = values * PREDICTED[name]
        _tell_history(table, self.made)
        write_table(output, table, overwrite)
        outside = int(np.isnan(columns["density_mean"]).sum())
        return {"rows": len(table), "rows_outside_the_box": outside, "output": str(output)}

    def query(self, l: float, b: float, distance: float) -> Mapping[str, float]:
        """Predictions at one place, in degrees and pc."""
        place = (np.array([value]) for value in (l, b, distance))
        lon, lat, far = place
        values = self.at_stars(lon, lat, ExactDistances(far))
        if np.isnan(values["density_mean"][0]):
            raise ValueError(
                f"l = {l:g}, b = {b:g}, distance = {distance:g} pc is outside the box "
                f"{self.run.grid.lower} to {self.run.grid.upper} pc"
            )
        return {name: float(column[0]) for name, column in values.items()}

    def at(self, positions: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """The same at X, Y, Z in pc (N, 3)."""
        l, b, distance = galactic(positions)
        return self.at_stars(l, b, ExactDistances(distance))

    def at_stars(
        self, l: NDArray[np.float64], b: NDArray[np.float64], distances: AbstractDistances
    ) -> dict[str, NDArray[np.float64]]:
        """Densities at the median distance of N stars, NaN outside the box; extinctions over the
        distribution of each distance, NaN where the ray from the Sun may be outside the box."""
        columns = {name: np.full(len(l), np.nan) for name in PREDICTED}
        places = torch.from_numpy(cartesian(l, b, distances.median)).to(self.device)
        inside = self.run.grid.contains(places)
        if not bool(inside.any()):
            return columns
        density = self.fit.posterior.predict(PointValues(places[inside]))
        at = inside.cpu().numpy()
        columns["density_mean"][at] = density.mean.cpu().double().numpy()
        columns["density_std"][at] = density.std.cpu().double().numpy()
        try:
            lines = sight_lines(l, b, distances, self.run.grid, OutsidePolicy.DROP, self.device)
        except NothingSeen:
            return columns
        extinction = predict_extinction(self.fit.posterior, lines)
        columns["extinction_mean"][lines.rows] = extinction.mean.cpu().double().numpy()
        columns["extinction_std"][lines.rows] = extinction.std.cpu().double().numpy()
        return columns

    def grid(self, box: Sequence[float] | None, step: float | None) -> RegularGrid:
        """Voxel centres from X0 to X1, Y0 to Y1, Z0 to Z1, `step` apart; the run's by default."""
        mine = self.run.grid
        step = mine.spacing[0] if step is None else step
        if not step > 0.0:
            raise ValueError(f"--step {step:g}: expected more than 0 pc")
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


def places_of_map(path: Path, catalog: Path, schema: str) -> Places:
    """Rows to query a map at, with distances as its run takes them, if it is one."""
    own = path / "config.toml"
    if not own.is_file():
        return places_of(DataConfig(), catalog, schema)
    few = open_star_store(path / ARCHIVE).part(slice(0, 1))
    return places_of(load(own).data, catalog, schema, prior_of(few))


def _tell_history(table: Table, provenance: Provenance) -> None:
    """Where the predictions come from, after what the header said of the rows."""
    own = provenance.metadata()
    before = table.meta.get("HISTORY", [])
    lines = [before] if isinstance(before, str) else list(before)
    table.meta |= own | {"HISTORY": [*lines, *own["HISTORY"]]}


def reopen_star_map(directory: RunDirectory, config: Config) -> StarMap:
    """The posterior of the run, brought back from its checkpoint; seconds, not minutes.

    config: the run's, computing where and how it is now asked.
    """
    store = open_star_store(directory.path / ARCHIVE)
    run = assemble(config, from_store(store), None)
    at = Hyperparameters(**directory.read_json(HYPERPARAMETERS))
    arrays, distances = directory.read_arrays(POSTERIOR), directory.read_arrays(DISTANCES)
    if distances:
        added = np.asarray(distances["added_variance"], np.float64)
        run = replace(run, observed=reopened(run.observed, added))
    fit = engine_of(config).reopen(run.config, run.observed.batch[run.train], at, arrays)
    return StarMap(run, fit, replace(run, asked=directory.config()).provenance(fit))
