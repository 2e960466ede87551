"""From a star catalog to a map of the dust: the run of data.kind = "stars"."""

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch

from dustmap import config as configuration
from dustmap.config import AUTO, Config, check_scatter_of_means
from dustmap.engines import Arrays, Watch
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import own_rays
from dustmap.linalg import AbstractWorld
from dustmap.runs import reports
from dustmap.runs._interface import AbstractRun, Plan
from dustmap.runs._machine import ALONE, Products, device_of
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Check, Predictions, Progress, Report, Stage
from dustmap.runs.stars import (
    _between,
    _beyond,
    _catalog_checks,
    _checks,
    _distances,
    _duration,
    _engines,
    _export,
    _grids,
    _input,
    _kernel,
    _model,
    _near_stars,
    _parts,
    _plan,
    _resolution,
)
from dustmap.runs.stars._distance_rounds import DistanceFit, fit_distances, refit_all
from dustmap.sky import DustMap, Observations, Provenance, StarTable
from dustmap.sky.maps import AbstractDensityField, LimitedField, SurveyReach

log = logging.getLogger(__name__)

HYPERPARAMETERS = "checkpoint/hyperparameters.json"
POSTERIOR = "checkpoint/posterior.npz"
DISTANCES = "checkpoint/distances.npz"
#: Held-out stars as the fit without them predicts them.
HELD_OUT = "checkpoint/held_out.npz"
#: The fit to all stars that the map is made of: its hyperparameters, written last, and its arrays,
#: which take the place of POSTERIOR.
REFIT, REFIT_POSTERIOR = "checkpoint/refit.json", "checkpoint/refit.npz"


@final
@dataclass(frozen=True, eq=False)
class StarRun(AbstractRun):
    """Stars seen through the box, split into those to learn from and those held out.

    asked: the configuration of the user; config: the same with the box of the tile that it names.
    sight: what they say of the density; truth: the density they were simulated from; tile: the
    part of a whole sky. share: the stars, or those of this rank; checks: of the catalog as a whole;
    near: what those near the Sun say of the mean.
    """

    asked: Config
    config: Config
    share: _parts.StarShare
    grid: RegularGrid
    sight: _resolution.Sight
    truth: DustMap | None
    tile: _parts.TilePart | None = None
    seconds_to_read: float = 0.0
    checks: tuple[Check, ...] = ()
    near: _near_stars.NearDust | None = None

    @property
    def observed(self) -> Observations:
        return self.sight.observed

    @property
    def train(self) -> torch.Tensor:
        """Indices into the observations of those to fit."""
        return self.sight.parts[0]

    @property
    def holdout(self) -> torch.Tensor:
        """Indices of those held out."""
        return self.sight.parts[1]

    @property
    def stars(self) -> StarTable:
        """The stars that this rank has read."""
        return self.share.own.stars

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups of stars by their numbers; none where data.groups names no column."""
        own = self.share.own.provenance
        return _input.group_names(own) if self.config.data.groups else ()

    @property
    def leads(self) -> bool:
        """Whether this rank writes the results of all."""
        return self.share.world.rank == 0

    @property
    def device(self) -> torch.device:
        return device_of(self.config.compute)

    def plan(self) -> Plan:
        counts = {
            "engine": self.config.fit.engine,
            **_near_stars.in_words(self.asked, self.config, self.near),
            "kernel": _plan.kernel_in_words(self.config, len(self.train)),
            "device": str(self.device),
            "columns": _input.columns_in_words(self.share.own.provenance),
            **self.counts(),
        }
        plan = _plan.plan_stars(self.config, counts, self.stars, self.observed, self.mapped)
        return replace(plan, checks=self.checks)

    @cached_property
    def reach(self) -> SurveyReach | None:
        """How much dust the catalog is seen through, where it has a magnitude limit."""
        return _export.reach_of(self.config.data, self.share.sample)

    @property
    def limit(self) -> _distances.MagnitudeLimit | None:
        """The limit by which distances are weighted, where the catalog has one."""
        return _distances.MagnitudeLimit.of(self.config, self.share, self.observed, self.whole)

    @property
    def whole(self) -> RegularGrid:
        """Nodes of the box of the fit, which has the dust around that of the map, too."""
        return _grids.whole_of(self.config.grid)

    @property
    def refits(self) -> bool:
        """Whether the map is made of all stars, by a second fit."""
        return self.config.data.refit and len(self.holdout) > 0

    @property
    def mapped(self) -> torch.Tensor:
        """Indices of the stars that the map is made of; those that the first fit has seen come
        first, so that the draws of both have the same random numbers."""
        return torch.cat([self.train, self.holdout]) if self.refits else self.train

    def seconds(self) -> float:
        """Estimate the whole run, roughly."""
        return _duration.seconds_of_run(self.config, self.observed, self.train, self.refits)

    def products(self) -> Products:
        rays = own_rays(self.observed.batch.functional)
        return _duration.products(self.config, rays[self.train])

    def counts(self) -> dict[str, Any]:
        """Count the rows of the catalog by their fate, and the nodes of the map."""
        return {
            **({} if self.tile is None else self.tile.counts()),
            **({} if self.share.world.size == 1 else {"ranks": self.share.world.size}),
            "stars": self.share.total,
            "stars_fitted": len(self.train),
            "stars_held_out": len(self.holdout),
            "stars_in_the_map": len(self.mapped),
            **_grids.counts_at_the_box(self.config, self.observed),
            "stars_with_distances_cut": self.observed.cut,
            **self.observed.counts_of_the_column(),
            **_grids.node_counts(self.config, self.grid),
        }

    def execute(self, directory: RunDirectory, until: Stage, progress: Progress) -> Report:
        watch = reports.Stopwatch(on_stage=directory.record, device=self.device)
        work = _Work(directory, watch, progress, checks=list(self.checks))
        self._ingest(work)
        _grids.keep_grid(directory, self.asked, self.config)
        run = self._with_kernel(work) if Stage.FIT.reached_by(until) else self
        return run._completed(work, until)

    def _with_kernel(self, work: "_Work") -> "StarRun":
        """Return the run with the kernel that the stars have chosen, where they do."""
        if not _kernel.is_open(self.config):
            return self
        directory, world = work.directory, self.share.world
        with work.watch.stage("kernel"), directory.keeping():
            watch = Watch(directory.checkpointer("kernel"), progress=work.progress)
            choice = _kernel.choose_kernel(self.config, self.observed, self.train, watch, world)
        directory.write_json(_kernel.CHOICE, choice.as_plain())
        work.sections["kernel_choice"] = choice.as_plain()
        return replace(self, config=_kernel.with_kernel(self.config, choice.name))

    def _completed(self, work: "_Work", until: Stage) -> Report:
        """Fit, score and map the stars, as far as `until`."""
        watch = work.watch
        if Stage.FIT.reached_by(until):
            refits = self.refits and Stage.EXPORT.reached_by(until)
            result, held_out = self._fit(work, refits), None
            if Stage.EVALUATE.reached_by(until):
                held_out = self._evaluate(work, result)
            fit, at, observed = result.fit, result.fit.hyperparameters, result.data.noisy
            start = fit.start
            if refits:
                del result, fit  # the first posterior makes room for the second
                fit = self._refit(work, at, observed, start)
            if Stage.EVALUATE.reached_by(until):
                self._compare(work, fit)
            if Stage.EXPORT.reached_by(until):
                self._write(work, fit, held_out)
        asked = self.asked.compute
        dtype = "float64" if self.asked.fit.engine == "exact" else asked.dtype
        used = {"dtype": dtype, "threads": torch.get_num_threads()}
        compute = asdict(asked) | {"device": str(device_of(asked))} | used
        stages = watch.as_dict() | {"until": until.value}
        sections = work.sections | {"stages": stages, "compute": compute}
        sha256, checks = configuration.sha256(self.asked), tuple(work.checks)
        return Report(sha256, sections, checks, tuple(work.pictures))

    def _ingest(self, work: "_Work") -> None:
        archive, catalog = work.directory.path / _input.ARCHIVE, self.share.own
        with work.watch.stage("ingest"):
            # A run that goes on has read its own.
            if self.leads and not archive.exists():
                _parts.archive_stars(archive, self.config, self.share.whole)
        work.watch.add("ingest", self.seconds_to_read)
        parts = self.share, self.observed, self.train
        precision, checks = _catalog_checks.parallax_precision(*parts)
        work.checks += checks
        rest = {name: value for name, value in catalog.provenance.items() if name != "counts"}
        rows = {"rows": _input.rows_by_fate(catalog), "system": catalog.stars.system.name}
        work.sections |= {
            "data": {**rows, **rest, **precision},
            **_near_stars.section_of(self.asked, self.config, self.near),
            "counts": self.counts(),
            "grid": _grids.grid_section(self.config, self.grid),
        }

    def _fit(self, work: "_Work", refits: bool) -> DistanceFit:
        """Fit the stars that are not held out; refits: another posterior takes its place."""
        log.info("fitting %d stars, engine %s", len(self.train), self.config.fit.engine)
        directory, step = work.directory, itertools.count()

        def on_step(values: Mapping[str, Any]) -> None:
            directory.record(stage="learn", step=next(step), **values)

        with work.watch.stage("fit"), directory.keeping():
            watch = Watch(directory.checkpointer("fit"), on_step, work.progress)
            result = fit_distances(self.config, self.observed, self.train, watch, self.limit)
            watch = Watch(directory.checkpointer("std"), on_step, work.progress)
            parts = self.train, self.holdout
            fit, judged = _between.narrowed(self.config, result.fit, result.data, parts, watch)
            result = replace(result, fit=fit)
        units, hyperparameters = _model.units_of(self.config), fit.hyperparameters.as_dict()
        directory.write_json(HYPERPARAMETERS, hyperparameters)
        if not refits:
            directory.write_arrays(POSTERIOR, fit.arrays)
        directory.write_arrays(DISTANCES, result.data.arrays())
        for line in result.rounds:
            directory.record(stage="distances", **line)
        directory.record(stage="fit", **fit.summary, **hyperparameters)
        work.sections |= {
            "hyperparameters": hyperparameters,
            "units": {name: units.get(name, "") for name in hyperparameters},
            "fit": fit.summary | _engines.learning_section(fit),
        }
        work.sections |= _engines.zero_points_section(
            self.config, self.group_names, fit, result.data.noisy, self.train
        )
        work.sections |= _beyond.section_of(result.data.noisy, fit)
        if errors := _engines.errors_section(fit):
            work.sections["hyperparameter_errors"] = errors
            log.info("learned: %s", _engines.learned_in_words(fit, units))
        rounds = {"distances": {"rounds": list(result.rounds)}} if result.rounds else {}
        near, checks = _near_stars.check_of_fit(self.config, fit, result.data.noisy, self.train)
        work.sections |= judged | rounds | near
        work.checks += _checks.checks_of_data(self.config, fit, self.observed, self.train)
        is_sharp = bool(checks) and not checks[0].passed
        work.checks += (*_checks.checks_of_fit(self.config, fit, is_sharp), *checks)
        if self.tile is not None:
            work.checks.append(self.tile.check(fit.hyperparameters.longest))
        return result

    def _evaluate(self, work: "_Work", result: DistanceFit) -> Predictions | None:
        with work.watch.stage("evaluate"):
            if not len(self.holdout):
                return None
            fit, observed = result.fit, result.renewed(self.config, work.progress)
            held_out = _distances.predictions(fit, observed, self.holdout, work.progress)
            work.directory.write_arrays(HELD_OUT, held_out.arrays())
            own, of_a_v = torch.from_numpy(self.stars.distance), self.stars.system.per_a_v
            distance = self.share.world.gathered(own).numpy()[held_out.index]
            work.sections |= reports.held_out_sections(held_out, distance, of_a_v)
            parts = self.config, held_out, fit, observed, self.train, self.holdout
            work.checks += _checks.checks_of_held_out(*parts)
            return held_out

    def _refit(
        self, work: "_Work", at: _model.Hyperparameters, observed: Observations, start: Arrays
    ) -> _engines.StarFit:
        """Condition on all stars at the hyperparameters learned without those held out, from where
        that fit has ended."""
        log.info("fitting all %d stars, for the map", len(observed))
        directory = work.directory
        with work.watch.stage("refit"), directory.keeping():
            watch = Watch(directory.checkpointer("refit"), progress=work.progress)
            fit = refit_all(self.config, at, observed, self.mapped, start, watch)
        fit = _engines.with_unresolved(self.config, fit, at.unresolved)
        directory.write_arrays(REFIT_POSTERIOR, fit.arrays)
        directory.write_json(REFIT, fit.hyperparameters.as_dict())
        if self.leads:
            (directory.path / POSTERIOR).unlink(missing_ok=True)
        numbers = fit.hyperparameters.as_dict()
        moved = {name: value for name, value in numbers.items() if value != getattr(at, name)}
        directory.record(stage="refit", **fit.summary)
        work.sections["refit"] = {"stars": len(observed), **moved, **fit.summary}
        work.sections |= _engines.zero_points_section(
            self.config, self.group_names, fit, observed, self.mapped
        )
        work.checks += _checks.checks_of_refit(self.config, fit)
        return fit

    def _compare(self, work: "_Work", fit: _engines.StarFit) -> None:
        """Score the density of the map where the truth is known."""
        if self.truth is None or not self.leads:
            return
        with work.watch.stage("evaluate"):
            against = self.grid, self.truth, self.config.fit.seed, work.progress
            work.sections["truth"] = _export.truth_scores(self.field(fit), *against)

    def _write(self, work: "_Work", fit: _engines.StarFit, held_out: Predictions | None) -> None:
        directory, progress = work.directory, work.progress
        with work.watch.stage("export"):
            density, made = self.field(fit), self.provenance(fit, len(self.mapped))
            work.sections |= _export.coverage_sections(density, self.grid, self.device)
            work.sections["outputs"] = _export.export_run(
                directory, self.config, density, self.grid, made, progress, self.share.world
            )
            if self.leads and self.config.export.figures:
                whole = self.share.whole or _input.archived_stars(directory.path)
                watched = reports.WatchedField(density, "map of the figures", progress)
                drawn = _export.drawn_map(directory, self.config, watched, self.grid)
                views = drawn, density, self.device, self.truth, whole.stars, held_out, made
                material = _export.Material(self.config, fit, *views)
                work.pictures += _export.draw_figures(material, directory, progress)

    def field(self, fit: _engines.StarFit) -> AbstractDensityField:
        """Return the density, for maps, without coverage where a magnitude limit hides it."""
        density = _export.field_of(self.config, fit, self.grid, self.stars.system, self.device)
        where = self.grid, self.whole, self.device
        return density if self.reach is None else LimitedField.of(density, self.reach, *where)

    def provenance(self, fit: _engines.StarFit, stars: int) -> Provenance:
        """Describe where the maps of a fit to so many stars come from."""
        return _parts.provenance_of(self.asked, self.tile, fit.hyperparameters.as_dict(), stars)


@final
@dataclass
class _Work:
    """Where the stages of a run write, and what they add to the report."""

    directory: RunDirectory
    watch: reports.Stopwatch
    progress: Progress
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    pictures: list[reports.Picture] = field(default_factory=list)


def prepare_stars(
    config: Config, earlier: Path | None = None, world: AbstractWorld = ALONE
) -> StarRun:
    """Read and check all that the run needs; write nothing.

    earlier: the directory of the same run, where it is resumed; its stars are there already.
    world: ranks that share the stars.
    """
    engine = _engines.engine_of(config)
    # The box of a tile is smaller, and comes with the stars, as does a spacing that they choose.
    if not config.data.tile and config.grid.spacing > 0.0 and config.grid.levels != "auto":
        _plan.refuse_nodes(config)
    start = time.perf_counter()
    catalog = _parts.catalog_of(config, earlier, world)
    own = catalog.own if isinstance(catalog, _parts.StarShare) else catalog
    seconds, truth = time.perf_counter() - start, _export.truth_of(config.data, own.stars.system)
    run = _within_memory(_with_column(assemble(config, catalog, truth, seconds, world, earlier)))
    rows = len(run.mapped) + len(run.observed.column or ())
    _checks.refuse_more_rows(config, rows, engine.most_rows, run.refits)
    _engines.check_groups(config, run.group_names, run.observed)
    checks = _checks.data_checks(run.config, run.share, run.observed, run.grid)
    if run.reach is not None and run.leads:
        log.info("magnitude limit: %s", run.reach)
    if run.leads:
        log.info("mean: %s", _near_stars.in_words(config, run.config, run.near)["mean"])
        _checks.warn_of(checks)
    return replace(run, checks=checks)


def _within_memory(run: StarRun) -> StarRun:
    """Return the run without those grids around the box that its stars ask for and its memory has
    no place for."""
    while run.asked.grid.around == AUTO and run.config.grid.around:
        plan = run.plan()
        too_much = torch.tensor(int(plan.bytes_needed > plan.bytes_allowed))
        if int(run.share.world.total(too_much)) == 0:
            break
        config = _near_stars.resolved(_grids.with_fewer_around(run.config, run.asked), run.near)
        sight = _resolution.sight_of(config, run.share)
        run = _with_column(replace(run, config=config, sight=sight))
    return run


def _with_column(run: StarRun) -> StarRun:
    """Return the run with the far column among its observations, if it has one."""
    where = run.whole, run.stars.system, run.device, run.share.world
    column = _beyond.column_of(run.config, *where)
    return replace(run, sight=run.sight.changed(lambda observed: replace(observed, column=column)))


def assemble(
    config: Config,
    catalog: _input.StarInput | _parts.StarShare,
    truth: DustMap | None = None,
    seconds: float = 0.0,
    world: AbstractWorld = ALONE,
    earlier: Path | None = None,
) -> StarRun:
    """Observations and split, the same of the same configuration and stars; catalog: the stars, of
    which the ranks take their shares, or the share of this one."""
    asked, tile = config, None
    if isinstance(catalog, _parts.StarShare):
        share = catalog
    else:
        config, catalog, tile = _parts.part_of_sky(asked, catalog)
        config, catalog = _resolution.with_cells(config, catalog)
        share = _parts.StarShare.of_all(catalog, world)
    if share.own.stars.multiplicity is not None:
        config = replace(config, model=_resolution.of_means(config.model))
        check_scatter_of_means(config.model, "data.catalog, which holds means of stars,")
    if not config.data.groups:
        own = replace(share.own, stars=replace(share.own.stars, groups=None))
        share = replace(share, own=own)
    near = _near_stars.asked(config, share)
    config = _resolution.resolved(config, share.sample, earlier)
    config = _near_stars.resolved(config, near)
    grid, sight = _grids.grid_of(config.grid), _resolution.sight_of(config, share)
    return StarRun(asked, config, share, grid, sight, truth, tile, seconds, near=near)
