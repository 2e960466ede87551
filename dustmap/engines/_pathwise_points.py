"""Point values in the global engine: local kriging weights on a grid of their own, one solve.

The grid is as fine as the learned kernel and the noise ask for; places beyond it see the plain
kernel. Mean and draws come in one solve, for the field or for as many unknowns as there are data.
"""

import functools
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap import inference
from dustmap.engines import _grids
from dustmap.engines._engine import Arrays, Problem, arrays_of, tensors_of
from dustmap.engines._inducing_grid import ExtrapolatingFeatures
from dustmap.engines._memory import DATA_VECTORS, FIELD_VECTORS, KRIGING
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, GridPrior, RegularGrid, torus_for
from dustmap.gp.features import LocalFeatures
from dustmap.gp.kernels import AbstractKernel, AbstractMatern, StationaryKernel, SumKernel
from dustmap.inference import DataSpaceSolution, GlobalSolution, GridModel, PathwisePosterior

log = logging.getLogger(__name__)

#: Vectors over the torus held at once for every draw by a solve in data space; measured: 3.7.
_VECTORS_PER_DRAW = 4
#: Tolerance of the residuals beside the right-hand side of a draw, and the most steps of CG.
_RTOL = {torch.float32: 1e-3, torch.float64: 1e-4}
# In data space: the means of 5,000 satellite temperatures were within 0.04 (float32) and 0.001
# (float64) posterior standard deviations, with the tolerances above within 0.15 and 0.02.
_DATA_RTOL = {torch.float32: 3e-4, torch.float64: 1e-5}
#: Tolerance of the residuals of a solve at the nodes, in standard deviations of the noise.
_NODE_RTOL = 1e-3
#: Nodes of an axis that stencils at the faces of the grid have beyond them, and bytes that an entry
#: of W takes, with the transpose and on the nodes that are seen alone.
_BEYOND, _ENTRY = KRIGING - 1, 48
_MAX_STEPS = 3000
#: Tolerance of the rows of places beyond the grid.
_OUTER_RTOL = 1e-5
#: An automatic grid has a torus of at most so many points per datum, or of so many in all.
# In 3-D with 10,001 rows, ℓ a third of the box and little noise, 16 per datum left an error of
# 0.049, 50 one of 0.041, where the exact process left 0.040.
_MOST_PER_DATUM, _FEW = 48, 2**15
#: Sides of the grid that a rough term of a sum is long, at most, by dimension, see `within_box`,
#: and its lengths around the grid, at most.
# In 2-D, half a side left means a tenth beyond the data 0.38 standard deviations off, 0.65 leave
# 0.27; in 3-D the nodes for that are dearer than what it mends.
_LONGEST, _PADDING = (0.65, 0.65, 0.5), 2.0
#: Ratio of the length of a term that stands for another to the least that would be of its shape,
#: below which it is said: at 0.15 means of 300 rows are a tenth of a standard deviation off (rms).
_ALIKE = 0.15
#: Arrays of a posterior beside the spread of its coefficients.
_FIELDS = ("coefficients", "eps_mean", "deviations")
_IN_FLOAT64 = 'fitted in float64: float32 lost it; pass dtype="float64"'


@final
@dataclass(frozen=True)
class PointSettings:
    """Settings of a fit of point values.

    Attributes
    ----------
    samples, seed : of the draws
    padding : length scales around the grid
    grid : or points per axis; None for an automatic one
    dtype, max_memory
    """

    samples: int
    padding: float
    dtype: torch.dtype
    max_memory: int
    seed: int = 0
    grid: RegularGrid | tuple[int, ...] | None = None

    def max_features(self, n: int) -> int:
        """The most points of the torus of an automatic grid for n data.

        The vectors of one right-hand side, and the draws, which stay, take half the memory.
        """
        vectors = 2 * (FIELD_VECTORS + self.samples)
        fitting = self.max_memory // (vectors * self.dtype.itemsize)
        return min(fitting, max(_FEW, _MOST_PER_DATUM * n))


@final
@dataclass(frozen=True)
class PointPlan(_grids.AbstractGridPlan):
    """Grid, torus and draws of n data.

    Attributes
    ----------
    grid, torus_shape
    n, samples
    seed : of the draws
    dtype, max_memory
    longest, in_all_axes : of rough terms, see `within_box`; None for fits of earlier versions,
        which had no such
    """

    grid: RegularGrid
    torus_shape: tuple[int, ...]
    n: int
    samples: int
    seed: int
    dtype: torch.dtype
    max_memory: int
    longest: float | None = None
    in_all_axes: bool = False

    @property
    def bytes_needed(self) -> int:
        """Bytes of draws, one right-hand side, spectra and vectors of data."""
        fields = (self.samples + FIELD_VECTORS) * self.n_features * self.dtype.itemsize
        return fields + 64 * self.n_features + DATA_VECTORS * self.n * self.dtype.itemsize

    @property
    def seen_nodes(self) -> int:
        """Nodes that data within the grid may see, the stencils of the outer cells included."""
        pairs = zip(self.grid.shape, self.torus_shape, strict=True)
        return math.prod(min(m + _BEYOND, length) for m, length in pairs)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices and rows of a solve at the nodes."""
        return inference.node_bytes(self.seen_nodes) + _ENTRY * self.entries

    @property
    def entries(self) -> int:
        """Entries of W."""
        return self.n * math.prod([KRIGING] * self.grid.dim)

    @property
    def at_nodes(self) -> bool:
        """Whether to solve by matrices of the nodes, see `suits_nodes`, where all of it fits.

        For 50,000 values of a smooth function in 3-D, 6,156 nodes and 64 draws that took 45 CPU
        seconds; conjugate gradients in data space took 8.6 a step, and more than 35 of them.
        """
        nodes = self.seen_nodes
        making = 8 * inference.DRAW_VECTORS * inference.DRAWS_TOGETHER * self.n_features
        fits = self.bytes_needed + self.matrix_bytes + making <= self.max_memory
        sizes = (nodes, self.n, self.entries, self.n_features, self.samples)
        return fits and inference.suits_nodes(*sizes)

    @property
    def in_data_space(self) -> bool:
        """Whether to solve for N rather than for M_w unknowns, where N ≤ M_w and it fits.

        For 5,000 and 20,000 satellite temperatures, 8 draws in float32, this was 0.8 to 40 times as
        fast where M_w was 1.4 to 14 N, most so with little noise, and 0.3 to 0.8 times below N.
        """
        draws = _VECTORS_PER_DRAW * (self.samples + FIELD_VECTORS)
        fits = draws * self.n_features * self.dtype.itemsize <= self.max_memory
        return self.n <= self.n_features and fits

    @property
    def refusal(self) -> str:
        return (
            f"grid {_grids.times(self.grid.shape)} needs {self.bytes_needed:,} bytes "
            f"for {self.samples} samples of {self.n_features:,} variables; max_memory = "
            f"{self.max_memory:,}. Take a coarser grid, less padding, fewer samples, or raise "
            "max_memory"
        )


def plan_points(
    kernel: AbstractKernel, grid: RegularGrid, n: int, settings: PointSettings
) -> PointPlan:
    """Plan a fit of n data on this grid, with the padding of the kernel around it.

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern32
    >>> settings = PointSettings(32, padding=4.0, dtype=torch.float64, max_memory=2**30)
    >>> plan = plan_points(Matern32([1.0]), RegularGrid((0.0,), (0.25,), (101,)), 80, settings)
    >>> plan.torus_shape, plan.in_data_space
    ((120,), True)
    """
    s, longest = settings, _LONGEST[min(grid.dim, len(_LONGEST)) - 1]
    # The torus of a term that is short in another axis leaves an automatic grid too few nodes.
    in_all = s.grid is not None
    inside = within_box(kernel, grid, longest, in_all_axes=in_all)
    padding = s.padding if inside is kernel else min(s.padding, _PADDING)
    torus = torus_for(inside, grid, padding)
    return PointPlan(grid, torus, n, s.samples, s.seed, s.dtype, s.max_memory, longest, in_all)


def planned_points(
    problem: Problem, settings: PointSettings
) -> tuple[PointPlan, _grids.GridChoice | None]:
    """On the grid of the settings, else on the coarsest that is fine enough and fits the memory."""
    n = len(problem.data)
    plan = functools.partial(plan_points, problem.model.kernel, n=n, settings=settings)
    if settings.grid is not None:
        return plan(_grids.given_grid(problem, settings.grid)), None
    choice = _grids.chosen_grid(problem, plan, settings.max_features(n))
    return plan(choice.grid), choice


def within_box(
    kernel: AbstractKernel, grid: RegularGrid, longest: float | None, *, in_all_axes: bool
) -> AbstractKernel:
    """The kernel of a sum whose rough terms are at most so many sides of the grid long.

    For r ≪ ℓ a Matérn term of ν < 1 is σ² − C (σ²/ℓ^{2ν}) r^{2ν}: that factor is all that data in
    a box far smaller than ℓ say of it, but for a constant, which the mean takes. So (c^{2ν} σ²,
    c ℓ) stands for (σ², ℓ), and the torus is not four times as wide as ℓ at the distance of nodes
    that the shortest term asks for. Beyond the grid predictions return to the mean within that
    length. Kernels of one term need none of this: no shorter one asks for nodes.

    in_all_axes: whether terms stay at least that long in every axis. Otherwise they do in the one
    in which they are the most sides long, and one that is short in another axis loses its shape
    (`shortened_advice`).

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern12
    >>> grid, short = RegularGrid((0.0,), (0.1,), (101,)), Matern12([1.0])
    >>> term = Matern12([50.0], variance=8.0)
    >>> within_box(term + short, grid, 0.5, in_all_axes=True).kernels[0]
    StationaryKernel(matern12, lengthscale=[5.0], variance=0.8, dim=1)
    """
    if longest is None or not isinstance(kernel, SumKernel):
        return kernel
    sides = torch.tensor(grid.upper, dtype=torch.float64) - torch.tensor(grid.lower)
    terms = [_shortened(term, longest * sides, in_all_axes) for term in kernel.kernels]
    return kernel if all(map(operator.is_, terms, kernel.kernels)) else SumKernel(terms)


def _shortened(term: AbstractKernel, longest: Tensor, in_all_axes: bool) -> AbstractKernel:
    """The rough term of length scales `longest` (D,), in its own proportions: at least as long in
    all axes, or at most."""
    if not (isinstance(term, StationaryKernel) and isinstance(term.profile, AbstractMatern)):
        return term
    nu = term.profile.nu
    ratios = longest.to(term.device) / term.lengthscale.detach()
    log_ratio = (ratios.amax() if in_all_axes else ratios.amin()).log()
    if nu >= 1.0 or log_ratio >= 0.0:
        return term
    length, amplitude = term.parameters()
    shorter = length.at(length.value + log_ratio)
    return term.with_parameters((shorter, amplitude.at(amplitude.value + 2.0 * nu * log_ratio)))


def shortened_advice(kernel: AbstractKernel, plan: PointPlan) -> list[str]:
    """Advice where another term stands for one that is short in one axis and long in another."""
    how = kernel, plan.grid, plan.longest
    kept = within_box(*how, in_all_axes=True)
    taken = within_box(*how, in_all_axes=plan.in_all_axes)
    pairs = zip(_grids.lengths_of(kept).tolist(), _grids.lengths_of(taken).tolist(), strict=True)
    return [
        f"for a term of length {_rounded(length)} stands one of {_rounded(shorter)}, which is as "
        "rough and forgets sooner: give grid points per axis, on which lengths stay as they are"
        for length, shorter in pairs
        if min(b / a for a, b in zip(length, shorter, strict=True)) < _ALIKE
    ]


def _rounded(length: Sequence[float]) -> list[float]:
    return [float(f"{each:.3g}") for each in length]


@final
@dataclass(frozen=True, eq=False)
class PointFit:
    """The posterior and its solution. residual_ratio: median Var r / σ².

    plan: as carried out, in float64 where float32 would not do. space: "nodes", "data" or "field".
    """

    plan: PointPlan
    posterior: PathwisePosterior
    solution: GlobalSolution | DataSpaceSolution
    residual_ratio: float
    space: str


def fit_points(model: GPModel, data: Batch, plan: PointPlan) -> PointFit:
    """Posterior mean, draws and, where it is learned, the prior mean, in one solve.

    At the nodes or in data space where the plan says so. Rounding errors of float32 can stop the
    latter: then in float64, and for the field only where that fails as well. With little noise that
    is slow: for 20,000 temperatures and 16 draws it took a minute, the detour over float64 9
    seconds.
    """
    if plan.at_nodes:
        gridded = gridded_points(model, plan)
        settings = replace(_settings(model, plan, _DATA_RTOL), rtol=_NODE_RTOL)
        at_nodes = inference.solve_at_nodes(_within(gridded), data, settings)
        if at_nodes is not None and at_nodes.converged:
            return _finished(gridded, data, plan, at_nodes, "nodes")
        log.warning("the solve at %d nodes is lost in rounding errors", plan.seen_nodes)
    for tried in dict.fromkeys([plan, replace(plan, dtype=torch.float64)]):
        if not tried.in_data_space:
            continue
        gridded = gridded_points(model, tried)
        settings = _settings(model, tried, _DATA_RTOL)
        solution = _in_data_space(gridded, data, settings)
        if solution is not None and solution.converged:
            return _finished(gridded, data, tried, solution, "data")
        log.warning("%s loses the solve in data space in rounding errors", tried.dtype)
    gridded = gridded_points(model, plan)
    settings = _settings(model, plan, _RTOL)
    solved = inference.solve_global(_within(gridded), data, settings)
    return _finished(gridded, data, plan, solved, "field")


def _settings(
    model: GPModel, plan: PointPlan, rtol: Mapping[torch.dtype, float]
) -> inference.SolveSettings:
    return inference.SolveSettings(
        rtol=rtol[plan.dtype],
        max_steps=_MAX_STEPS,
        samples=plan.samples,
        seed=plan.seed,
        memory=plan.max_memory // 2,
        fit_mean=model.mean.is_learned,
    )


def _finished(
    model: GridModel,
    data: Batch,
    plan: PointPlan,
    solution: GlobalSolution | DataSpaceSolution,
    space: str,
) -> PointFit:
    """The posterior with the fitted mean."""
    model = model.with_fitted_mean(solution.mean_coefficients)
    posterior = replace(solution.posterior, model=model)
    return PointFit(plan, posterior, solution, inference.residual_ratio(model, data), space)


def _in_data_space(
    model: GridModel, data: Batch, settings: inference.SolveSettings
) -> DataSpaceSolution | None:
    """The solution, from data within the grid; None where its small systems are singular."""
    try:
        return inference.solve_in_data_space(_within(model), data, settings)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def _within(model: GridModel) -> GridModel:
    """The model of data within the grid."""
    assert isinstance(model.features, ExtrapolatingFeatures)
    return replace(model, features=model.features.inner)


def gridded_points(model: GPModel, plan: PointPlan) -> GridModel:
    """Features of points within the grid and beyond it, at the present hyperparameters."""
    kernel = within_box(model.kernel, plan.grid, plan.longest, in_all_axes=plan.in_all_axes)
    nugget = inference.nugget_for(kernel, plan.dtype)
    on_torus = GridPrior.padded(
        kernel, plan.grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    local = LocalFeatures(on_torus, memory=plan.max_memory // 2)
    features = ExtrapolatingFeatures.around(local, on_torus, _OUTER_RTOL, _MAX_STEPS)
    return GridModel(features, model.mean, model.noise)


def pathwise_arrays(posterior: PathwisePosterior) -> Arrays:
    """Arrays of mean, draws and the spread of a fitted mean, for `pathwise_posterior`."""
    return arrays_of({name: getattr(posterior, name) for name in _FIELDS}, posterior.spread)


def pathwise_posterior(
    model: GridModel, arrays: Arrays, device: torch.device | None = None
) -> PathwisePosterior:
    """The posterior of `pathwise_arrays`, with the explained share of the prior if it is there."""
    tensors = tensors_of(arrays, device)
    coefficients, mean, deviations = (tensors[name] for name in _FIELDS)
    return PathwisePosterior(
        model,
        coefficients,
        mean,
        deviations,
        spread=inference.CoefficientSpread.of_tensors(tensors),
        explained=tensors.get("explained"),
    )


def some_draws(
    posterior: PathwisePosterior, count: int, generator: torch.Generator
) -> PathwisePosterior:
    """Return the posterior with `count` of its draws, chosen at random."""
    have = len(posterior.deviations)
    if not 1 <= count <= have:
        raise UserError(
            f"n_samples = {count}: expected between 1 and samples = {have}, the draws that "
            f'engine="global" solved for; fit again with samples={max(count, 2)} or more'
        )
    chosen = torch.randperm(have, generator=generator)[:count]
    return posterior.with_draws(chosen)


def points_report(
    fit: PointFit, asked: PointPlan, grid: _grids.GridChoice, kernel: AbstractKernel
) -> dict[str, Any]:
    """Sizes, the end of the solve, what the grid was expected to leave, and advice."""
    plan, solution = fit.plan, fit.solution
    advice = [] if fit.plan == asked else [_IN_FLOAT64]
    advice += _grids.coarse_advice(fit.residual_ratio) or grid.advice
    advice += shortened_advice(kernel, plan)
    if not solution.converged:
        message = solution.message()
        if plan.dtype != torch.float64:
            message += '; rounding errors of float32 may be why: pass dtype="float64"'
        advice.append(message)
    return {
        **plan.report(),
        "samples": plan.samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "solve": {
            "space": fit.space,
            "status": solution.solve.worst.name.lower(),
            "steps": solution.block_steps,
            "residual": solution.worst_residual,
        },
        "residual_ratio": fit.residual_ratio,
        "expected": grid.expected,
        "advice": advice,
    }
