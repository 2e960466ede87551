"""Feature maps as inference sees them: rows of Φ, products with Φ, and the residual variance.

Rows are made a group at a time.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp._lattice_prior import AbstractLatticePrior
from dustmap.gp._parameters import AbstractParametric
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.linalg import AbstractOperator, SolveResult, chunks

#: Loss of k_ff − ‖φ‖² to cancellation and to images below the wrapping tolerance, over k_ff.
_ROUND_OFF = {torch.float32: 1e-2, torch.float64: 1e-5}
#: Bytes of one array of a group. What rows are made of then stays near the processor, and its
#: memory is reused: arrays of more than 32 MB go back to the system, which hands out empty pages
#: each time, and that takes longer than the arithmetic.
GROUP_BYTES = 16 * 2**20


@final
@dataclass(frozen=True)
class SolveSummary:
    """Counts of the linear solves behind some rows, all zeros where none was needed: right-hand
    sides, those that missed the tolerance, the most steps, and the largest true residual."""

    columns: int = 0
    unconverged: int = 0
    steps: int = 0
    residual: float = 0.0

    @staticmethod
    def of(result: SolveResult) -> "SolveSummary":
        """Return the summary of one batched solve."""
        missed = result.residuals > result.rtol
        return SolveSummary(
            result.residuals.numel(),
            int(missed.sum()),
            int(result.steps.max()),
            float(result.residuals.max()),
        )

    def merged(self, other: "SolveSummary") -> "SolveSummary":
        """Return the summary of both sets of solves."""
        return SolveSummary(
            self.columns + other.columns,
            self.unconverged + other.unconverged,
            max(self.steps, other.steps),
            max(self.residual, other.residual),
        )


@final
@dataclass(frozen=True, eq=False)
class Features:
    """Rows φ_n of Φ with what they leave unexplained.

    phi (N, M_w); residual_variance (N,): Var r_n ≥ 0; solves: behind the rows; clamped: number of
    Var r that round-off had made negative and that were set to 0.
    """

    phi: Tensor
    residual_variance: Tensor
    solves: SolveSummary = SolveSummary()
    clamped: int = 0

    @staticmethod
    def of(
        phi: Tensor, k_ff: Tensor, explained: Tensor, solves: SolveSummary | None = None
    ) -> "Features":
        """Rows with Var r = k_ff − explained; more negative than round-off is an error."""
        residual = k_ff - explained
        value, prior = residual.detach(), k_ff.detach()
        if bool((value < -_ROUND_OFF[phi.dtype] * prior).any()):
            worst = int((value / prior.clamp_min(1e-300)).argmin())
            raise UserError(
                f"the features of datum {worst} explain {float(explained[worst].detach()):.6g}, "
                f"more than its prior variance {float(prior[worst]):.6g}: rounding errors "
                "of a nearly singular prior; use float64, a nugget or a coarser grid"
            )
        clamped = int((value < 0).sum())
        return Features(phi, residual.clamp_min(0.0), solves or SolveSummary(), clamped)

    def __getitem__(self, index: Tensor | slice) -> "Features":
        return Features(self.phi[index], self.residual_variance[index], self.solves, self.clamped)

    def detached(self) -> "Features":
        """Detach from the autograd graph."""
        return replace(
            self, phi=self.phi.detach(), residual_variance=self.residual_variance.detach()
        )


class AbstractFeatureMap(AbstractParametric, ABC):
    """f_n = m_n + φ_nᵀ ε + r_n with ε ~ N(0, I): how data see the whitened field.

    Nothing downstream knows which map it got. Its parameters are those of the kernel, and inducing
    points that are learned; all sizes are those of one kernel, and `with_parameters` keeps them.

    memory: bytes that a chunk of rows may take.
    """

    memory: int

    @property
    @abstractmethod
    def n_features(self) -> int:
        """M_w."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the rows and products."""

    @property
    def chunk(self) -> int:
        """Rows computed at once within the memory budget."""
        return rows_within(self.memory, 6 * self.n_features * self.dtype.itemsize)

    @property
    def prefers_products(self) -> bool:
        """Whether a product with `operator` is cheaper than one with stored rows."""
        return False

    @abstractmethod
    def rows(self, functional: functionals.AbstractFunctional) -> Features:
        """Return Φ (N, M_w) and Var r (N,), differentiable in the kernel's parameters."""

    @abstractmethod
    def operator(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        """Return Φ (N, M_w) as an operator that never holds a row; carries no graph."""

    @abstractmethod
    def products(self, functional: functionals.AbstractFunctional, eps: Tensor) -> Tensor:
        """Φ ε for eps (k, M_w): (k, N), differentiable in the parameters and in eps."""

    @abstractmethod
    def residual_variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        """Return Var r (N,) ≥ 0 alone, differentiable in the kernel's parameters."""

    def prior_covariance(self, functional: functionals.AbstractFunctional) -> Tensor | None:
        """Return K_** (N, N) of the field, float64; None where the map has no closed form of it."""
        return None


@dataclass(frozen=True, eq=False)
class AbstractPriorFeatures(AbstractFeatureMap):
    """A map from the white variables of a prior at nodes."""

    parts = ("prior",)

    prior: AbstractLatticePrior

    @property
    def n_features(self) -> int:
        return self.prior.n_white

    @property
    def dtype(self) -> torch.dtype:
        return self.prior.dtype


@dataclass(frozen=True, eq=False)
class AbstractGridFeatures(AbstractPriorFeatures):
    """A map from the prior on a grid, with M_w the points of its torus.

    prior: K_uu, R and the preconditioner of the grid; estimator: K_fu and k_ff.
    """

    prior: GridPrior
    estimator: AbstractEstimator = field(default_factory=ClosedForm)

    def _covariance(self, functional: functionals.AbstractFunctional, grid: RegularGrid) -> Tensor:
        """Return Cov(f_n, u_m) (N, M) with the nodes of a grid."""
        prior = self.prior
        return self.estimator.cross(prior.kernel, functional, grid, prior.wrapping, self.dtype)

    def _variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        """Return k_ff (N,)."""
        prior = self.prior
        return self.estimator.variance(prior.kernel, functional, prior.wrapping, self.dtype)

    def prior_covariance(self, functional: functionals.AbstractFunctional) -> Tensor | None:
        f, prior = functional, self.prior
        return self.estimator.between(prior.kernel, f, f, prior.wrapping, torch.float64)

    @property
    def _like(self) -> Tensor:
        """An empty tensor of the dtype and on the device of the rows."""
        return self.prior.lags.new_empty(0, dtype=self.dtype)


class AbstractRowFeatures(AbstractFeatureMap):
    """A map whose products and residual variances are those of rows, a chunk at a time."""

    def products(self, functional: functionals.AbstractFunctional, eps: Tensor) -> Tensor:
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        return residual_variance_by_rows(self, functional)


def products_by_rows(
    features: AbstractFeatureMap, functional: functionals.AbstractFunctional, eps: Tensor
) -> Tensor:
    """Return Φ ε (k, N) through stored rows, a chunk at a time."""
    parts = chunks(len(functional), features.chunk)
    return torch.cat([eps @ features.rows(functional[part]).phi.mT for part in parts], dim=-1)


def residual_variance_by_rows(
    features: AbstractFeatureMap, functional: functionals.AbstractFunctional
) -> Tensor:
    """Return Var r (N,) of stored rows, a chunk at a time."""

    def of(f: functionals.AbstractFunctional) -> Tensor:
        parts = chunks(len(f), features.chunk)
        return torch.cat([features.rows(f[part]).residual_variance for part in parts])

    return functionals.by_rows(functional, of)


def refuse_outside(
    functional: functionals.AbstractFunctional, grid: RegularGrid, wrapping: Wrapping | None
) -> None:
    """An error for data beyond half of the padding: the torus would take them for nearer ones."""
    if wrapping is None or len(functional) == 0:
        return
    if functional.dim != grid.dim:
        raise UserError(
            f"the data have {functional.dim} input dimensions and the grid has {grid.dim}; build "
            "both with the same dimension"
        )
    points = support(functional)
    for axis, period in enumerate(wrapping.periods):
        low, high = grid.lower[axis], grid.upper[axis]
        slack = 0.5 * (period - (high - low))
        beyond = torch.maximum(low - points[:, axis], points[:, axis] - high)
        outside = beyond > slack
        if bool(outside.any()):
            raise UserError(
                f"{int(outside.sum())} of {len(points)} points of the data lie outside the grid "
                f"[{low:g}, {high:g}] on axis {axis}, by up to {float(beyond.max()):g}: enlarge "
                "the grid, clip or drop these data, or evaluate them with the plain kernel"
            )


def support(functional: functionals.AbstractFunctional) -> Tensor:
    """Return the points (K, D) whose hull holds all that the functionals see."""
    if isinstance(functional, functionals.Stacked):
        return torch.cat([support(part) for part in functional.parts])
    if isinstance(functional, functionals.LineIntegrals):
        return functional.at(functional.edges[:, [0, -1]]).flatten(0, 1)
    if isinstance(functional, functionals.PointValues | functionals.Derivatives):
        return functional.x
    return functional.measure(functionals.GaussLegendre(2)).points.flatten(0, 1)


def rows_within(budget: int, bytes_per_row: int) -> int:
    """Count the rows that fit in `budget` bytes; an error when not even one does."""
    if bytes_per_row > budget:
        raise MemoryError(
            f"one row of features needs {bytes_per_row:,} bytes, the memory budget is "
            f"{budget:,} bytes: raise the budget or use a smaller grid or less padding"
        )
    return budget // bytes_per_row


def rows_together(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Count the rows of `width` numbers of a group: any number on an accelerator."""
    if device.type != "cpu":
        return 2**62
    return max(1, GROUP_BYTES // (width * dtype.itemsize))


def gathered(evaluate: Callable[[slice], Features], count: int, size: int) -> Features:
    """Return rows 0, .., count − 1, evaluated in groups of `size`.

    Without a graph every group is written to its place as it comes, so that no row is held twice.
    """
    groups = (evaluate(part) for part in chunks(count, size))
    first = next(groups, None)
    if first is None:
        raise UserError("the functional is empty: rows need at least one datum")
    if len(first.phi) == count:
        return first
    has_graph = first.phi.requires_grad
    phi = first.phi.new_empty(0 if has_graph else count, first.phi.shape[1])
    rows, variances = list[Tensor](), list[Tensor]()
    solves, start, clamped = SolveSummary(), 0, 0
    for group in itertools.chain([first], groups):
        stop = start + len(group.phi)
        if has_graph:
            rows.append(group.phi)
        else:
            phi[start:stop] = group.phi
        variances.append(group.residual_variance)
        solves, start, clamped = solves.merged(group.solves), stop, clamped + group.clamped
    phi = torch.cat(rows) if has_graph else phi
    return Features(phi, torch.cat(variances), solves, clamped)
