"""Feature maps of inducing points, however K_uu is whitened; hierarchical ones (Wu et al. 2021).

Free points start at the centres of clusters of the data. Their dense covariances are
differentiable in kernel and points by products alone: in blocks of rows, whose temporaries stay in
the cache; distances are evaluated again in the backward pass, so that nothing but the result is
held.
"""

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp._parameters import Parameter
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.features._base import (
    AbstractGridFeatures,
    AbstractRowFeatures,
    Features,
    SolveSummary,
    gathered,
    refuse_outside,
    rows_together,
    rows_within,
)
from dustmap.gp.features._operators import InverseOperator, ProductOperator, cross_operator
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.gp.kernels import AbstractKernel, AbstractProfile, KernelTerm
from dustmap.linalg import AbstractOperator, chunks, numbers_together, toeplitz_solve

#: Rows the clusters are sought among, per centre, and at least and at most in all.
_ROWS_PER_CENTRE, _FEWEST_SOUGHT, _MOST_SOUGHT = 20, 5_000, 100_000
#: Bytes of the distances held at a time.
_BYTES = 2**26
#: Scaled distances up to which two points are one: k'/r of a Matérn-½ is infinite there.
_SAME_POINT = 1e-12
#: Numbers per temporary, and the fewest rows of a block.
_BLOCK, _FEWEST_ROWS = 2**14, 16

Solver = Callable[[Tensor], tuple[Tensor, SolveSummary]]


def clustered_points(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` centres (count, D) of the rows of x (N, D) by K-means, float64; fewer where
    fewer rows differ.

    Among a random part of the rows, of bounded size: starts drawn with probability ∝ squared
    distance to those before (Arthur & Vassilvitskii 2007), then ten steps of Lloyd's iteration.
    Centres differ from each other; x is to have axes of comparable units. generator: on the CPU,
    so that a seed means the same on every device.
    """
    if not 1 <= count <= len(x):
        raise UserError(
            f"{count:,} inducing points asked of {len(x):,} rows: take at least 1 and no more than "
            "there are rows"
        )
    size = min(max(_ROWS_PER_CENTRE * count, _FEWEST_SOUGHT), max(_MOST_SOUGHT, count), len(x))
    picked = torch.randperm(len(x), generator=generator)[:size]
    rows = x[picked.to(x.device)].double()
    centres = _spread_starts(rows, count, generator)
    for _ in range(10):
        centres = _moved(rows, centres)
    return centres


def _spread_starts(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` different rows, or all there are, by squared distance to the nearest one before."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    chosen = [int(uniform[0] * len(rows))]
    nearest = (rows - rows[chosen[0]]).square().sum(-1)
    for share in uniform[1:]:
        mass = nearest.cumsum(0)
        if not float(mass[-1]) > 0.0:
            break
        # Right of all rows that have the sum, so that one of no mass is never drawn.
        drawn = torch.searchsorted(mass, share * mass[-1], right=True)
        chosen.append(min(int(drawn), int(nearest.nonzero()[-1])))
        nearest = torch.minimum(nearest, (rows - rows[chosen[-1]]).square().sum(-1))
    return rows[torch.tensor(chosen, device=rows.device)].clone()


def _moved(rows: Tensor, centres: Tensor) -> Tensor:
    """Every centre at the mean of the rows nearest to it; one without rows stays."""
    norms = centres.square().sum(-1)
    chunk = max(1, _BYTES // (8 * len(centres)))
    nearest = torch.cat(
        [(norms - 2.0 * part @ centres.mT).argmin(-1) for part in torch.split(rows, chunk)]
    )
    counts = torch.zeros_like(norms).index_add_(0, nearest, torch.ones_like(rows[:, 0]))
    sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
    return torch.where(counts[:, None] > 0, sums / counts[:, None].clamp_min(1.0), centres)


def point_covariances(terms: Sequence[KernelTerm], x: Tensor, z: Tensor) -> Tensor:
    """Return K_fu = k(x_n − z_m) (N, M), float64, for points x (N, D) and z (M, D).

    Differentiable once in the terms of the kernel and in both sets of points, in any dimension:
    the backward pass costs two matrix products, not D passes over N × M numbers.
    """
    parts: list[Tensor] = [
        _Cross.apply(  # type: ignore[no-untyped-call]
            x.double() / t.lengthscale, z.double() / t.lengthscale, t.variance, t.profile
        )
        for t in terms
    ]
    return functools.reduce(operator.add, parts)


def point_gram(kernel: AbstractKernel, z: Tensor, nugget: float) -> Tensor:
    """Return K_uu + ν I (M, M), float64, for points z (M, D) and ν = nugget · k(0).

    Half of the symmetric matrix is evaluated. Differentiable once in kernel and points.
    """
    parts: list[Tensor] = [
        _Gram.apply(  # type: ignore[no-untyped-call]
            z.double() / t.lengthscale, t.variance, t.profile, nugget
        )
        for t in kernel.terms()
    ]
    return functools.reduce(operator.add, parts)


class _Cross(torch.autograd.Function):
    """σ² k(‖x_n − z_m‖) (N, M).

    With G = σ² K̄ ∘ k'(r)/r the gradients are x̄_n = Σ_m G_nm (x_n − z_m) and
    z̄_m = Σ_n G_nm (z_m − x_n).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, variance: Tensor, profile: AbstractProfile
    ) -> Tensor:
        result = torch.empty(len(x), len(z), dtype=x.dtype, device=x.device)
        for rows in _blocks(x, z):
            torch.mul(profile.value(_distances(x[rows], z)), variance, out=result[rows])
        ctx.profile = profile
        ctx.save_for_backward(x, z, variance, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, variance, result = ctx.saved_tensors
        of_x, of_z, mass = torch.zeros_like(x), torch.zeros_like(z), torch.zeros_like(z[:, :1])
        for rows in _blocks(x, z):
            G = _weights(ctx.profile, _distances(x[rows], z), grad[rows])
            of_x[rows] = G.sum(1, keepdim=True) * x[rows] - G @ z
            of_z -= G.mT @ x[rows]
            mass += G.sum(0).unsqueeze(-1)
        of_z += mass * z
        return variance * of_x, variance * of_z, _inner(grad, result) / variance, None


class _Gram(torch.autograd.Function):
    """σ² (k(‖z_m − z_l‖) + ν δ_ml) (M, M), the lower half mirrored.

    z̄_m = Σ_l G_ml (z_m − z_l) with G = σ² (K̄ + K̄ᵀ) ∘ k'(r)/r.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, variance: Tensor, profile: AbstractProfile, nugget: float
    ) -> Tensor:
        result = torch.empty(len(z), len(z), dtype=z.dtype, device=z.device)
        for rows in _blocks(z, z):
            before = slice(0, rows.start)
            value = profile.value(_distances(z[rows], z[: rows.stop])).mul_(variance)
            result[rows, : rows.stop] = value
            result[before, rows] = value[:, before].mT
        result.diagonal().copy_(((1.0 + nugget) * variance).expand(len(z)))
        ctx.profile = profile
        ctx.save_for_backward(z, variance, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, variance, result = ctx.saved_tensors
        of_z = torch.zeros_like(z)
        for rows in _blocks(z, z):
            before, so_far = slice(0, rows.start), slice(0, rows.stop)
            both = grad[rows, so_far] + grad[so_far, rows].mT
            G = _weights(ctx.profile, _distances(z[rows], z[so_far]), both)
            of_z[rows] += G.sum(1, keepdim=True) * z[rows] - G @ z[so_far]
            left = G[:, before]
            of_z[before] += left.sum(0).unsqueeze(-1) * z[before] - left.mT @ z[rows]
        return variance * of_z, _inner(grad, result) / variance, None, None


def _distances(x: Tensor, z: Tensor) -> Tensor:
    """‖x_n − z_m‖, by differences: the expanded square would lose those of far-away points.

    Finite, and so are its powers, where k has long been zero.
    """
    r = torch.cdist(x, z, compute_mode="donot_use_mm_for_euclid_dist")
    return r.clamp_max_(torch.finfo(r.dtype).max ** 0.25)


def _weights(profile: AbstractProfile, r: Tensor, grad: Tensor) -> Tensor:
    """Return Ḡ k'(r)/r, 0 where two points are one."""
    return profile.slope(r).mul_(grad).masked_fill_(r <= _SAME_POINT, 0.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a ∘ b."""
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _blocks(x: Tensor, z: Tensor) -> Iterator[slice]:
    """Yield blocks of rows of a matrix x × z whose temporaries stay in the cache."""
    numbers = numbers_together(_BLOCK, x.device)
    return chunks(len(x), max(_FEWEST_ROWS, numbers // max(1, len(z))))


@dataclass(frozen=True, eq=False)
class AbstractInducingFeatures(AbstractRowFeatures):
    """φ_n = L⁻¹ k_{u,n} of some root L Lᵀ = K_uu + ν I, M_w = M.

    inducing: a grid, or free points (M, D), the parameter "inducing", learned if `learn_points`.
        Rows of point values are differentiable in them; rows of other functionals are not, and
        are refused where the points carry a graph.
    nugget: ν relative to the kernel's variance. No further jitter is ever added.
    """

    kernel: AbstractKernel
    inducing: RegularGrid | Tensor
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None
    nugget: float = 0.0
    rows_dtype: torch.dtype = torch.float64
    memory: int = 2**28
    learn_points: bool = False

    def __post_init__(self) -> None:
        if not self.nugget >= 0:
            raise UserError(
                f"nugget is a fraction of the variance, got {self.nugget}: give 0 or more"
            )
        points = self.inducing
        if isinstance(points, Tensor):
            if points.ndim != 2 or points.shape[1] != self.kernel.dim:
                raise UserError(
                    f"inducing must be (M, {self.kernel.dim}) like the kernel, "
                    f"got {tuple(points.shape)}"
                )
            if not bool(torch.isfinite(points).all()):
                raise UserError(
                    "inducing must be finite; drop rows with NaN or infinite coordinates"
                )

    @property
    def n_features(self) -> int:
        inducing = self.inducing
        return inducing.size if isinstance(inducing, RegularGrid) else len(inducing)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_dtype

    @property
    def points(self) -> Tensor:
        """Inducing points (M, D), float64; those of a grid are where the kernel is."""
        if not isinstance(self.inducing, RegularGrid):
            return self.inducing
        return self.inducing.points(device=self.kernel.device)

    def parameters(self) -> tuple[Parameter, ...]:
        kernel = self.kernel.parameters()
        if isinstance(self.inducing, RegularGrid):
            return kernel
        return *kernel, Parameter("inducing", self.inducing, False, self.learn_points)

    def with_parameters(self, parameters: Sequence[Parameter]) -> Self:
        """Return the map of other parameters of the kernel and other free points, factorised."""
        count = len(self.kernel.parameters())
        kernel = self.kernel.with_parameters(parameters[:count])
        if isinstance(self.inducing, RegularGrid):
            return replace(self, kernel=kernel)
        (points,) = parameters[count:]
        return replace(self, kernel=kernel, inducing=points.value, learn_points=points.is_learned)

    def rows(self, functional: AbstractFunctional) -> Features:
        return gathered(lambda part: self._rows(functional[part]), len(functional), self.chunk)

    def prior_covariance(self, functional: AbstractFunctional) -> Tensor | None:
        f = functional
        return self.estimator.between(self.kernel, f, f, self.wrapping, torch.float64)

    @abstractmethod
    def _rows(self, functional: AbstractFunctional) -> Features:
        """Return the rows of a chunk."""

    def _point_cross(self, functional: AbstractFunctional) -> Tensor | None:
        """Return K_fu (N, M), float64, where it is differentiable in data and free points."""
        z = self.inducing
        if isinstance(z, Tensor) and self.wrapping is None and isinstance(functional, PointValues):
            return point_covariances(self.kernel.terms(), functional.x, z)
        if isinstance(z, Tensor) and z.requires_grad and torch.is_grad_enabled():
            raise UserError(
                f"inducing points are learned, but rows of {type(functional).__name__} "
                f"are not differentiable in them: use PointValues without wrapping, or "
                f"learn_points=False"
            )
        return None

    def _estimated_cross(self, functional: AbstractFunctional) -> Tensor:
        """Return K_fu (N, M) as the estimator has it."""
        return self.estimator.cross(
            self.kernel, functional, self.inducing, self.wrapping, self.dtype
        )

    def _dense_gram(self) -> Tensor:
        """Return K_uu + ν I (M, M), float64."""
        if isinstance(self.inducing, Tensor) and self.wrapping is None:
            return point_gram(self.kernel, self.inducing, self.nugget)
        points = self.points
        K_uu = self.estimator.cross(
            self.kernel, PointValues(points), self.inducing, self.wrapping, torch.float64
        )
        return K_uu + self.nugget * self.kernel.variance() * torch.eye(len(points)).to(K_uu)


@final
@dataclass(frozen=True, eq=False)
class HIPFeatures(AbstractGridFeatures, AbstractRowFeatures):
    """φ_n = Rᵀ K_uu⁻¹ k_{u,n}: Toeplitz PCG, then the non-square circulant root (002, eq. 20).

    Rows of a truncated PCG are still valid features: the residual variance holds for any weights,

        Var r = k_ff − 2 wᵀ k_u + ‖Rᵀ w‖² ≥ 0.

    rtol, max_steps: residual and number of steps at which PCG stops; memory: bytes a chunk of rows
    may use, and K_fu where `operator` stores it; dense_below: up to this many points K_uu is
    factorised once instead, in float64, for the same weights without iterations, faster than one
    PCG per datum; 0 always takes PCG. plain: whether K_uu of weights and of Var r has no images,
    as k_u has none without a wrapping; what those of the torus add is then part of the field at the
    nodes.
    """

    rtol: float = 1e-5
    max_steps: int = 200
    memory: int = 2**28
    dense_below: int = 4096
    plain: bool = False

    @property
    def prefers_products(self) -> bool:
        # N M + M² against N M_w numbers read, M_w many times M; one PCG would cost more.
        return self.is_dense

    @property
    def chunk(self) -> int:
        width = 8 * self.prior.grid.size + 3 * self.prior.n_white
        return rows_within(self.memory, width * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> Features:
        refuse_outside(functional, self.prior.grid, self.prior.wrapping)
        size = self.chunk
        if not self.is_dense:
            size = min(size, rows_together(self.n_features, self.dtype, functional.device))
        prior, root = self._prior_of_weights(), self.prior.root()
        solve, gram = self._solver(prior), prior.covariance() if self.plain else None
        k_ff = self._variance(functional)

        def rows(part: slice) -> Features:
            K_fu = self._cross(functional[part])
            weights, solves = solve(K_fu)
            phi = root.rmatmul(weights)
            # K_uu = R Rᵀ but where it is plain.
            square = phi * phi if gram is None else weights * gram.matmul(weights)
            explained = 2.0 * (weights * K_fu).sum(-1) - square.sum(-1)
            return Features.of(phi, k_ff[part], explained, solves)

        return gathered(rows, len(functional), size)

    @property
    def is_dense(self) -> bool:
        """Whether K_uu is factorised rather than solved by PCG."""
        return self.prior.grid.size <= self.dense_below

    def weights(self, functional: AbstractFunctional) -> tuple[Tensor, SolveSummary]:
        """Return W = K_fu K_uu⁻¹ (N, M), one batched solve, with how it ended."""
        return self._solver(self._prior_of_weights())(self._cross(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            if self.is_dense:
                weights = self._matrix(functional, lambda f: self.weights(f)[0])
                return ProductOperator(weights, self.prior.root())
            # K_uu⁻¹ u is large where u = R v is rough: float32 would lose it.
            double = replace(self.prior, dtype=torch.float64)
            K = replace(self._prior_of_weights(), dtype=torch.float64).covariance()
            inverse = InverseOperator(K, double.preconditioner(), self.rtol, self.max_steps)
            return ProductOperator(
                self._matrix(functional, self._cross),
                ProductOperator(inverse, double.root()),
            )

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self._covariance(functional, self.prior.grid)

    def _matrix(
        self, functional: AbstractFunctional, evaluate: Callable[[AbstractFunctional], Tensor]
    ) -> AbstractOperator:
        return cross_operator(functional, evaluate, self.prior.grid.size, self._like, self.memory)

    def _prior_of_weights(self) -> GridPrior:
        """Return the prior whose K_uu weights are solved with."""
        if not self.plain:
            return self.prior
        own = self.prior
        return GridPrior.minimal(
            own.kernel, own.grid, nugget=own.nugget, dtype=own.dtype, memory=own.memory
        )

    def _solver(self, prior: GridPrior) -> Solver:
        """Return K_fu ↦ W and how the solve ended; what all data share is set up once."""
        if self.is_dense:
            factor = prior.factor()

            def solve_dense(K_fu: Tensor) -> tuple[Tensor, SolveSummary]:
                solved = torch.cholesky_solve(K_fu.mT.double(), factor).mT
                return solved.to(K_fu.dtype), SolveSummary(columns=len(K_fu))

            return solve_dense
        lags = prior.lags.to(self.dtype)
        K, P = prior.covariance(), self.prior.preconditioner()

        def solve(K_fu: Tensor) -> tuple[Tensor, SolveSummary]:
            weights, result = toeplitz_solve(
                lags, K_fu, operator=K, preconditioner=P, rtol=self.rtol, max_steps=self.max_steps
            )
            return weights, SolveSummary.of(result)

        return solve
