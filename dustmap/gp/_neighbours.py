"""Conditionals of point values on their nearest earlier neighbours: a precision, an evidence.

Reference: Vecchia (1988); Datta et al. (2016); Schäfer, Katzfuss & Owhadi (2021).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor
from torch.nn.functional import pad

from dustmap.errors import UserError
from dustmap.gp._batch import Batch
from dustmap.gp._model import GPModel, HyperparameterFit
from dustmap.gp._parameters import Parameters, gradient_at, maximise
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import AbstractSymmetric, SparseOperator, chunks

#: Points that look for neighbours together, as a share of those before them.
_SHARE = 0.1
#: Local systems solved at once, and those that are differentiated.
_SYSTEMS, _DIFFERENTIATED = 4096, 2048
#: Held-out rows whose covariances with the shared ones are at hand at once, and the nugget of
#: these over the kernel's variance: a thousand may nearly coincide.
_HELD_OUT, _NUGGET = 100, 1e-9
#: Change of a parameter in central differences.
_SHIFT = 1e-4


def nearest_before(x: Tensor, count: int) -> Tensor:
    """For every point `count` of the nearest of nearly all that come before it: (N, count) int64.

    Points go by shares: those of [n, 1.1 n) look among the first n, so that in a random order the
    neighbours of a point reach as far as its place in the order asks for. The first `count` points
    have all that come before them. −1 where there is none.

    x (N, D): in units in which distance means dependence.
    """
    first = min(count, len(x))
    numbers = torch.full((len(x), count), -1, dtype=torch.int64, device=x.device)
    before = torch.arange(first, device=x.device)
    earlier = before[None, :] < before[:, None]
    numbers[:first, :first] = torch.where(earlier, before[None, :], -1)
    low = first
    while 0 < low < len(x):
        high = min(len(x), low + max(1, round(_SHARE * low)))
        numbers[low:high] = nearest(x[:low], x[low:high], count)
        low = high
    return numbers


def nearest(points: Tensor, queries: Tensor, count: int) -> Tensor:
    """Indices (Q, count) of the points (P, D) nearest to queries (Q, D), −1 where there is none."""
    some = min(count, len(points))
    # Median splits take long to build, and sliding midpoints are as quick to ask.
    tree = KDTree(points.cpu().numpy(), balanced_tree=False, compact_nodes=False)
    ranks = np.arange(1, some + 1)
    _, index = tree.query(queries.cpu().numpy(), k=ranks, workers=torch.get_num_threads())
    return pad(torch.from_numpy(index).to(points.device), (0, count - some), value=-1)


@final
@dataclass(frozen=True, eq=False)
class NeighbourPrecision(AbstractSymmetric):
    """P = Uᵀ U ≈ (K + Σ)⁻¹ (N, N): every datum is regressed on near ones that come before it.

        y_n | y_c(n) ~ N(b_nᵀ y_c(n), d_n)      (U y)_n = (y_n − b_nᵀ y_c(n)) / √d_n

    with b_n = A⁻¹k, d_n = k₀ + σ_n² − b_nᵀk of the small system A = K + Σ of the neighbours c(n).
    P is the exact precision of the process that makes these conditionals, hence positive definite;
    with 30 neighbours in random order it preconditions conjugate gradients to a number of steps
    that hardly depends on N or on the noise.
    """

    U: SparseOperator

    @staticmethod
    @torch.no_grad()
    def of(
        kernel: AbstractKernel,
        x: Tensor,
        noise_variance: Tensor,
        *,
        neighbours: int = 30,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "NeighbourPrecision":
        """Return the precision of values at x (N, D), float64, with noise variances (N,) > 0.

        seed: of the random order. dtype: of the products; the local systems are float64.
        """
        if x.ndim != 2 or noise_variance.shape != x.shape[:1]:
            raise UserError(
                "expected x (N, D) and noise_variance (N,), got "
                f"{tuple(x.shape)} and {tuple(noise_variance.shape)}"
            )
        order, before = ordered_neighbours(kernel, x, neighbours, seed)
        places, noise = x[order].double(), noise_variance[order].double()
        entries = [
            _conditionals(kernel, places, noise, before, part) for part in chunks(len(x), _SYSTEMS)
        ]
        rows, cols, values = (torch.cat(part) for part in zip(*entries, strict=True))
        shape = (len(x), len(x))
        return NeighbourPrecision(
            SparseOperator.from_coo(rows, order[cols], values.to(dtype), shape)
        )

    def matmul(self, x: Tensor) -> Tensor:
        return self.U.rmatmul(self.U.matmul(x))


@torch.no_grad()
def ordered_neighbours(
    kernel: AbstractKernel, x: Tensor, neighbours: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A random order (N,) of x (N, D), and the neighbours (N, m) before each place in it."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    return order, nearest_before(x[order].double() / _scale(kernel), neighbours)


def _conditionals(
    kernel: AbstractKernel, x: Tensor, noise: Tensor, before: Tensor, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of U in the rows `part`: rows, columns, values."""
    own, index = torch.arange(len(x), device=x.device)[part], before[part]
    real, index = index >= 0, index.clamp_min(0)
    A, k = _local_system(kernel, x[index], x[part], noise[index], real)
    b = torch.cholesky_solve(k[..., None], torch.linalg.cholesky(A)).squeeze(-1)
    root = (kernel.variance() + noise[part] - (b * k).sum(-1)).rsqrt()
    rows = own[:, None].expand_as(index)[real]
    return (
        torch.cat([rows, own]),
        torch.cat([index[real], own]),
        torch.cat([(-b * root[:, None])[real], root]),
    )


def conditional(
    kernel: AbstractKernel, x: Tensor, noise: Tensor, r: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Variance and mean (R,) of the first of each line of values r (R, 1 + m) given the others.

    With b = A⁻¹k and c = A⁻¹r they are k(0) + σ² − 2bᵀk + bᵀAb and bᵀr + cᵀ(k − Ab), stationary in
    b and c, of which no graph is kept: once differentiable, and no factor is differentiated.
    """
    A, k = _local_system(kernel, x[:, 1:], x[:, 0], noise[:, 1:], real)
    others = r[:, 1:] * real
    with torch.no_grad():
        right = torch.stack([k, others], -1)
        b, c = torch.cholesky_solve(right, torch.linalg.cholesky(A)).unbind(-1)
    Ab = (A @ b[..., None]).squeeze(-1)
    variance = kernel.variance() + noise[:, 0] + (b * (Ab - 2.0 * k)).sum(-1)
    return variance, (b * others).sum(-1) + (c * (k - Ab)).sum(-1)


def _local_system(
    kernel: AbstractKernel, near: Tensor, x: Tensor, noise: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """A = K + Σ (R, m, m) of neighbours (R, m, D), and k (R, m) of them with x (R, D).

    Neighbours that are not `real` get a row of the identity, and so the weight 0.
    """
    A = between(kernel, near, near) * (real[:, :, None] & real[:, None])
    A = A + torch.diag_embed(torch.where(real, noise, 1.0))
    return A, between(kernel, near, x[:, None]).squeeze(-1) * real


def between(kernel: AbstractKernel, x: Tensor, z: Tensor) -> Tensor:
    """K (..., m, m') between x (..., m, D) and z (..., m', D), faster than by lags."""
    exact = "donot_use_mm_for_euclid_dist"
    terms = [
        t.variance
        * t.profile.value(torch.cdist(x / t.lengthscale, z / t.lengthscale, compute_mode=exact))
        for t in kernel.terms()
    ]
    return torch.stack(terms).sum(0)


@final
@dataclass(frozen=True, eq=False)
class NeighbourEvidence:
    """ln p(y) ≈ Σ_n ln N(y_n; m_n + b_nᵀ (y_c(n) − m_c(n)), d_n), b_n and d_n of the neighbours.

    The log-density of the process whose precision `NeighbourPrecision` is; a random part of the
    sum, scaled up, has the same expectation at a fraction of the cost. Its maximum is that of the
    evidence up to what 30 neighbours leave out, whatever N.

    data: point values; before (R, m): neighbours of `rows` (R,), −1 where there is none.
    """

    data: Batch
    rows: Tensor
    before: Tensor

    @staticmethod
    def of(
        kernel: AbstractKernel,
        data: Batch,
        *,
        neighbours: int = 30,
        max_rows: int | None = None,
        seed: int = 0,
    ) -> "NeighbourEvidence":
        """Neighbours in the metric of the kernel's present length scales; they then stay."""
        if not isinstance(data.functional, PointValues):
            raise TypeError(
                f"NeighbourEvidence is for point values, got {type(data.functional).__name__}: use "
                "learn_evidence, or ExactGP for few data"
            )
        order, before = ordered_neighbours(kernel, data.functional.x, neighbours, seed)
        n = len(data)
        chosen = torch.arange(n, device=order.device)
        if max_rows is not None and max_rows < n:
            generator = torch.Generator().manual_seed(seed + 1)
            chosen = torch.randperm(n, generator=generator)[:max_rows].to(order.device)
        near = before[chosen]
        return NeighbourEvidence(data, order[chosen], torch.where(near >= 0, order[near], -1))

    def log_evidence(self, model: GPModel) -> Tensor:
        """The sum (), differentiable in all parameters."""
        return torch.stack([self._part(model, part) for part in self._parts()]).sum()

    def gradient(self, parameters: Parameters[GPModel], theta: Tensor) -> tuple[float, Tensor]:
        """Value and gradient (P,) at θ (P,), in the memory of one part."""
        value, total = 0.0, torch.zeros_like(theta)
        for part in self._parts():

            def of_part(at: Tensor, part: slice = part) -> Tensor:
                return self._part(parameters.build(at), part)

            term, slope = gradient_at(theta, of_part)
            value, total = value + term, total + slope
        return value, total

    def _parts(self) -> list[slice]:
        return list(chunks(len(self.rows), _DIFFERENTIATED))

    @torch.no_grad()
    def information(self, parameters: Parameters[GPModel], theta: Tensor) -> Tensor:
        """Return Σ_n s_n s_nᵀ (P, P) of the scores s_n (P,) of the conditionals in the sum.

        Scores of conditionals are uncorrelated at the true θ, so this is their information; by
        central differences. It is that of the rows in the sum, not scaled up.

        Reference: Berndt, Hall, Hall & Hausman (1974).
        """
        total = torch.zeros(len(theta), len(theta), dtype=theta.dtype)
        for part in self._parts():
            scores = []
            for unit in _SHIFT * torch.eye(len(theta), dtype=theta.dtype):
                high, low = (
                    self._terms(parameters.build(theta + sign * unit), part) for sign in (1, -1)
                )
                scores.append((high - low).cpu() / (2.0 * _SHIFT))
            slopes = torch.stack(scores)
            total += slopes @ slopes.mT
        return total

    def fit(
        self, model: GPModel, *, max_steps: int = 40, tolerance: float = 1e-3
    ) -> HyperparameterFit:
        """Maximise it over kernel and noise by L-BFGS.

        The cost does not grow with the data, among all of which neighbours are sought: small scales
        and large ones are seen alike. The mean stays as it is, for the solve that follows.
        tolerance: of the largest |gradient| per datum, which of 10⁴ has an error of about 1e-2.
        """
        parameters = Parameters.of(model, without=("mean",))
        parameters.require_some("kernel or likelihood")
        climbed, n = partial(self.gradient, parameters), len(self.data)
        maximum = maximise(parameters, climbed, n_data=n, max_steps=max_steps, tolerance=tolerance)
        information = self.information(parameters, maximum.theta)
        return HyperparameterFit.of(parameters, maximum, n, information)

    def _part(self, model: GPModel, part: slice) -> Tensor:
        """The sum over some rows, scaled up to all data."""
        return len(self.data) / len(self.rows) * self._terms(model, part).sum()

    def _terms(self, model: GPModel, part: slice) -> Tensor:
        """ln N of the conditionals (R,) of some rows."""
        rows, before = self.rows[part], self.before[part]
        real = before >= 0
        everything = torch.cat([rows[:, None], before.clamp_min(0)], -1)
        seen = self.data[everything.flatten()]
        assert isinstance(seen.functional, PointValues)
        shape = everything.shape
        x = seen.functional.x.reshape(*shape, -1)
        noise = model.likelihood.noise_variance(seen).double().reshape(shape)
        r = (seen.y.double() - model.mean.values(seen.functional)).reshape(shape)
        d, expected = conditional(model.kernel, x, noise, r, real)
        z = (r[:, 0] - expected).square() / d
        return -0.5 * (z + d.log() + math.log(2.0 * math.pi))


@final
@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """ln p(y_n | y_c(n), y_S) of rows n held out, given near ones c(n) and S that all share.

    Of a smooth field in noise the many rows beyond thirty neighbours may say more than these.
    rows (R,), near (R, m), shared (S,): indices of data at points; rows are in neither of the
    others, and near is −1 where there is none that is not shared.
    """

    data: Batch
    rows: Tensor
    near: Tensor
    shared: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        kernel: AbstractKernel,
        data: Batch,
        count: int,
        *,
        shared: int = 1_000,
        neighbours: int = 30,
    ) -> "HeldOutRows":
        """The last `count` rows of data in random order, and of the others the first for all and
        neighbours in the metric of the kernel."""
        functional = data.functional
        assert isinstance(functional, PointValues)
        x = functional.x.double() / _scale(kernel)
        near, order = nearest(x[:-count], x[-count:], neighbours), torch.arange(len(x)).to(x.device)
        near = torch.where(near >= shared, near, -1)
        return HeldOutRows(data, order[-count:], near, order[:-count][:shared])

    @torch.no_grad()
    def scores(self, model: GPModel) -> Tensor:
        """The log densities (R,), each of a conditional of the process that S leaves."""
        functional = self.data.functional
        assert isinstance(functional, PointValues)
        x, kernel = functional.x.double(), model.kernel
        noise = model.likelihood.noise_variance(self.data).double()
        r = self.data.y.double() - model.mean.values(functional)
        x_S = x[self.shared]
        nugget = _NUGGET * float(kernel.variance().detach())
        L = torch.linalg.cholesky(between(kernel, x_S, x_S) + (noise[self.shared] + nugget).diag())
        w = torch.linalg.solve_triangular(L, r[self.shared, None], upper=False)
        scores = []
        for part in chunks(len(self.rows), _HELD_OUT):
            line = torch.cat([self.rows[part, None], self.near[part].clamp_min(0)], -1)
            seen, at = torch.unique(line, return_inverse=True)
            V = torch.linalg.solve_triangular(L, between(kernel, x_S, x[seen]), upper=False).mT
            left = r[line] - (V @ w).squeeze(-1)[at]
            C = between(kernel, x[line], x[line]) - V[at] @ V[at].mT + torch.diag_embed(noise[line])
            scores.append(_of_first(C, left, self.near[part] >= 0))
        return torch.cat(scores)


def _of_first(C: Tensor, r: Tensor, real: Tensor) -> Tensor:
    """Log densities (R,) of the first of normal values r (R, 1 + m) given the real ones of the
    others, whose covariances are C (R, 1 + m, 1 + m): with P = C⁻¹, N(r₀; r₀ − (P r)₀/P₀₀, 1/P₀₀).
    """
    kept = torch.cat([torch.ones_like(real[:, :1]), real], -1)
    C = torch.where(kept[:, :, None] & kept[:, None], C, 0.0) + torch.diag_embed((~kept).to(C))
    unit = torch.zeros_like(r[..., None]).index_fill(1, torch.tensor(0, device=r.device), 1.0)
    P_0 = torch.cholesky_solve(unit, torch.linalg.cholesky(C)).squeeze(-1)
    z = (P_0 * r * kept).sum(-1).square() / P_0[:, 0]
    return 0.5 * (P_0[:, 0].log() - z - math.log(2.0 * math.pi))


def _scale(kernel: AbstractKernel) -> Tensor:
    """Shortest length scale (D,) of the terms, on every axis."""
    return torch.stack([term.lengthscale for term in kernel.terms()]).amin(0)
