"""Full-rank families: S is any positive definite matrix.

`FullRankFamily` factorises; `KrylovFullRankFamily` stores S⁻¹ and only solves with it.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp.families import _family

#: Numbers of the float64 copies made at a time while statistics are summed.
_CHUNK = 2**22
#: Right-hand sides that share a Krylov space. More take fewer steps, and k² M_w for their Gram
#: matrices.
_TOGETHER = 256
#: Shift of Nyström's approximation. Not 1: negative weights may leave eigenvalues of Λ below it.
_SHIFT = 1e-6


@final
@dataclass(frozen=True, eq=False)
class FullRankGaussian(_family.AbstractRootedGaussian):
    """N(m, S) with S = Q Qᵀ; mean (M_w,), statistics (M_w, M_w) = S⁻¹ − I, root (M_w, M_w) = Q."""

    root: Tensor

    def apply_root(self, v: Tensor) -> Tensor:
        return v @ self.root.mT

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return v @ self.root

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        root = self.root.double()
        return root.square().sum(), 2.0 * root.diagonal().log().sum()


class _AbstractFullRankFamily(_family.AbstractFamily):
    """Families whose statistics are Σ_n w_n φ_n φ_nᵀ, dense (M_w, M_w)."""

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        shape = (self.n_features, self.n_features)
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        rows = max(1, _CHUNK // self.n_features)
        for X, w in zip(torch.split(phi, rows), torch.split(weights, rows), strict=True):
            X = X.double()
            into.addmm_((X * w.double().unsqueeze(-1)).mT, X)


@final
@dataclass(frozen=True)
class FullRankFamily(_AbstractFullRankFamily):
    """Unrestricted S: M_w² numbers, exact for Gaussian noise; refused beyond `max_bytes`.

    Examples
    --------
    >>> family = FullRankFamily(n_features=2)
    >>> phi, noise_variance = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.5])
    >>> statistics = family.precision_statistics(phi, 1.0 / noise_variance)
    >>> q = family.posterior(mean=torch.zeros(2), statistics=statistics)
    >>> q.quadratic(torch.eye(2))  # the variance that the data leave open
    tensor([0.5000, 0.3333])
    """

    n_features: int
    max_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        what = f"FullRankFamily with {self.n_features:,} features"
        _family.refuse_beyond(self.max_bytes, 4 * 8 * self.n_features**2, what)

    def posterior(self, mean: Tensor, statistics: Tensor) -> FullRankGaussian:
        root = _family.precision_root(_family.plus_identity(statistics)).to(mean.dtype)
        return FullRankGaussian(mean, statistics, root)


@final
@dataclass(eq=False)
class SolveLog:
    """Counts of the solves with Λ so far, of all states of a family: right-hand sides, those that
    missed rtol, the most steps of one and the sum of all, and the largest true residual."""

    columns: int = 0
    unconverged: int = 0
    steps: int = 0
    products: int = 0
    residual: float = 0.0

    def add(self, result: linalg.SolveResult) -> None:
        """Count one batched solve."""
        if result.status.numel() == 0:
            return
        self.columns += result.status.numel()
        self.unconverged += int((result.status != linalg.SolveStatus.CONVERGED.value).sum())
        self.steps = max(self.steps, int(result.steps.max()))
        self.products += int(result.steps.sum())
        self.residual = max(self.residual, float(result.residuals.max()))


@final
@dataclass(frozen=True, eq=False)
class KrylovFullRankGaussian(_family.AbstractGaussian):
    """N(m, S) with S = Λ⁻¹; mean (M_w,), statistics (M_w, M_w) = Λ − I.

    S v is the solution of Λ x = v by block conjugate gradients in float64, O(J M_w²) a vector.
    Samples, tr S and ln |S| factorise Λ, in O(M_w³).

        φᵀ S φ = max_x 2 φᵀx − xᵀ Λ x

    is taken at the solution's x: it falls short by (x − Sφ)ᵀ Λ (x − Sφ), the square of the error,
    and its derivative is 2 x, without another solve.

    preconditioner (M_w, M_w): ≈ S, float64; rtol, max_steps: relative residual and steps J at which
    solves stop.
    """

    preconditioner: linalg.AbstractOperator
    rtol: float
    max_steps: int
    log: SolveLog

    def apply_covariance(self, v: Tensor) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return self._solved(x).to(x.dtype)

        return linalg.apply_linear(v, product, product)

    def quadratic(self, phi: Tensor) -> Tensor:
        result: Tensor = _Quadratic.apply(phi, self)  # type: ignore[no-untyped-call]
        return result

    def covariance_of(self, phi_a: Tensor, phi_b: Tensor) -> Tensor:
        return (phi_a.double() @ self.apply_covariance(phi_b.double()).mT).to(phi_b.dtype)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.factorised().trace_and_log_det()

    def divergence(self) -> _family.Divergence:
        return lambda: float(self.kl())

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return self.factorised().sample(count, generator)

    def factorised(self) -> FullRankGaussian:
        """Factorise: q with a root of S, by Cholesky."""
        root = _family.precision_root(self.precision()).to(self.mean.dtype)
        return FullRankGaussian(self.mean, self.statistics, root)

    def _solved(self, v: Tensor) -> Tensor:
        """Return Λ⁻¹ v for v (..., M_w), float64."""
        A, parts = _Precision(self.statistics), []
        for b in torch.split(v.double().reshape(-1, v.shape[-1]), _TOGETHER):
            solve = linalg.block_pcg(
                A,
                b,
                preconditioner=self.preconditioner,
                rtol=self.rtol,
                max_steps=self.max_steps,
            )
            self.log.add(solve)
            _judge(solve)
            parts.append(solve.x)
        return torch.cat(parts).reshape(v.shape) if parts else v.double()


@final
@dataclass(frozen=True)
class KrylovFullRankFamily(_AbstractFullRankFamily):
    """Unrestricted S by its natural parameters: a step takes O(J M_w²), no factor of S⁻¹ (000).

    Λ = S⁻¹ moves by the rows φ (B, M_w) of a minibatch, in O(B M_w²):

        Λ' = (1 − l) Λ + l (I + φᵀ diag(w) φ)

    and θ₁ = Λ m with it. Its m' = Λ'⁻¹ θ₁' is `natural_step`'s m + l S' g, g = ∂L/∂m: conjugate
    gradients on Λ' m' = θ₁' that start from m. Beside it a step solves for φᵀSφ of the rows, all
    of them in one Krylov space. Solves stop at the relative residual `rtol`: those that do not get
    there are counted in `log` and warn with `UnconvergedWarning`; a Λ found not to be positive
    definite is an error.

    For M_w of many thousands and small minibatches: on one core of a CPU a step takes 4 times as
    long as one of `FullRankFamily` at M_w = 1,000 and 1.5 times at 6,000 with 64 rows, with no
    crossover met yet (`python -m pipelines.reproduce ciq --only natural`). J grows with the spread
    of what data say of different directions, which is large where noise is small.

    rank: of the Nyström preconditioner, made anew for each state by so many products with Λ; 0
    takes the diagonal of Λ.
    """

    n_features: int
    rank: int = 100
    rtol: float = 1e-3
    max_steps: int = 500
    seed: int = 0
    max_bytes: int = 8 * 2**30
    log: SolveLog = field(default_factory=SolveLog, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rank < 0 or self.max_steps < 1 or not 0 < self.rtol < 1:
            raise UserError(
                f"expected rank >= 0, max_steps >= 1 and rtol in (0, 1), got rank={self.rank}, "
                f"max_steps={self.max_steps}, rtol={self.rtol}"
            )
        what = f"KrylovFullRankFamily with {self.n_features:,} features"
        _family.refuse_beyond(self.max_bytes, 4 * 8 * self.n_features**2, what)

    def posterior(self, mean: Tensor, statistics: Tensor) -> KrylovFullRankGaussian:
        diagonal = 1.0 + statistics.diagonal()
        # One sum over all entries: a NaN or an infinity anywhere is in it.
        if not bool((diagonal > 0).all()) or not bool(statistics.sum().isfinite()):
            raise UserError(
                f"the precision of q is not positive and finite in "
                f"{int((~(diagonal > 0)).sum())} of {self.n_features} directions: "
                f"{_family.EXPECTED}"
            )
        preconditioner: linalg.AbstractOperator = linalg.DiagonalOperator(diagonal.reciprocal())
        if self.rank > 0:
            A = _Precision(statistics)
            preconditioner = linalg.nystrom(A, self.rank, shift=_SHIFT, seed=self.seed)
        return KrylovFullRankGaussian(
            mean, statistics, preconditioner, self.rtol, self.max_steps, self.log
        )


def _judge(solve: linalg.SolveResult) -> None:
    """An error where Λ is no precision, a warning where a solution missed rtol."""
    if solve.worst in (linalg.SolveStatus.NOT_POSITIVE_DEFINITE, linalg.SolveStatus.NON_FINITE):
        raise UserError(
            f"the precision of q is not positive definite or not finite: {solve.message()}. "
            f"{_family.EXPECTED}"
        )
    if not solve.converged:
        warnings.warn(
            f"solves with the precision of q: {solve.message()}",
            linalg.UnconvergedWarning,
            stacklevel=4,
        )


@final
@dataclass(frozen=True, eq=False)
class _Precision(linalg.AbstractSymmetric):
    """Λ = I + statistics, never added up."""

    statistics: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[0], self.dtype, self.device)
        return torch.addmm(x, x, self.statistics) if x.ndim == 2 else x + x @ self.statistics


class _Quadratic(torch.autograd.Function):
    """φᵀ S φ, with the derivative 2 S φ of the one solve."""

    @staticmethod
    def forward(ctx: Any, phi: Tensor, q: KrylovFullRankGaussian) -> Tensor:
        wide, x = phi.double(), q._solved(phi)
        ctx.save_for_backward(x)
        short_of = wide - _Precision(q.statistics).matmul(x)
        return (x * (wide + short_of)).sum(-1).to(phi.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (2.0 * grads[0].double().unsqueeze(-1) * x).to(grads[0].dtype), None
