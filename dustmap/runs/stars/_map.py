"""A finished map of the dust: its posterior answers for any star, place or grid."""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import sky
from dustmap.config import Config, DataConfig
from dustmap.errors import UserError
from dustmap.gp import Prediction, RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, PointValues, without_groups
from dustmap.inference import LogNormalPosterior, scores
from dustmap.linalg import Progress, unwatched, watched_chunks
from dustmap.runs._interface import AbstractFinishedRun
from dustmap.runs._machine import TOGETHER
from dustmap.runs.checkpoints import REPORT, RunDirectory
from dustmap.runs.reports import NOISE_FREE, Predictions, comparison_of, labelled
from dustmap.runs.stars import (
    _beyond,
    _catalog_checks,
    _checks,
    _distance_rounds,
    _distances,
    _engines,
    _grids,
    _input,
    _kernel,
    _model,
    _near_stars,
    _parts,
    _resolution,
    _run,
)
from dustmap.sky import Observations, Places, Provenance, SchemaCard, observations
from dustmap.sky.agreement import Comparison
from dustmap.sky.maps import AbstractDensityField, MapRequest, Quantity
from dustmap.sky.maps._quantities import COVERAGE
from dustmap.sky.stars import AbstractDistances, ExactDistances, thinned
from dustmap.sky.systems import ExtinctionSystem, conversion
from dustmap.tables import refuse_taken, table_format, write_table

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float64]

#: Predictions; of stars of groups, extinctions with their zero points, too.
PREDICTED = ("extinction_mean", "extinction_std", "density_mean", "density_std")
MEASURED = ("measurement_mean", "measurement_std")
#: The card's set of cuts for catalogs that a run is judged by.
CUTS = "default"


@final
@dataclass(frozen=True, eq=False)
class StarMap(AbstractFinishedRun):
    """The run, the posterior at the hyperparameters that it learned, and the provenance of its
    maps: that of its fit, wherever it now computes. unseen: held-out stars as the fit without them
    predicted them; None where none were scored, and of runs that did not keep it. refitted: whether
    it has seen these stars, too."""

    run: _run.StarRun
    fit: _engines.StarFit
    made: Provenance
    refitted: bool
    unseen: Predictions | None = None

    @property
    def device(self) -> torch.device:
        """Device of the posterior."""
        return self.run.device

    @property
    def fitted(self) -> Tensor:
        """Indices of the stars that the map has seen."""
        return _fitted(self.run, self.refitted)

    @property
    def system(self) -> ExtinctionSystem:
        """Extinction system of extinctions and densities."""
        return self.run.stars.system

    def field(self) -> AbstractDensityField:
        """Return the density, for exports and queries."""
        return self.run.field(self.fit)

    def held_out(self) -> Comparison:
        """Return the stars that the run held out beside their predictions, noise included."""
        if len(self.run.holdout) == 0:
            raise UserError("the run held out no stars (data.holdout = 0): nothing to compare")
        unseen = self.unseen
        if unseen is None:  # the fit is that without them
            unseen = _distances.predictions(self.fit, self.run.observed, self.run.holdout)
        return comparison_of(self.run.stars, unseen)

    def evaluate(
        self,
        catalog: Path,
        card: SchemaCard | str = "",
        truth_column: str = "",
        system: str = "",
        progress: Progress = unwatched,
    ) -> Mapping[str, Any]:
        """Score measured extinctions, and noise-free ones in the column `truth_column`.

        Where the catalog has the run's column of groups, measured ones have their zero points.
        card: the run's own of "", with its default cuts; stars outside the box by the run's policy,
        counted. system: of extinctions where neither header nor card says, data.system of "";
        scores are in the run's.
        """
        data, card = self._asked(catalog, card)
        own, read = self.run.stars, self.read(catalog, card, system)
        stars = _input.in_system(read.stars, own.system)
        groups: dict[str, int] = {}
        if stars.groups is not None:
            labels = _input.group_names(read.provenance)
            numbers = _input.renumbered(labels, self.run.group_names)[stars.groups]
            stars = replace(stars, groups=numbers)
            groups = {"stars_of_unknown_groups": int((numbers == _input.UNKNOWN).sum())}
        elif column := self.run.config.data.groups:
            log.warning("%s has no column %s: no zero points are added", catalog, column)
        seen = self._seen(stars.l, stars.b, stars.extinction)
        if seen != 0:
            count = "an unknown number" if seen is None else seen
            how = "by direction and extinction: these are not predicted"
            log.warning("%s: the map has seen %s of %d stars, %s", catalog, count, len(stars), how)
        _parts.warn_beyond(self.run.tile, stars.l, stars.b, stars.distances.median)
        _checks.warn_of(_catalog_checks.catalog_checks(thinned(stars, _parts.SAMPLE), stars))
        policy = OutsidePolicy(self.run.config.grid.outside)
        observed = observations.observe(stars, self.run.whole, policy, torch.float64, self.device)
        if not observed.exact:
            observed = _beyond.renewed(observed, self.fit, self._dust)
        everything = torch.arange(len(observed))
        predictions = _distances.predictions(self.fit, observed, everything, progress)
        result = predictions.as_dict()
        if truth_column:
            truth = _input.read_truth(data, card, read, truth_column)
            truth = conversion(read.stars.system, own.system) * truth
            result["truth"] = self._noise_free_scores(observed, truth)
        counts = {
            "rows": read.provenance["counts"],
            "stars_that_the_map_has_seen": "unknown" if seen is None else seen,
            **_grids.counts_at_the_box(self.run.config, observed),
            **groups,
        }
        return result | counts

    def _noise_free_scores(
        self, observed: observations.Observations, truth: NDArray[np.float64]
    ) -> Mapping[str, Any]:
        """Score extinctions without noise, of all stars in the system of the run, whose predicted
        variance has no noise in it."""
        predicted = self.fit.posterior.predict(without_groups(observed.batch.functional))
        gains = self.fit.gains(observed.batch.functional)  # which extinctions do not have
        added = (observed.added_variance / gains.square()).to(predicted.variance)
        mean = predicted.mean + (observed.expected_beyond / gains).to(added)
        y = torch.from_numpy(truth[observed.rows]).to(added)
        return labelled(scores(y, mean, predicted.variance + added), NOISE_FREE)

    def _seen(self, l: Array, b: Array, extinction: Array) -> int | None:
        """Count the stars among those that the map is made of: numbers of sources may be those of
        rows, so directions and extinctions tell. None where it is made of means of stars."""
        if self.run.stars.multiplicity is not None:
            return None
        own = self.run.stars[self.run.observed.rows[self.fitted.cpu().numpy()]]
        return _input.count_among(l, b, extinction, own)

    @property
    def _dust(self) -> observations.PriorDust:
        return _beyond.prior_dust(self.run.config, self.fit.hyperparameters)

    def predict(
        self,
        catalog: Path,
        card: SchemaCard | str,
        output: Path,
        overwrite: bool,
        progress: Progress = unwatched,
        distances: bool = False,
        system: str = "",
    ) -> Mapping[str, Any]:
        """Write the catalog with predictions and coverage; return counts of its rows.

        distances: add those that the extinctions of its rows leave possible behind the map, too.
        system: of these extinctions where neither header nor card says it.
        """
        kind = table_format(output)  # before anything is computed
        prior = _input.prior_of(self.run.stars)
        data, own = self.run.config.data, self.run.share.own.provenance
        named = _input.system_of_others(data, own, system)
        places = _input.places_of(data, catalog, card, prior, distances, named)
        table = places.table
        labels, names = places.groups, self.run.group_names
        groups = None if labels is None else _input.renumbered(labels, names)
        added = (*_columns(groups), *(_distances.COLUMNS if distances else ()), COVERAGE)
        refuse_taken(table, (*added, *(sky.labels(self.system) if kind.bare else ())))
        refined = self._refined(places, groups, progress) if distances else {}
        where = places.l, places.b, places.distances
        columns = self.at_stars(*where, progress, groups)
        answers = places.filled({**columns, COVERAGE: self.coverage(*where), **refined})
        sky.add_answers(table, answers, self.system, labelled=kind.bare)
        if not places.measured:  # else it is the system of these
            table.meta.setdefault("EXTSYS", self.system.name)
        own, before = self.made.metadata(), table.meta.get("HISTORY", [])
        before = [before] if isinstance(before, str) else before
        table.meta |= own | {"HISTORY": [*before, *own["HISTORY"]]}
        write_table(output, table, overwrite)
        return {
            "rows": len(table),
            "rows_outside_the_box": int(np.isnan(columns["density_mean"]).sum()),
            "rows_without_a_place": places.missing,
            **self._counts_of_distances(places),
            "extinction_system": self.system.name,
            "output": str(output),
        }

    def _refined(
        self, places: Places, groups: NDArray[np.int64] | None, progress: Progress
    ) -> Mapping[str, Array]:
        """Return the columns of distances given extinctions."""
        assert places.extinctions is not None
        where = places.l, places.b, places.distances
        return self.distance_finder().columns(*where, places.extinctions, groups, progress)

    def distance_finder(self) -> _distances.DistanceFinder:
        """Return what finds distances of stars by their extinctions."""
        run, outside = self.run, _model.policy_beyond(self.run.config)
        return _distances.DistanceFinder(
            self.fit, run.whole, self._dust, outside, self.system, self.device
        )

    def _counts_of_distances(self, places: Places) -> dict[str, int | str]:
        """Count rows without extinctions, and those whose extinctions the map has used before."""
        measured = places.extinctions
        if measured is None:
            return {}
        known = np.isfinite(measured.value)
        y = conversion(measured.system, self.system) * measured.value
        seen = self._seen(places.l[known], places.b[known], y[known])
        return {
            "rows_without_extinction": int((~known).sum()),
            "rows_that_the_map_has_seen": "unknown" if seen is None else seen,
        }

    def read(self, catalog: Path, card: SchemaCard | str, system: str = "") -> _input.StarInput:
        """Read stars as the run has read its own: with its distances, groups and system."""
        data, card = self._asked(catalog, card)
        own = self.run.share.own.provenance
        named = _input.system_of_others(self.run.config.data, own, system)
        read = _input.read_stars(data, card, named, _input.prior_of(self.run.stars))
        taken = read.provenance["files"][0]["extinction_system"]
        log.info("%s: extinctions are %s", catalog, taken)
        return read

    def _asked(self, catalog: Path, card: SchemaCard | str) -> tuple[DataConfig, SchemaCard]:
        """The run's [data] of another catalog, and its card."""
        data = replace(self.run.config.data, catalog=(str(catalog),), cuts=CUTS)
        card = _input.card_for(self.run.config.data, catalog, card, with_extinctions=True)
        return data, card.with_group(data.groups, required=False)

    def query(self, l: float, b: float, distance: float) -> Mapping[str, float]:
        """Predict at one place, in degrees and pc."""
        far = ExactDistances(np.array([distance]))
        values = self.at_stars(np.array([l]), np.array([b]), far)
        if np.isnan(values["density_mean"][0]):
            raise UserError(
                f"l = {l:g}, b = {b:g}, distance = {distance:g} pc is outside the box "
                f"{self.run.grid.lower} to {self.run.grid.upper} pc"
            )
        return {name: float(column[0]) for name, column in values.items()}

    def at(self, positions: Array) -> dict[str, Array]:
        """Predict at X, Y, Z in pc (N, 3)."""
        l, b, distance = sky.galactic(positions)
        return self.at_stars(l, b, ExactDistances(distance))

    def at_stars(
        self,
        l: Array,
        b: Array,
        distances: AbstractDistances,
        progress: Progress = unwatched,
        groups: NDArray[np.int64] | None = None,
    ) -> dict[str, Array]:
        """Predict densities at the median distance of N stars and extinctions over the distribution
        of each distance, both NaN where the median distance is outside the box. What a distribution
        has beyond it sees the prior's dust there, or none (grid.outside = "truncate"). groups (N,):
        the run's numbers of the groups of measurements, of which MEASURED is predicted too, the
        extinctions with their zero points, without noise.
        """
        _parts.warn_beyond(self.run.tile, l, b, distances.median)
        parts = []
        for some in watched_chunks(max(1, len(l)), TOGETHER, "predictions", progress):
            own = None if groups is None else groups[some]
            parts.append(self._at_some(l[some], b[some], distances[some], own))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _at_some(
        self,
        l: Array,
        b: Array,
        distances: AbstractDistances,
        groups: NDArray[np.int64] | None,
    ) -> dict[str, Array]:
        columns = {name: np.full(len(l), np.nan) for name in _columns(groups)}
        places, inside = self._places(l, b, distances)
        at = np.flatnonzero(inside.cpu().numpy())
        if len(at) == 0:
            return columns
        grid, outside = self.run.whole, _model.policy_beyond(self.run.config)
        lines = observations.sight_lines(l[at], b[at], distances[at], grid, outside, self.device)
        posterior = self.fit.posterior
        density = self._densities(PointValues(places[inside]))
        extinction = observations.predict_extinction(posterior, lines, self._dust)
        answers = [("density", at, density), ("extinction", at[lines.rows], extinction)]
        if groups is not None:
            own = torch.from_numpy(groups[at][lines.rows]).to(self.device)
            grouped = replace(lines, rays=replace(lines.rays, groups=own))
            gains = self.fit.gains(grouped.rays)
            measured = observations.predict_extinction(posterior, grouped, self._dust, gains=gains)
            answers.append(("measurement", at[lines.rows], measured))
        for name, rows, prediction in answers:
            columns[f"{name}_mean"][rows] = prediction.mean.cpu().double().numpy()
            columns[f"{name}_std"][rows] = prediction.std.cpu().double().numpy()
        return columns

    def coverage(self, l: Array, b: Array, distances: AbstractDistances) -> Array:
        """Coverage (N,) at the median distances; NaN outside the box."""
        places, inside = self._places(l, b, distances)
        at, covered = PointValues(places[inside]), np.full(len(l), np.nan)
        if len(at) > 0:
            answers = self._field.evaluate(at, MapRequest((Quantity.COVERAGE,)))
            covered[inside.cpu().numpy()] = answers["coverage"]
        return covered

    def _densities(self, places: PointValues) -> Prediction:
        """Predict at places in the box: as maps have it where what lies between nodes is drawn."""
        posterior = self.fit.posterior
        if not isinstance(posterior, LogNormalPosterior) or posterior.unresolved is None:
            return posterior.predict(places)
        answers = self._field.evaluate(places, MapRequest((Quantity.MEAN, Quantity.STD)))
        mean, std = (torch.from_numpy(answers[name]).double() for name in ("mean", "std"))
        return Prediction(mean, std.square())

    @functools.cached_property
    def _field(self) -> AbstractDensityField:
        return self.field()

    def _places(self, l: Array, b: Array, distances: AbstractDistances) -> tuple[Tensor, Tensor]:
        """Return X, Y, Z (N, 3) at the median distances, and which are in the box."""
        places = torch.from_numpy(sky.cartesian(l, b, distances.median)).to(self.device)
        return places, self.run.grid.contains(places)

    def percentiles(
        self, l: Array, b: Array, distances: AbstractDistances, levels: Sequence[float]
    ) -> tuple[Array, Array]:
        """Return quantiles of extinctions and of densities at N stars of known distance, at the
        probabilities `levels`: (Q, N) each, NaN outside the box and of rays that start outside."""
        if not distances.exact:
            raise UserError(
                "percentiles: expected exact distances, got uncertain ones; ask for mean and std "
                "alone, or leave the errors of the distances out"
            )
        places, inside = self._places(l, b, distances)
        at, field = inside.cpu().numpy(), self._field
        extinction, density = (np.full((len(levels), len(l)), np.nan) for _ in range(2))
        if at.any():
            density[:, at] = field.percentiles(PointValues(places[inside]), levels)
        if at.any() and bool(self.run.whole.contains(torch.zeros_like(places[:1]))):
            rays = LineIntegrals.from_observer(places[inside])
            extinction[:, at] = field.percentiles(rays, levels)
        return extinction, density

    @property
    def finer(self) -> tuple[RegularGrid, ...]:
        """Grids of the levels in the box."""
        return _grids.finer_of(self.run.config.grid)

    def _step_in(self, box: Sequence[float] | None) -> float:
        """The spacing of the finest level that has all of a box; of the run's grid without one."""
        faces = None if box is None else torch.tensor(box, dtype=torch.float64).view(3, 2).mT
        whole = [g for g in self.finer if faces is not None and bool(g.contains(faces).all())]
        return min(g.spacing[0] for g in (self.run.grid, *whole))

    def grid(self, box: Sequence[float] | None, step: float | None) -> RegularGrid:
        """Lay voxel centres, `step` apart, from X0 to X1, Y0 to Y1, Z0 to Z1; or the run's."""
        mine = self.run.grid
        step = self._step_in(box) if step is None else step
        return _resolution.voxels(mine, box, step)


def _columns(groups: NDArray[np.int64] | None) -> tuple[str, ...]:
    """Name the columns of predictions for stars of groups, or of none."""
    return PREDICTED if groups is None else (*PREDICTED, *MEASURED)


def reopen_star_map(directory: RunDirectory, config: Config) -> StarMap:
    """The posterior of the run, brought back from its checkpoint; seconds, not minutes: its stars
    are observed where that needs them. config: the run's, computing where and how it is now asked.
    """
    refitted = (directory.path / _run.REFIT).is_file()
    learned, kept = (
        (_run.REFIT, _run.REFIT_POSTERIOR) if refitted else (_run.HYPERPARAMETERS, _run.POSTERIOR)
    )
    at = _model.Hyperparameters.from_dict(directory.read_json(learned))
    config = _near_stars.with_cavity(_grids.grid_of_run(directory, config), bool(at.cavity))
    archived = _input.archived_stars(directory.path)
    run = _run.assemble(_input.as_ingested(config, archived.provenance), archived)
    run = replace(run, config=_kernel.config_of_run(directory, run.config))
    arrays, added, scored = (
        directory.read_arrays(name) for name in (kept, _run.DISTANCES, _run.HELD_OUT)
    )
    if refitted and not scored:
        raise UserError(
            f"{directory.path / _run.HELD_OUT} is missing, and the map has seen the held-out "
            "stars: run it again"
        )
    before = run

    def noisy(observed: Observations) -> Observations:
        made = _distance_rounds.FitData.of_arrays
        return made(before.config, before.limit, observed, added).noisy

    run = replace(run, sight=run.sight.changed(noisy))
    bare = config.engine == "lognormal" and not config.data.groups
    data = _engines.no_data(run.device) if bare else run.observed.training(_fitted(run, refitted))
    fit = _engines.load_stars(run.config, data, at, arrays)
    made = replace(run, asked=directory.config()).provenance(fit, _count(directory, run, refitted))
    unseen = Predictions.of_arrays(scored) if scored else None
    return StarMap(run, fit, made, refitted, unseen)


def _fitted(run: _run.StarRun, refitted: bool) -> Tensor:
    return run.mapped if refitted else run.train


def _count(directory: RunDirectory, run: _run.StarRun, refitted: bool) -> int:
    """Count the stars of the map, by the report where it has them."""
    counts = directory.read_json(REPORT).get("counts", {})
    names = ("stars_fitted", "stars_held_out") if refitted else ("stars_fitted",)
    if set(names) <= set(counts):
        return sum(int(counts[name]) for name in names)
    return len(_fitted(run, refitted))
