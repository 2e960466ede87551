"""Log-normal densities: positive everywhere, by metric Gaussian variational inference.

The mean of a problem's model is that of ln ρ at the nodes of the box, its kernel that of ln ρ.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch

from dustmap import gp, inference, linalg
from dustmap.engines import _engine, _memory
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Learning, Problem, Watch
from dustmap.engines._memory import Component, During, MemoryPlan, RankDivision
from dustmap.gp import features
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    Sharded,
    own_rays,
    sky_order,
    world_of,
)
from dustmap.inference import MGVIRound, MGVISolution

log = logging.getLogger(__name__)

#: Vectors over the torus a sample: where deviations follow the curvature, those they start from,
#: those drawn one by one, and these side by side.
DRAW_VECTORS = 3
#: Vectors over the torus of a step of one sample: what it starts from and is held by, iterate,
#: direction and trial. The allocator keeps their room while the samples are joined.
STEP_VECTORS = 15
#: Rank of the preconditioner; arrays over the nodes for each sample of two iterates, and for each
#: of the products that the preconditioner takes together.
_RANK, _DRAWN_FIELDS, _SKETCHED_FIELDS, _SKETCHED = 128, 6, 4, 32
#: Vectors a rank while a preconditioner takes the place of one of half its rank.
_RANK_VECTORS = 3
#: Share of the memory for random numbers that are kept, and draws of a gradient of the evidence.
_KEPT_SHARE, _DRAWS = 32, inference.MGVISettings.most_draws
#: Copies of the rays, in bytes, that a catalog with uncertain distances takes beside a fit.
_CATALOG = 5
#: Data a node from which on rays of one observer are surely solved for among the nodes, whose
#: preconditioner is the shorter.
_MANY = 4

#: The parts of a fit, in words.
_STAGES = {
    "weights": "weighing outliers",
    "mode": "most probable density",
    "evidence": "learning hyperparameters",
    "mean": "mean density",
}


@final
@dataclass(frozen=True)
class LogNormalSettings:
    """Settings of the log-normal engine.

    Attributes
    ----------
    samples : in pairs; an odd number is drawn with one more
    cg_steps : of a solve
    seed, dtype
    memory : bytes
    robust : Student-t noise; None for Gaussian
    beams : shared by rays of a fit; None for rows of their own, as the posterior has in any case
    """

    samples: int
    cg_steps: int
    seed: int
    dtype: torch.dtype
    memory: int
    robust: inference.RobustSettings | None = None
    beams: features.AbstractBeams | None = None

    @property
    def drawn(self) -> int:
        """Samples, in pairs."""
        return self.samples + self.samples % 2


@final
@dataclass(frozen=True)
class LogNormalEngine(AbstractEngine):
    """ρ = exp(H β + R ε) at the nodes of the box: mode, hyperparameters and samples.

    Examples
    --------
    >>> from dustmap.engines import Problem, Watch
    >>> from dustmap.gp import Batch, ConstantMean, GPModel, RegularGrid, functionals, kernels
    >>> from dustmap.gp.likelihoods import GaussianLikelihood
    >>> ends = torch.tensor([[0.9, 0.1, 0.2], [-0.3, 0.8, 0.1], [0.2, -0.5, 0.9]]).double()
    >>> rays, length = functionals.LineIntegrals.from_observer(ends), ends.norm(dim=1)
    >>> data = Batch(rays, length, torch.full_like(length, 1e-4))  # of a density of one
    >>> kernel, noise = kernels.Matern32(1.0, 0.25, dim=3).fixed(), GaussianLikelihood(learn=False)
    >>> model = GPModel(kernel, ConstantMean(learn=False), noise)
    >>> box = RegularGrid((-1.0,) * 3, (0.5,) * 3, (5,) * 3)
    >>> settings = LogNormalSettings(4, cg_steps=100, seed=0, dtype=torch.float64, memory=2**30)
    >>> fit = LogNormalEngine(settings).fit(Problem(model, data, box), Watch())
    >>> bool(((fit.posterior.predict(rays).mean - length).abs() < 0.05).all())
    True
    """

    settings: LogNormalSettings
    most_rows: ClassVar[int] = 10_000_000

    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes of samples, draws and the solver."""
        return self._divided_plan(problem, self.division(problem))[0]

    def _divided_plan(self, problem: Problem, division: RankDivision) -> tuple[MemoryPlan, bool]:
        """The plan, and whether solves may be made among the nodes: not where memory lacks for that
        and suffices without, for it does no more than save time."""
        information = self._information(problem, division)
        plan = self._plan(problem, division, information)
        left = self._left(problem)
        if not information or plan.peak <= left:
            return plan, True
        bare = self._plan(problem, division, ())
        if bare.peak >= plan.peak:
            return plan, True
        side = {"solves": "among the stars: memory lacks for information among the nodes"}
        return replace(bare, chunks={**bare.chunks, **side}), False

    def _most_rank(self, problem: Problem, division: RankDivision, among_nodes: bool) -> int:
        """To which the preconditioner may grow in the memory that solves leave, after all else is
        made; of powers of two, for little less memory not to change what a resumed fit does."""
        held = self._information(problem, division)[:1] if among_nodes else ()
        left = self._left(problem) - self._plan(problem, division, held).peak
        s = self.sizes(problem)
        each = _RANK_VECTORS * max(s.data, s.nodes) * s.itemsize
        most = torch.tensor([_RANK + max(0, left) // each])
        for world in (division.draws, division.rows):
            most = world.gathered(most).min()[None]
        return min(inference.MGVISettings.most_rank, 1 << (int(most).bit_length() - 1))

    def _left(self, problem: Problem) -> int:
        """Bytes for a fit beside the rays."""
        return self.settings.memory - _CATALOG * own_rays(problem.data.functional).bytes

    def _plan(
        self, problem: Problem, division: RankDivision, information: tuple[Component, ...]
    ) -> MemoryPlan:
        """The plan with these components of information among the nodes."""
        s = self.sizes(problem)
        field_bytes, rank = s.nodes * s.itemsize, min(_RANK, s.data // 8)
        allotted = division.allotment.rows
        rows, how = _memory.row_component(division.row_bytes, allotted, division.count)
        making = s.samples * s.vector + _SKETCHED_FIELDS * _SKETCHED * field_bytes
        length = s.nodes if information and s.data >= _MANY * s.nodes else s.data
        vectors = _memory.FIELD_VECTORS * s.samples * s.data + _RANK_VECTORS * rank * length
        samples = f"{s.samples} densities at {s.nodes:,} nodes"
        draws = f"{s.samples} samples of {s.torus:,} variables, {DRAW_VECTORS} vectors each"
        fields = f"of {s.samples} samples at {s.nodes:,} nodes, {_DRAWN_FIELDS} each"
        numbers = "of draws, kept for the next time"
        products = f"{_SKETCHED} products at {s.nodes:,} nodes, beside the samples"
        solver = f"vectors over {s.data:,} stars and a preconditioner of rank {rank}"
        parts = (
            Component("samples", 3 * s.samples * field_bytes, During.WHOLE, samples),
            _memory.spectra_component(s),
            Component("draws", drawing_bytes(s), During.DRAWING, draws),
            Component("random numbers", self._number_bytes(s), During.FIT, numbers),
            Component("fields", _DRAWN_FIELDS * s.samples * field_bytes, During.DRAWING, fields),
            Component("making the preconditioner", making, During.PREPARING, products),
            Component("solver", vectors * s.itemsize, During.FIT, solver),
            rows,
            *information,
            *division.components,
            _memory.WORKING_COMPONENT,
        )
        return MemoryPlan(parts, {"rows of the stars": how, **division.in_words})

    def _information(self, problem: Problem, division: RankDivision) -> tuple[Component, ...]:
        """The most that solves among nodes take, where fits may choose them (`SeenNodes.of`)."""
        s, model, rows = self.sizes(problem), problem.model, division.row_bytes
        alone = division.draws.size == 1 and division.rows.size == 1
        stored = 0 < rows <= division.allotment.rows and self.settings.beams is None
        known = len(gp.Parameters.of(model, without=("mean",)).theta) == 0
        if not (alone and stored and known and model.zero_points is None and s.nodes <= s.data):
            return ()
        entry = 4 + s.itemsize
        stored_entries = rows // (2 * entry)
        most = inference.most_information(stored_entries, s.nodes)
        what = f"of the data among nodes, at most {most:,} entries"
        making = linalg.gram_making_bytes(most, s.nodes, s.data, stored_entries)
        return (
            Component("information", entry * most, During.FIT, what),
            Component("making it", making, During.PREPARING, "sums of sparse products"),
        )

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Mode, hyperparameters and samples; priors are centred on the problem's origin."""
        settings, start = self.settings, _start_of(problem)
        order = _order_of(problem.data.functional, 0 if start is None else len(start.pull))
        problem = replace(problem, data=problem.data[order])
        division = self.division(problem)
        # Ranks that divide draws need the rays of all.
        data = gp.whole_batch(problem.data) if division.draws.size > 1 else problem.data
        for what, which in division.in_words.items():
            log.info("%s: %s", what, which)
        if settings.samples % 2:
            log.info("%d samples: %d are drawn, in pairs", settings.samples, settings.drawn)
        names = problem.model.log_names
        _, among_nodes = self._divided_plan(problem, division)
        how = inference.MGVISettings(
            samples=settings.drawn,
            cg_steps=settings.cg_steps,
            seed=settings.seed,
            kept=self._kept,
            among_nodes=among_nodes,
            most_rank=self._most_rank(problem, division, among_nodes),
            robust=problem.robust(settings.robust),
        )
        solution = inference.fit_mgvi(
            self._model(problem, division),
            data,
            how.before_another() if problem.is_first else how,
            functools.partial(_log, names=names, watch=watch),
            origin=gp.Parameters.of(problem.origin or problem.model, without=("mean",)).theta,
            start=start and start.in_order(order[: len(start.pull)]),
            world=division.draws,
            checkpointer=watch.checkpointer,
            progress=watch.progress,
        )
        fitted = solution.model
        mean = fitted.mean.with_coefficients(solution.coefficients)
        learned = replace(
            problem.model, kernel=fitted.prior.kernel, mean=mean, likelihood=fitted.likelihood
        )
        # As a later command will see it, so that both see the same bits.
        posterior = solution.posterior
        assert posterior.explained is not None
        names_kept = ("explained", "log_density", "log_samples", "log_variance")
        kept = {name: getattr(posterior, name) for name in names_kept}
        if posterior.groups is not None:
            kept["zero_point_samples"] = posterior.groups.white
        arrays = {
            **_engine.arrays_of(kept),
            **_engine.zero_point_arrays(posterior, fitted.zero_points),
        }
        trace = [_numbers(line, names) for line in solution.history]
        made = replace(
            self.load(replace(problem, model=learned), arrays),
            report=_report(solution),
            learning=Learning.of(solution.status, len(data), trace, errors=_errors_of(solution)),
            noise=None if solution.weights is None else solution.weights.noise,
            start=_start_arrays(solution.start.in_order(order.argsort())),
            is_rough=problem.is_first,
        )
        return _engine.with_errors(made, data, settings.robust)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The posterior of an earlier fit, which is made of its samples alone.

        Runs of earlier versions have no variance of ln ρ, or no explained share: spread and
        coverage then go by the variance of the samples.
        """
        del plan
        tensors = _engine.tensors_of(arrays, problem.data.y.device)
        groups, points = None, _engine.with_shares_of(problem.model, arrays).zero_points
        if points is not None:
            groups = inference.GroupSamples(points, tensors["zero_point_samples"])
        posterior = inference.LogNormalPosterior(
            self._rows(problem),
            tensors["log_density"],
            tensors["log_samples"],
            tensors.get("explained"),
            groups,
            log_variance=tensors.get("log_variance"),
        )
        return EngineFit(posterior, problem.model, arrays=arrays, at_nodes=posterior.at_nodes)

    def _model(self, problem: Problem, division: RankDivision) -> inference.LogNormalModel:
        """Prior, mean and noise, and rows of the fit through shared beams where there are any."""
        model, settings = problem.model, self.settings
        prior = self._prior(problem, division)
        rows = self._rows(problem, division.allotment.rows, settings.beams)
        return inference.LogNormalModel(
            prior, model.mean, model.noise, rows, zero_points=model.zero_points
        )

    def _prior(self, problem: Problem, division: RankDivision) -> gp.AbstractLatticePrior:
        """The prior on the grid, or on nested ones."""
        kernel, nodes, settings = problem.model.kernel, problem.lattice, self.settings
        dtype, memory, world = settings.dtype, settings.memory, division.rows
        if isinstance(nodes, gp.NestedGrids):
            return gp.NestedPrior.of(kernel, nodes, dtype=dtype, memory=memory, world=world)
        return gp.GridPrior.padded(
            kernel,
            nodes,
            nugget=inference.nugget_for(kernel, dtype),
            dtype=dtype,
            memory=memory,
            world=world,
            makers=world_of(problem.data.functional),
        )

    def _rows(
        self, problem: Problem, memory: int = 0, beams: features.AbstractBeams | None = None
    ) -> "functools.partial[Any]":
        """Rows of any functional by multilinear interpolation. They are not stored by default, as a
        posterior multiplies them once."""
        rows: Callable[..., linalg.AbstractOperator] = features.interpolation
        if beams is not None:
            rows = functools.partial(features.beamed_interpolation, beams=beams)
        dtype = self.settings.dtype
        return functools.partial(rows, grid=problem.lattice, memory=memory, dtype=dtype)

    def sizes(self, problem: Problem) -> _memory.GriddedSizes:
        """Sizes of the solve on the map's grid."""
        return problem.sizes(self.settings.drawn, self.settings.dtype.itemsize)

    @property
    def _kept(self) -> int:
        """Bytes of random numbers that are kept, at most."""
        return min(inference.MGVISettings.kept, self.settings.memory // _KEPT_SHARE)

    def _number_bytes(self, sizes: _memory.GriddedSizes) -> int:
        """Those of a fit."""
        return min(self._kept, max(_DRAWS, sizes.samples // 2) * sizes.vector)

    def division(self, problem: Problem) -> RankDivision:
        """Divide draws among the ranks where each of them can store all rows, or else the rows."""
        sizes, functional = self.sizes(problem), problem.data.functional
        world, held = world_of(functional), drawing_bytes(sizes) + self._number_bytes(sizes)
        rays = own_rays(functional)
        own = self.row_bytes(problem, rays) if len(rays) else 0
        allot = functools.partial(_memory.Allotment.of_rows, self.settings.memory, sizes)
        if world.size == 1:
            return RankDivision(own, len(rays), allot(held, own))
        rows, geometry = world.total(torch.tensor([own, rays.bytes])).tolist()
        allotment = allot(held + geometry, rows)
        if allotment.rows > 0:
            return RankDivision(rows, len(functional), allotment, draws=world, geometry=geometry)
        return RankDivision(own, len(rays), allot(held, own), rows=world)

    def row_bytes(self, problem: Problem, rays: LineIntegrals) -> int:
        """Bytes of rows with their transpose, those of shared beams included."""
        grid, dtype, beams = problem.lattice, self.settings.dtype, self.settings.beams
        if beams is None:
            return features.row_bytes(rays, grid, _memory.LINEAR, dtype)
        table = features.BeamTable.of(grid, beams, dtype=dtype, device=rays.device)
        return table.planned_bytes(rays)


def drawing_bytes(sizes: _memory.GriddedSizes) -> int:
    """Return the bytes of all vectors of the samples."""
    return (DRAW_VECTORS * sizes.samples + STEP_VECTORS) * sizes.vector


def _order_of(rays: AbstractFunctional, first: int) -> torch.Tensor:
    """The order (N,) in which a fit takes rays, whose products are faster then: the first ones, of
    an earlier fit, as they had it there, and the others after them."""
    assert isinstance(rays, LineIntegrals | Sharded)
    parts = sky_order(rays[:first]), sky_order(rays[first:]) + first
    return torch.cat(parts)


def _report(solution: MGVISolution) -> dict[str, object]:
    """Sizes of the prior and the end of the fit, as plain values."""
    last, prior = solution.history[-1], solution.model.prior.report
    weights = solution.weights
    robust = dict[str, object]()
    if weights is not None:
        robust = {"outliers": weights.outliers, "noise_width": solution.noise_width}
    return robust | {
        "torus": list(prior.torus_shape),
        "wrap_error": prior.wrap_error,
        "wrap_inflation": prior.wrap_inflation,
        "samples": solution.posterior.n_samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "rounds": len(solution.history),
        "rejected_steps": solution.rejected_steps,
        "misfit_over_noise": last.misfit,
        "cg_steps": max(line.cg_steps for line in solution.history),
        "solver": solution.message(),
    }


def _errors_of(solution: MGVISolution) -> gp.ParameterErrors | None:
    """Errors of what is learned of kernel, noise and coefficients of the mean."""
    errors, of_mean = solution.errors, solution.coefficient_covariance
    if of_mean is None:
        return errors
    beta = _engine.errors_of_coefficients(of_mean)
    return beta if errors is None else errors.joined(beta)


def _start_arrays(start: inference.MGVIStart) -> Arrays:
    """Arrays for `_start_of`."""
    numbers = {n: torch.tensor(getattr(start, n)) for n in ("torus", "curved", "share", "std")}
    names = ("mode", "means", "deviations", "pull")
    return _engine.arrays_of(numbers | {name: getattr(start, name) for name in names})


def _start_of(problem: Problem) -> inference.MGVIStart | None:
    """The end of the earlier fit that the problem starts from, None of a first fit."""
    if not problem.start:
        return None
    vectors = _engine.tensors_of(problem.start, problem.data.y.device)
    torus, curved = tuple(vectors.pop("torus").tolist()), bool(vectors.pop("curved"))
    if "mean" in vectors:  # Runs of earlier versions have one, and no share.
        vectors["means"] = vectors.pop("mean")[None]
    share, std = float(vectors.pop("share", 1.0)), float(vectors.pop("std", 0.0))
    return inference.MGVIStart(torus, curved=curved, share=share, std=std, **vectors)


def _numbers(line: MGVIRound, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one round, by name."""
    parameters = {f"log_{n}": value for n, value in zip(names, line.parameters, strict=True)}
    return {
        "energy": line.energy,
        "misfit": line.misfit,
        "moved": line.moved,
        "cg_steps": float(line.cg_steps),
        **parameters,
    }


def _log(line: MGVIRound, names: tuple[str, ...], watch: Watch) -> None:
    """Log a round, and pass its numbers to `watch`."""
    log.info(
        "%s: residuals are %.3g of the errors (rms), %d solver steps",
        _STAGES.get(line.stage, line.stage),
        line.misfit,
        line.cg_steps,
    )
    watch.on_step({"part": line.stage, **_numbers(line, names)})
