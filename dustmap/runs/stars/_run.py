"""From a star catalog to a map of the dust: the run of data.kind = "stars"."""

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.engines import Learning
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.linalg import AbstractWorld, unwatched
from dustmap.runs._machine import ALONE, device_of, own_rays, predicted, rounded
from dustmap.runs._run import AbstractRun, Plan
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import (
    Check,
    Picture,
    Predictions,
    Progress,
    Report,
    Stage,
    Stopwatch,
    calibration,
    quality_proxies,
)
from dustmap.runs.stars._checks import check_of_box, check_of_scores, checks_of_fit
from dustmap.runs.stars._data_checks import data_checks, warn_of
from dustmap.runs.stars._distance_rounds import DistanceFit, arrays_of_added, fit_distances
from dustmap.runs.stars._engines import engine_of
from dustmap.runs.stars._export import drawn_map, export_run, provenance_of
from dustmap.runs.stars._field import field_of
from dustmap.runs.stars._figures import Material, draw_figures
from dustmap.runs.stars._hyperparameters import StarFit
from dustmap.runs.stars._input import ARCHIVE, StarInput, from_store, rows_by_fate, store_input
from dustmap.runs.stars._model import density_of, grid_of
from dustmap.runs.stars._parallaxes import median_fractional_error, told_of_parallaxes
from dustmap.runs.stars._plan import plan_stars, refuse_nodes
from dustmap.runs.stars._seconds import OVERHEAD, estimated_seconds
from dustmap.runs.stars._share import StarShare, copy_store, share_of_store
from dustmap.runs.stars._tiles import TilePart, described, part_of_sky, read_part
from dustmap.runs.stars._truth import truth_scores
from dustmap.sky import Provenance
from dustmap.sky.maps import AbstractDensityField, DustMap
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable, open_star_store

log = logging.getLogger(__name__)

HYPERPARAMETERS = "checkpoint/hyperparameters.json"
POSTERIOR = "checkpoint/posterior.npz"
DISTANCES = "checkpoint/distances.npz"
#: Units of hyperparameters; those of std and mean follow the density.
UNITS = {
    "beyond": "factor on the dust expected beyond the box",
    "beyond_std": "of that factor",
    "length": "pc",
    "noise": "factor on the errors",
    "nu": "degrees of freedom",
    "scatter": "mag",
    "relative_scatter": "fraction of the extinction",
    "disc_height": "pc",
    "disc_length": "pc",
}


@final
@dataclass(frozen=True, eq=False)
class StarRun(AbstractRun):
    """Stars seen through the box, split into those to learn from and those held out.

    asked: the configuration as it was given; config: the same with the box of the tile that it
    names. train, holdout: indices into the observations; truth: the density they were simulated
    from; tile: what is left of a whole sky. share: the stars, or those of this rank; whole: all of
    them, where a rank that writes has read them; checks: of the catalog as a whole.
    """

    asked: Config
    config: Config
    share: StarShare
    grid: RegularGrid
    observed: Observations
    train: torch.Tensor
    holdout: torch.Tensor
    truth: DustMap | None
    tile: TilePart | None = None
    seconds_to_read: float = 0.0
    whole: StarInput | None = None
    checks: tuple[Check, ...] = ()

    @property
    def given(self) -> StarInput:
        """The stars that this rank has read."""
        return self.share.given

    @property
    def stars(self) -> StarTable:
        return self.given.stars

    @property
    def leads(self) -> bool:
        """Whether this rank writes what all have found."""
        return self.share.world.rank == 0

    @property
    def device(self) -> torch.device:
        return self.observed.batch.y.device

    def plan(self) -> Plan:
        counts = {
            "engine": self.config.fit.engine,
            "density": self.config.density,
            "device": str(self.device),
            **self.counts(),
        }
        plan = plan_stars(self.config, counts, self.stars, self.observed, self.train)
        return replace(plan, checks=self.checks)

    def check_until(self, until: Stage) -> None:
        """Any will do."""

    def seconds(self) -> float:
        """Of the whole run, roughly."""
        rays = own_rays(self.observed.batch.functional[self.train])
        return rounded(OVERHEAD + estimated_seconds(self.config, rays, self.grid))

    def counts(self) -> dict[str, Any]:
        """What became of the rows of the catalog, and the size of the map."""
        return {
            **({} if self.tile is None else self.tile.counts()),
            **({} if self.share.world.size == 1 else {"ranks": self.share.world.size}),
            "stars": self.share.total,
            "stars_fitted": len(self.train),
            "stars_held_out": len(self.holdout),
            **self.observed.counts_at_the_box(),
            "stars_with_distances_cut": self.observed.cut,
            "nodes": list(self.grid.shape),
        }

    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        watch = Stopwatch(tell=directory.record, device=self.device)
        account = _Account(self.asked, watch, checks=list(self.checks))
        self._ingest(directory, account)
        if Stage.FIT.reached_by(until):
            found = self._fit(directory, account, progress)
            held_out = None
            if Stage.EVALUATE.reached_by(until):
                held_out = self._evaluate(found, account, progress)
            if Stage.EXPORT.reached_by(until):
                self._export(directory, found.fit, held_out, account, progress)
        return account.report(until)

    def _ingest(self, directory: RunDirectory, account: "_Account") -> None:
        with account.watch.stage("ingest"):
            # A run that goes on has read its own.
            if self.leads and not (directory.path / ARCHIVE).exists():
                self._keep_stars(directory.path / ARCHIVE)
        account.watch.add("ingest", self.seconds_to_read)
        error = median_fractional_error(self.share, self.observed, self.train)
        told, checks = told_of_parallaxes(error)
        account.checks += checks
        account.sections["data"] = {**_data(self.given), **told}
        account.sections["counts"] = self.counts()
        account.sections["grid"] = _grid(self.grid)

    def _keep_stars(self, path: Path) -> None:
        if self.share.whole:
            store_input(path, self.given)
        elif self.whole is not None:
            store_input(path, self.whole)
        else:
            copy_store(path, self.config)

    def _fit(self, directory: RunDirectory, account: "_Account", progress: Progress) -> DistanceFit:
        log.info("fitting %d stars, engine %s", len(self.train), self.config.fit.engine)
        step = itertools.count()

        def on_step(values: Mapping[str, Any]) -> None:
            directory.record(stage="learn", step=next(step), **values)

        with account.watch.stage("fit"), directory.keeping():
            checkpointer = directory.checkpointer("fit")
            found = fit_distances(
                self.config, self.observed, self.train, checkpointer, on_step, progress
            )
        fit = found.fit
        _record_fit(directory, found)
        account.sections["hyperparameters"] = fit.hyperparameters.as_dict()
        account.sections["units"] = units_of(self.config, fit)
        account.sections["fit"] = fit.summary | _learning(fit.learning)
        if found.rounds:
            account.sections["distances"] = {"rounds": list(found.rounds)}
        account.checks += check_of_box(self.config, self.observed)
        account.checks += checks_of_fit(self.config, fit)
        if self.tile is not None:
            account.checks.append(self.tile.check(fit.hyperparameters.length))
        return found

    def _evaluate(
        self, found: DistanceFit, account: "_Account", progress: Progress
    ) -> Predictions | None:
        fit = found.fit
        with account.watch.stage("evaluate"):
            held_out = self.held_out(found, progress)
            if held_out is not None:
                account.sections["held_out_stars"] = held_out.scores().as_dict()
                account.sections["calibration"] = calibration(held_out)
                proxies = quality_proxies(held_out, self.stars.system.per_a_v)
                account.sections["quality_proxies"] = proxies
                account.checks.append(check_of_scores(held_out.scores()))
            if self.truth is not None and self.leads:
                account.sections["truth"] = truth_scores(
                    self.field(fit), self.grid, self.truth, self.config.fit.seed
                )
        return held_out

    def held_out(self, found: DistanceFit, progress: Progress = unwatched) -> Predictions | None:
        """Of the held-out stars, noise included; None if there are none."""
        if len(self.holdout) == 0:
            return None
        return predictions(found.fit, found.observed, self.holdout, progress)

    def field(self, fit: StarFit) -> AbstractDensityField:
        """The density, for maps."""
        return field_of(self.config, fit, self.grid, self.stars.system, self.device)

    def provenance(self, fit: StarFit) -> Provenance:
        """What the maps say of where they come from."""
        tile = described(self.tile, self.asked, fit.hyperparameters.as_dict())
        return provenance_of(self.asked, len(self.train), tile)

    def _export(
        self,
        directory: RunDirectory,
        fit: StarFit,
        held_out: Predictions | None,
        account: "_Account",
        progress: Progress,
    ) -> None:
        with account.watch.stage("export"):
            field, told = self.field(fit), self.provenance(fit)
            account.sections["outputs"] = export_run(
                directory, self.config, field, self.grid, told, progress, self.share.world
            )
            if self.leads:
                stars = self.stars
                if not self.share.whole:
                    stars = open_star_store(directory.path / ARCHIVE).read()
                density = drawn_map(directory, self.config, field, self.grid)
                material = Material(self.config, density, self.truth, stars, held_out, told)
                account.pictures += draw_figures(material, directory, progress)


@final
@dataclass
class _Account:
    """What the stages add to the report."""

    config: Config
    watch: Stopwatch = field(default_factory=Stopwatch)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def report(self, until: Stage) -> Report:
        sections = self.sections | {
            "stages": self.watch.as_dict() | {"until": until.value},
            "compute": _compute(self.config),
        }
        return Report(
            configuration.sha256(self.config), sections, tuple(self.checks), tuple(self.pictures)
        )


def prepare_stars(
    config: Config, earlier: Path | None = None, world: AbstractWorld = ALONE
) -> StarRun:
    """Reads and checks all that the run needs; writes nothing.

    earlier: the directory of the same run when it is gone on with; its stars are there already.
    world: ranks that share the stars.
    """
    engine = engine_of(config)
    if not config.data.tile:  # its own box is smaller, and comes with the stars
        refuse_nodes(config)
    start = time.perf_counter()
    own = None if earlier is None else earlier / ARCHIVE
    share = share_of_store(config, own, world)
    if share is not None:
        given = share.given
    elif own is not None and own.exists():
        given = from_store(open_star_store(own))
    else:
        given = read_part(config)
    seconds = time.perf_counter() - start
    truth = DustMap.open(config.data.truth) if config.data.truth else None
    if truth is not None and truth.system != given.stars.system:
        raise UserError(
            f"{config.data.truth}: this truth is in {truth.system} and the stars are in "
            f"{given.stars.system}; set data.system to the truth's, or leave data.truth out"
        )
    run = assemble(config, share or given, truth, seconds, world)
    if len(run.train) > engine.most_rows:
        raise UserError(
            f'fit.engine = "{config.fit.engine}" takes at most {engine.most_rows:,} stars, and '
            f"{len(run.train):,} are left to fit; raise data.holdout or take a part of the catalog"
        )
    checks = data_checks(run.config, run.share, run.observed, run.grid)
    if run.leads:
        warn_of(checks)
    return replace(run, checks=checks)


def assemble(
    config: Config,
    given: StarInput | StarShare,
    truth: DustMap | None,
    seconds: float = 0.0,
    world: AbstractWorld = ALONE,
) -> StarRun:
    """Observations and split; the same configuration and stars give the same split.

    given: the stars, of which the ranks take their shares, or the share of this one.
    """
    asked, tile, whole = config, None, None
    if isinstance(given, StarShare):
        share = given
    else:
        config, given, tile = part_of_sky(asked, given)
        share = StarShare.of_all(given, world)
        whole = given if world.rank == 0 else None
    grid = grid_of(config.grid)
    policy = OutsidePolicy(config.grid.outside)
    observed = share.observed(grid, policy, device_of(config.compute))
    shuffled = np.random.default_rng(config.fit.seed).permutation(len(observed))
    held_out = round(config.data.holdout * len(observed))
    if held_out == len(observed):
        raise UserError(
            f"data.holdout = {config.data.holdout:g} leaves none of {len(observed)} stars to fit"
        )
    holdout, train = (torch.from_numpy(np.sort(part)) for part in np.split(shuffled, [held_out]))
    split = (train, holdout)
    return StarRun(asked, config, share, grid, observed, *split, truth, tile, seconds, whole)


def _grid(grid: RegularGrid) -> dict[str, str]:
    """The box and its voxels, for readers of the report."""
    faces = zip("XYZ", grid.lower, grid.upper, strict=True)
    return {
        "box": ", ".join(f"{axis} {low:g} to {high:g} pc" for axis, low, high in faces),
        "spacing": " × ".join(f"{step:g}" for step in grid.spacing) + " pc",
        "nodes": " × ".join(map(str, grid.shape)),
    }


def predictions(
    fit: StarFit, observed: Observations, index: torch.Tensor, progress: Progress = unwatched
) -> Predictions:
    """Measured extinctions of some observations beside their prediction, noise included."""
    data = observed.batch[index]
    found = predicted(fit.posterior, data.functional, progress)
    assert data.noise_variance is not None
    at, given, added = (
        fit.hyperparameters,
        observed.error_variance[index],
        observed.added_variance[index],
    )
    std = (found.variance + at.noise_variance(given, found, added)).sqrt()
    # What has been taken for the dust beyond the box comes back.
    y, beyond = observed.measured[index], observed.expected_beyond[index]
    whole = replace(found, mean=found.mean + beyond.to(found.mean))
    rows = observed.rows[index.cpu().numpy()]
    return Predictions(y, whole.mean, std, at.scored(y, given, whole, added), rows)


def units_of(config: Config, fit: StarFit) -> dict[str, str]:
    """Of the hyperparameters that the fit has."""
    known = UNITS | dict(density_of(config).units)
    return {name: known.get(name, "") for name in fit.hyperparameters.as_dict()}


def _data(given: StarInput) -> dict[str, Any]:
    """Rows by what became of them, and where they come from."""
    rest = {name: value for name, value in given.provenance.items() if name != "counts"}
    return {"rows": rows_by_fate(given), "system": given.stars.system.name, **rest}


def _record_fit(directory: RunDirectory, found: DistanceFit) -> None:
    fit = found.fit
    directory.write_json(HYPERPARAMETERS, fit.hyperparameters.as_dict())
    directory.write_arrays(POSTERIOR, fit.arrays)
    if found.added is not None:
        kept = {name: v.cpu().numpy() for name, v in arrays_of_added(found.added).items()}
        directory.write_arrays(DISTANCES, kept)
    for line in found.rounds:
        directory.record(stage="distances", **line)
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


def _compute(config: Config) -> dict[str, Any]:
    return asdict(config.compute) | {
        "device": str(device_of(config.compute)),
        "dtype": "float64" if config.fit.engine == "exact" else config.compute.dtype,
        "threads": torch.get_num_threads(),
    }
