"""The grid of inducing points of a fit: the one that fits the memory, its sizes, and places seen
through it, beyond it and in great numbers within."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from dustmap import gp
from dustmap.engines import _grids
from dustmap.engines._engine import Problem
from dustmap.engines._learning import EvidenceSettings
from dustmap.errors import UserError
from dustmap.gp import features
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features import AbstractFeatureMap, Features, HIPFeatures
from dustmap.gp.functionals import AbstractFunctional, PointValues, Sharded
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import GriddedDraws, VariationalPosterior
from dustmap.linalg import AbstractOperator, DenseOperator

FAMILIES = ("auto", "full", "block", "low-rank", "mean-field")
WHITENINGS = ("auto", "torus", "hip", "cholesky", "ciq")
#: Up to so many whitened variables "auto" takes the full covariance.
MAX_FULL = 3000
_MOST_PER_DATUM = 4
# Nodes along a tile of the block family, some 256 in all: with 64, deviations were twice as much
# too wide, at the same time per fit.
_TILE_SIDES = {1: 256, 2: 16, 3: 6, 4: 4}
#: Draws of the field, from which the variance that distances add is computed.
DRAWS = 8


@final
@dataclass(frozen=True)
class InducingSettings:
    """Settings of the inducing engine; "auto" is decided by `plan_fit`.

    Attributes
    ----------
    learning : of hyperparameters
    family, rank : structure of the posterior, and most directions of the low-rank family
    block : nodes of a tile per axis; None for tiles of some 256 nodes
    whitening : one of `WHITENINGS`
    padding : length scales around the grid
    grid : of inducing points, or points per axis; None for an automatic one
    most_work : operations N M² of the full family on an automatic grid, at most
    points_per_length : of inducing points on the problem's box instead
    estimator, pcg_steps, nugget : of the features; nugget None for that of the dtype
    epochs, batch : of natural-gradient steps on minibatches; 0 for the closed form
    """

    learning: EvidenceSettings
    family: str = "auto"
    block: tuple[int, ...] | None = None
    rank: int = 50
    whitening: str = "auto"
    padding: float = 4.0
    dtype: torch.dtype = torch.float64
    max_memory: int = 2**32
    grid: gp.RegularGrid | tuple[int, ...] | None = None
    most_work: float = math.inf
    points_per_length: float | None = None
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    pcg_steps: int = 3000
    nugget: float | None = None
    epochs: int = 0
    batch: int = 256
    seed: int = 0


@final
@dataclass(frozen=True)
class InducingPlan(_grids.AbstractGridPlan):
    """Grid, feature map and family of n data.

    Attributes
    ----------
    grid : of inducing points
    torus_shape : of the whitened variables: the padded torus, or the grid for "cholesky" and "ciq"
    whitening, family, block
    rank : of the low-rank family, 0 for others
    n : data whose rows one process computes
    dtype, max_memory
    """

    grid: gp.RegularGrid
    torus_shape: tuple[int, ...]
    whitening: str
    family: str
    block: tuple[int, ...] | None
    n: int
    dtype: torch.dtype
    max_memory: int
    rank: int = 0

    @property
    def rtol(self) -> float:
        """Relative residual of the solves behind the rows, as small as the dtype allows."""
        return 1e-6 if self.dtype == torch.float64 else 1e-5

    @property
    def bytes_prior(self) -> int:
        """Bytes of the spectra and lags of the torus, or of K_uu and its factor."""
        M_w = self.n_features
        return 24 * M_w**2 if self.whitening == "cholesky" else 64 * M_w

    @property
    def bytes_family(self) -> int:
        """Bytes of statistics, precision, its factor and its root in float64."""
        M_w = self.n_features
        width = {
            "full": M_w,
            "block": math.prod(map(min, self.block or (), self.torus_shape)),
            "low-rank": 1 + min(M_w, 2 * self.rank + 10),
            "mean-field": 1,
        }[self.family]
        return 32 * M_w * width

    @property
    def bytes_rows(self) -> int:
        """Bytes of the rows of all data, stored only where half of the memory holds them."""
        return self.n * self.n_features * self.dtype.itemsize

    @property
    def bytes_needed(self) -> int:
        return self.bytes_prior + self.bytes_family

    @property
    def refusal(self) -> str:
        return (
            f"grid {_grids.times(self.grid.shape)} needs {self.bytes_needed:,} bytes: "
            f"{self.bytes_prior:,} for whitening={self.whitening!r} with "
            f"{_grids.times(self.torus_shape)} variables and {self.bytes_family:,} for "
            f"family={self.family!r}; max_memory = {self.max_memory:,}. Take a coarser grid, "
            f'less padding, family="block" or "mean-field", or raise max_memory'
        )


def plan_fit(
    kernel: AbstractKernel, grid: gp.RegularGrid, n: int, settings: InducingSettings
) -> InducingPlan:
    """Decide what is still "auto" for a fit of n data on this grid.

    A grid of few nodes is whitened by the Cholesky factor of K_uu: M_w is then the number of nodes,
    where the padded torus of a kernel longer than the box has many more, and the full family has
    standard deviations that no block of a larger one reaches. Larger grids on a map's box take HIP
    rows, whose covariances are those of the box alone.

    Examples
    --------
    >>> from dustmap.gp import RegularGrid
    >>> from dustmap.gp.kernels import Matern32
    >>> settings = InducingSettings(EvidenceSettings(rows=100))
    >>> plan = plan_fit(Matern32([1.0]), RegularGrid((0.0,), (0.25,), (101,)), 1000, settings)
    >>> plan.whitening, plan.family
    ('cholesky', 'full')
    """
    whitening, family = settings.whitening, settings.family
    if whitening == "auto":
        dense = family == "full" or (family == "auto" and grid.size <= max_full(settings))
        on_torus = "torus" if settings.points_per_length is None else "hip"
        whitening = "cholesky" if dense else on_torus
    on_nodes = whitening in ("cholesky", "ciq")
    torus = grid.shape if on_nodes else gp.torus_for(kernel, grid, settings.padding)
    if family == "auto":
        # Blocks of neighbours mean nothing among Cholesky's variables.
        dense = whitening == "cholesky" or math.prod(torus) <= max_full(settings)
        family = "full" if dense else "block"
    block = settings.block or tuple(min(_TILE_SIDES[grid.dim], length) for length in torus)
    if len(block) != grid.dim:
        raise UserError(
            f"block = {block} gives the nodes of {len(block)} axes but X has {grid.dim} columns: "
            f"give one number per column"
        )
    plan = InducingPlan(
        grid=grid,
        torus_shape=tuple(torus),
        whitening=whitening,
        family=family,
        block=block if family == "block" else None,
        n=n,
        dtype=settings.dtype,
        max_memory=settings.max_memory,
        rank=min(settings.rank, math.prod(torus)) if family == "low-rank" else 0,
    )
    is_free = settings.whitening == settings.family == "auto"
    if is_free and not plan.fits:
        # The torus of a kernel far longer than an axis has hundreds of times its nodes.
        full = plan_fit(kernel, grid, n, replace(settings, family="full"))
        plan = full if full.fits else plan
    return plan


def candidates(n: int, settings: InducingSettings) -> list[tuple[InducingSettings, int]]:
    """Settings an automatic grid may use, with the largest M_w of each; the better ones first.

    Their plans must fit the memory besides. The full family has the right standard deviations, but
    few variables. The structured ones have rows of all n data within half of the memory, and no
    more than a few variables a datum.
    """
    rows = settings.max_memory // (2 * n * settings.dtype.itemsize)
    most = max(min(rows, _MOST_PER_DATUM * n), max_full(settings))

    def whitened(family: str, otherwise: str) -> InducingSettings:
        whitening = otherwise if settings.whitening == "auto" else settings.whitening
        return replace(settings, family=family, whitening=whitening)

    full = whitened("full", "cholesky")
    structured = whitened("block" if settings.family == "auto" else settings.family, "torus")
    if settings.family == "full":
        within = min(settings.max_memory // 64, settings.most_work / n)
        return [(full, int(math.sqrt(within)))]
    if settings.family != "auto":
        return [(structured, most)]
    if settings.whitening == "cholesky":
        return [(full, max_full(settings))]
    return [(full, max_full(settings)), (structured, most)]


def rows_of_a_rank(problem: Problem) -> int:
    """Count the rows that a rank computes at most: all of them unless ranks share the data."""
    shared = problem.data.functional
    return max(shared.counts) if isinstance(shared, Sharded) else len(shared)


def max_full(settings: InducingSettings) -> int:
    """The most variables of a full covariance that "auto" takes, within the memory."""
    return min(MAX_FULL, math.isqrt(settings.max_memory // 64))


def planned(
    problem: Problem, settings: InducingSettings
) -> tuple[InducingPlan, _grids.GridChoice | None]:
    """The plan of a fit, and the choice of its grid where that is automatic.

    On the box at so many points per length scale, on the grid of the settings, else on the
    automatic one of the better family that fits the memory.
    """
    plan = functools.partial(plan_fit, problem.model.kernel, n=rows_of_a_rank(problem))
    if settings.points_per_length is not None:
        spacing = _grids.first_length(problem.model.kernel) / settings.points_per_length
        return plan(_grids.coarsened(problem.nodes, spacing), settings=settings), None
    if settings.grid is not None:
        return plan(_grids.given_grid(problem, settings.grid), settings=settings), None
    choices = []
    for candidate, most in candidates(len(problem.data), settings):
        choice = _grids.chosen_grid(problem, functools.partial(plan, settings=candidate), most)
        choices.append((choice, candidate))
        if choice.fits and choice.fine_enough:
            break
    choice, candidate = min(choices, key=lambda c: (not c[0].fits, c[0].posterior_share))
    return plan(choice.grid, settings=candidate), choice


@final
@dataclass(frozen=True, eq=False)
class ExtrapolatingFeatures(AbstractFeatureMap):
    """`inner` for points inside the grid, `outer` for those beyond it; both see the same ε.

    outer: HIP rows of the plain kernel, since the images of the wrapped one would repeat the
    opposite face: the kriging of a place from the field at the nodes, and what that leaves. Far
    from the grid they vanish, and the prior comes back.
    """

    inner: AbstractFeatureMap
    outer: HIPFeatures
    grid: gp.RegularGrid

    @staticmethod
    def around(
        inner: AbstractFeatureMap, prior: gp.GridPrior, rtol: float, max_steps: int
    ) -> "ExtrapolatingFeatures":
        """`inner` of a prior on a torus, with outer rows to a relative residual of `rtol`."""
        outer = HIPFeatures(_outer(prior), rtol=rtol, max_steps=max_steps, plain=True)
        return ExtrapolatingFeatures(inner, outer, prior.grid)

    @property
    def n_features(self) -> int:
        return self.inner.n_features

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def chunk(self) -> int:
        return min(self.inner.chunk, self.outer.chunk)

    @property
    def prefers_products(self) -> bool:
        return self.inner.prefers_products

    def rows(self, functional: AbstractFunctional) -> Features:
        inside = self._inside(functional)
        if bool(inside.all()):
            return self.inner.rows(functional)
        if not bool(inside.any()):
            return self.outer.rows(functional)
        parts = [self.inner.rows(functional[inside]), self.outer.rows(functional[~inside])]
        order = _order(inside)
        return Features(
            torch.cat([part.phi for part in parts])[order],
            torch.cat([part.residual_variance for part in parts])[order],
            parts[0].solves.merged(parts[1].solves),
        )

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        inside = self._inside(functional)
        if bool(inside.all()):
            return self.inner.operator(functional)
        with torch.no_grad():
            outside = DenseOperator(self.outer.rows(functional[~inside]).phi)
        if not bool(inside.any()):
            return outside
        return features.ArrangedOperator(
            [self.inner.operator(functional[inside]), outside], _order(inside)
        )

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.products(functional, eps)
        return features.products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.residual_variance(functional)
        return features.residual_variance_by_rows(self, functional)

    def prior_covariance(self, functional: AbstractFunctional) -> Tensor | None:
        if bool(self._inside(functional).all()):
            return self.inner.prior_covariance(functional)
        return self.outer.prior_covariance(functional)

    def parameters(self) -> tuple[gp.Parameter, ...]:
        return self.inner.parameters()

    def with_parameters(self, parameters: Sequence[gp.Parameter]) -> "ExtrapolatingFeatures":
        inner = self.inner.with_parameters(parameters)
        assert isinstance(inner, HIPFeatures | features.TorusFeatures | features.LocalFeatures)
        outer = replace(self.outer, prior=_outer(inner.prior))
        return ExtrapolatingFeatures(inner, outer, self.grid)

    def _inside(self, functional: AbstractFunctional) -> Tensor:
        assert isinstance(functional, PointValues)
        return self.grid.contains(functional.x)


def _outer(prior: gp.GridPrior) -> gp.GridPrior:
    """The prior on its torus, seen from beyond the grid: covariances are of the plain kernel."""
    return replace(prior, wrapping=None)


def _order(inside: Tensor) -> Tensor:
    """Return the place of row n in the concatenation of the rows inside and those outside."""
    return torch.cat([inside.nonzero(), (~inside).nonzero()]).squeeze(-1).argsort()


@final
@dataclass(frozen=True, eq=False)
class PlacesAndRays(gp.AbstractPosterior):
    """One q(ε), seen by rays through `rays` and by places, of which a map has a hundred times as
    many, through `places`."""

    places: VariationalPosterior
    rays: VariationalPosterior

    @staticmethod
    def of(posterior: VariationalPosterior) -> gp.AbstractPosterior:
        """Places by the weights of the 4³ nodes around them, where all weights would be a PCG.

        Both are features of the same ε, Φ = W C^{1/2}, and Var r is that of the weights W taken.
        At 2.5 nodes a length scale of a Matérn-1/2 kernel it is within 0.2 % of that of all
        weights, and a place costs a ninth.
        """
        phi = posterior.model.features
        if not isinstance(phi, HIPFeatures) or phi.is_dense:
            return posterior
        local = features.LocalFeatures(phi.prior, phi.estimator)
        places = replace(posterior, model=replace(posterior.model, features=local))
        return PlacesAndRays(places, posterior)

    def predict(self, functional: AbstractFunctional) -> gp.Prediction:
        return self._for(functional).predict(functional)

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        return self._for(functional).covariance(functional)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        return self._for(functional).sample(functional, count, generator)

    def _for(self, functional: AbstractFunctional) -> VariationalPosterior:
        return self.places if isinstance(functional, PointValues) else self.rays


@torch.no_grad()
def draws_at_inducing_points(
    posterior: VariationalPosterior, count: int, seed: int
) -> GriddedDraws:
    """`count` draws m + R ε at inducing points on a grid, which have no residual."""
    phi, generator = posterior.model.features, torch.Generator().manual_seed(seed)
    eps = posterior.state.sample(count, generator)
    if isinstance(phi, features.CIQFeatures):
        grid, root = phi.inducing, phi.root()
        assert isinstance(grid, gp.RegularGrid)
    else:
        assert isinstance(phi, HIPFeatures | features.TorusFeatures)
        grid, root = phi.prior.grid, phi.prior.root()
    mean = posterior.model.mean.values(PointValues(grid.points(device=eps.device)))
    return GriddedDraws(grid, mean.to(eps.dtype) + root.matmul(eps))


def draws_on_grid(posterior: VariationalPosterior, grid: gp.RegularGrid, seed: int) -> GriddedDraws:
    """Draws at the inducing points, whatever their whitening."""
    if isinstance(posterior.model.features, features.CholeskyFeatures):
        return GriddedDraws.of(posterior, grid, DRAWS, seed)
    return draws_at_inducing_points(posterior, DRAWS, seed)
