"""A finished map of the dust: its posterior answers for any star, place or grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, PointValues
from dustmap.inference import scores
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import TOGETHER
from dustmap.runs._run import AbstractFinishedRun
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import comparison_of
from dustmap.runs.stars._data_checks import catalog_checks, warn_of
from dustmap.runs.stars._distance_rounds import reopened
from dustmap.runs.stars._engines import load_stars
from dustmap.runs.stars._hyperparameters import Hyperparameters, StarFit
from dustmap.runs.stars._input import (
    ARCHIVE,
    StarInput,
    from_store,
    in_system,
    places_of,
    prior_of,
    read_stars,
    read_truth,
)
from dustmap.runs.stars._model import density_of
from dustmap.runs.stars._run import (
    DISTANCES,
    HYPERPARAMETERS,
    POSTERIOR,
    StarRun,
    assemble,
    predictions,
)
from dustmap.runs.stars._share import SAMPLE
from dustmap.sky import (
    Provenance,
    add_answers,
    cartesian,
    galactic,
)
from dustmap.sky.catalogs import SchemaCard, card_named
from dustmap.sky.figures import Comparison
from dustmap.sky.maps import AbstractDensityField
from dustmap.sky.observations import (
    Observations,
    PriorDust,
    observe,
    predict_extinction,
    sight_lines,
)
from dustmap.sky.stars import AbstractDistances, ExactDistances, open_star_store, thinned
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import table_format, write_table

#: What `predict` adds.
PREDICTED = ("extinction_mean", "extinction_std", "density_mean", "density_std")


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

    @property
    def system(self) -> ExtinctionSystem:
        """What the extinctions are."""
        return self.run.stars.system

    def field(self) -> AbstractDensityField:
        """The density, for exports and queries."""
        return self.run.field(self.fit)

    def held_out(self) -> Comparison:
        """The stars that the run held out beside their predictions, noise included."""
        if len(self.run.holdout) == 0:
            raise UserError("the run held out no stars (data.holdout = 0): nothing to compare")
        found = predictions(self.fit, self.run.observed, self.run.holdout)
        return comparison_of(self.run.stars, found)

    def evaluate(
        self,
        catalog: Path,
        card: SchemaCard | str = "generic",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Scores of measured extinctions, and of noise-free ones in the column `truth_column`.

        With the cuts that the card has by default; stars outside the box by the run's policy,
        counted. system: of the catalog's extinctions where neither its header nor its card says;
        scores are in the run's.
        """
        data = self.run.config.data
        card = card if isinstance(card, SchemaCard) else card_named(card)
        named = system_named(system) if system else None
        read = read_stars(data, (catalog,), card, named, CUTS, prior_of(self.run.stars))
        given = replace(read, stars=in_system(read.stars, self.run.stars.system))
        warn_of(catalog_checks(thinned(given.stars, SAMPLE)))
        observed = self._observed(given)
        everything = torch.arange(len(observed))
        found = predictions(self.fit, observed, everything, progress)
        told: dict[str, Any] = found.scores().as_dict()
        if truth_column:
            truth = read_truth(data, catalog, card, read.stars, truth_column, CUTS)
            factor = conversion(read.stars.system, self.run.stars.system)
            told["truth"] = self._truth(observed, factor * truth)
        return told | {
            "rows": given.provenance["counts"],
            **observed.counts_at_the_box(),
        }

    def _observed(self, given: StarInput) -> Observations:
        """With what uncertain distances and dust beyond the box add at the density found."""
        policy = OutsidePolicy(self.run.config.grid.outside)
        observed = observe(given.stars, self.run.grid, policy, torch.float64, self.device)
        if observed.exact:
            return observed
        return observed.with_added(observed.added(self.fit.for_many_rays(), self._dust))

    @property
    def _dust(self) -> PriorDust:
        config = self.run.config
        return density_of(config).prior(config.model, self.fit.hyperparameters)

    def _truth(self, observed: Observations, truth: NDArray[np.float64]) -> Mapping[str, float]:
        """Of noise-free extinctions: the predicted variance has no noise in it."""
        predicted = self.fit.posterior.predict(observed.batch.functional)
        added = observed.added_variance.to(predicted.variance)
        y = torch.from_numpy(truth[observed.rows]).to(added)
        mean = predicted.mean + observed.expected_beyond.to(predicted.mean)
        return scores(y, mean, predicted.variance + added).as_dict()

    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        kind = table_format(output)  # before anything is computed
        places = places_of(self.run.config.data, catalog, card, prior_of(self.run.stars))
        table = places.table
        columns = self.at_stars(places.l, places.b, places.distances, progress)
        add_answers(table, columns, self.system, labelled=kind.bare)
        if not places.measured:  # else it is the system of these
            table.meta.setdefault("EXTSYS", self.system.name)
        _add_history(table, self.made)
        write_table(output, table, overwrite)
        outside = int(np.isnan(columns["density_mean"]).sum())
        told = {"rows": len(table), "rows_outside_the_box": outside}
        return told | {"extinction_system": self.system.name, "output": str(output)}

    def query(self, l: float, b: float, distance: float) -> Mapping[str, float]:
        """Predictions at one place, in degrees and pc."""
        place = (np.array([value]) for value in (l, b, distance))
        lon, lat, far = place
        values = self.at_stars(lon, lat, ExactDistances(far))
        if np.isnan(values["density_mean"][0]):
            raise UserError(
                f"l = {l:g}, b = {b:g}, distance = {distance:g} pc is outside the box "
                f"{self.run.grid.lower} to {self.run.grid.upper} pc"
            )
        return {name: float(column[0]) for name, column in values.items()}

    def at(self, positions: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """The same at X, Y, Z in pc (N, 3)."""
        l, b, distance = galactic(positions)
        return self.at_stars(l, b, ExactDistances(distance))

    def at_stars(
        self,
        l: NDArray[np.float64],
        b: NDArray[np.float64],
        distances: AbstractDistances,
        progress: Progress = unwatched,
    ) -> dict[str, NDArray[np.float64]]:
        """Densities at the median distance of N stars and extinctions over the distribution of
        each distance, both NaN where the median distance is outside the box.

        What a distribution has beyond the box sees the prior's dust there, or none where the run
        expects none (grid.outside = "truncate").
        """
        found = []
        for first in range(0, max(1, len(l)), TOGETHER):
            progress("predictions", first, len(l))
            some = slice(first, first + TOGETHER)
            found.append(self._at_some(l[some], b[some], distances[some]))
        progress("predictions", len(l), len(l))
        return {name: np.concatenate([part[name] for part in found]) for name in PREDICTED}

    def _at_some(
        self, l: NDArray[np.float64], b: NDArray[np.float64], distances: AbstractDistances
    ) -> dict[str, NDArray[np.float64]]:
        columns = {name: np.full(len(l), np.nan) for name in PREDICTED}
        places = torch.from_numpy(cartesian(l, b, distances.median)).to(self.device)
        inside = self.run.grid.contains(places)
        at = np.flatnonzero(inside.cpu().numpy())
        if len(at) == 0:
            return columns
        policy = OutsidePolicy(self.run.config.grid.outside)
        if policy is not OutsidePolicy.TRUNCATE:
            policy = OutsidePolicy.PRIOR
        lines = sight_lines(l[at], b[at], distances[at], self.run.grid, policy, self.device)
        found = {
            "density": self.fit.posterior.predict(PointValues(places[inside])),
            "extinction": predict_extinction(self.fit.posterior, lines, self._dust),
        }
        for name, prediction in found.items():
            rows = at if name == "density" else at[lines.rows]
            columns[f"{name}_mean"][rows] = prediction.mean.cpu().double().numpy()
            columns[f"{name}_std"][rows] = prediction.std.cpu().double().numpy()
        return columns

    def percentiles(
        self,
        l: NDArray[np.float64],
        b: NDArray[np.float64],
        distances: AbstractDistances,
        levels: Sequence[float],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of extinctions and of densities at N stars of known distance, at the probabilities
        `levels`: (Q, N) each, NaN outside the box and of rays that start outside."""
        if not distances.exact:
            raise UserError(
                "percentiles: expected exact distances, got uncertain ones; ask for mean and std "
                "alone, or leave the errors of the distances out"
            )
        places = torch.from_numpy(cartesian(l, b, distances.median)).to(self.device)
        inside = self.run.grid.contains(places)
        at, field = inside.cpu().numpy(), self.field()
        extinction, density = (np.full((len(levels), len(l)), np.nan) for _ in range(2))
        if at.any():
            density[:, at] = field.percentiles(PointValues(places[inside]), levels)
        if at.any() and bool(self.run.grid.contains(torch.zeros_like(places[:1]))):
            rays = LineIntegrals.from_observer(places[inside])
            extinction[:, at] = field.percentiles(rays, levels)
        return extinction, density

    def grid(self, box: Sequence[float] | None, step: float | None) -> RegularGrid:
        """Voxel centres from X0 to X1, Y0 to Y1, Z0 to Z1, `step` apart; the run's by default."""
        mine = self.run.grid
        step = mine.spacing[0] if step is None else step
        if not step > 0.0:
            raise UserError(f"--step {step:g}: expected more than 0 pc")
        faces = list(zip(mine.lower, mine.upper, strict=True))
        if box is not None:
            faces = [(box[0], box[1]), (box[2], box[3]), (box[4], box[5])]
        shape = []
        for axis, (low, high), mine_low, mine_high in zip(
            "XYZ", faces, mine.lower, mine.upper, strict=True
        ):
            if not mine_low - 1e-6 <= low < high <= mine_high + 1e-6:
                raise UserError(
                    f"--box along {axis}: expected {mine_low:g} <= {axis}0 < {axis}1 <= "
                    f"{mine_high:g} pc, the box of the run, got {low:g} and {high:g}"
                )
            cells = (high - low) / step
            if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
                raise UserError(f"--step {step:g}: expected a part of {high - low:g} pc on {axis}")
            shape.append(round(cells) + 1)
        return RegularGrid(tuple(low for low, _ in faces), (step,) * 3, tuple(shape))


def _add_history(table: Table, provenance: Provenance) -> None:
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
    at = Hyperparameters.from_dict(directory.read_json(HYPERPARAMETERS))
    arrays, distances = directory.read_arrays(POSTERIOR), directory.read_arrays(DISTANCES)
    if distances:
        run = replace(run, observed=reopened(run.observed, distances))
    fit = load_stars(run.config, run.observed.training(run.train), at, arrays)
    return StarMap(run, fit, replace(run, asked=directory.config()).provenance(fit))
