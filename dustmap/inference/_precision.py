"""Λ = I + Φᵀ W Φ, bounds on its spectrum, and the spread of fitted coefficients of the mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp.families import AbstractGaussian
from dustmap.inference._state import Layout

#: Stream of the keyed noise z, by position among the directions.
_STREAM = 2
#: Error of the spread in standard deviations of the coefficients that is asked for, and the most
#: corrections: each knows better how small the remaining variances are.
_ERROR, _CORRECTIONS = 0.03, 6
_NAMES = ("directions", "fields", "draws")


@final
class PrecisionOperator(linalg.AbstractSymmetric):
    """Λ = I + Φᵀ diag(w) Φ (M_w, M_w), the posterior precision of ε for Gaussian noise (S3).

    phi (N, M_w): an operator; weights (N,) = 1/σ_n².

    Examples
    --------
    >>> phi = linalg.DenseOperator(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    >>> PrecisionOperator(phi, weights=torch.tensor([1.0, 2.0])).to_dense()
    tensor([[4., 2.],
            [2., 3.]])
    """

    def __init__(self, phi: linalg.AbstractOperator, weights: Tensor) -> None:
        self._phi, self._weights = phi, weights.to(phi.dtype)

    def _made_of(self) -> linalg.AbstractOperator:
        return self._phi

    def matmul(self, x: Tensor) -> Tensor:
        return x + self._phi.rmatmul(self._weights * self._phi.matmul(x))


@final
class NodePrecision(linalg.AbstractSymmetric):
    """Λ = I + Rᵀ G R (M_w, M_w) for Φ = W R, with G = WᵀΣ⁻¹W among the nodes that data see.

    Products with G are in place of those with W and Wᵀ: for many data on few nodes.

    rows W (N, M); root R (M, M_w); weights (N,) = 1/σ_n².

    Examples
    --------
    >>> places = torch.tensor([[0, 1], [0, 0]])
    >>> W = linalg.SparseOperator.from_coo(*places, torch.tensor([1.0, 2.0]), (2, 3))
    >>> root = linalg.DiagonalOperator(torch.tensor([3.0, 1.0, 1.0]))
    >>> NodePrecision(W, root, weights=torch.tensor([1.0, 0.5])).to_dense()
    tensor([[28.,  0.,  0.],
            [ 0.,  1.,  0.],
            [ 0.,  0.,  1.]])
    """

    def __init__(
        self, rows: linalg.SparseOperator, root: linalg.AbstractOperator, weights: Tensor
    ) -> None:
        self._index, self._root = linalg.entered_columns(rows), root
        self._gram = linalg.SparseGram.of(rows, weights, self._index)

    def _made_of(self) -> linalg.AbstractOperator:
        return self._root

    def matmul(self, x: Tensor) -> Tensor:
        field = self._root.matmul(x)
        seen = self._gram.matmul(field[..., self._index])
        return x + self._root.rmatmul(torch.zeros_like(field).index_copy_(-1, self._index, seen))


@final
@dataclass(frozen=True, eq=False)
class FamilyPreconditioner(linalg.AbstractSymmetric):
    """S (M_w, M_w) of a structured posterior, the Jacobi preconditioner of Λ in its structure."""

    state: AbstractGaussian

    def _made_of(self) -> Tensor:
        return self.state.mean

    def matmul(self, x: Tensor) -> Tensor:
        return self.state.apply_covariance(x)


@final
class SeenCovariance(linalg.AbstractSymmetric):
    """G = W^½ Φ S Φᵀ W^½ (n, n) of data with rows Φ and weights W ≥ 0, by products with Φ.

    phi (n, M_w): an operator, whose rows ranks may share; state: with S; weights (n,).
    """

    def __init__(
        self, state: AbstractGaussian, phi: linalg.AbstractOperator, weights: Tensor
    ) -> None:
        self._state, self._phi = state, phi
        self._root_weights = weights.sqrt().to(phi.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self._phi.shape[0], self._phi.shape[0]

    def _made_of(self) -> linalg.AbstractOperator:
        return self._phi

    def matmul(self, x: Tensor) -> Tensor:
        seen = self._phi.rmatmul(self._root_weights * x)
        return self._root_weights * self._phi.matmul(self._state.apply_covariance(seen))


def batch_stability(
    state: AbstractGaussian, phi: linalg.AbstractOperator, weights: Tensor
) -> float:
    """Bound of λ_max(S Λ_b) for Λ_b = I + Φᵀ W Φ of a minibatch, from above.

    λ_max(S Λ_b) ≤ λ_max(S) + λ_max(W^½ Φ S Φᵀ W^½) ≤ 1 + λ_max(G), where S ≤ I, as of weights ≥ 0
    (those below 0 leave S larger in some directions, and the bound short there); the latter by the
    Lanczos method (`largest_eigenvalue`). The natural step of the mean is a contraction iff its
    length is below 2 over λ_max(S Λ_b).

    phi (n, M_w): an operator; weights (n,) already scaled by N/n, negative ones left out.

    Examples
    --------
    >>> from dustmap.gp.families import MeanFieldFamily
    >>> family = MeanFieldFamily(2)
    >>> phi, weights = torch.eye(2).double(), torch.ones(2).double()
    >>> q = family.posterior(torch.zeros(2).double(), family.precision_statistics(phi, weights))
    >>> round(batch_stability(q, linalg.DenseOperator(phi), weights), 12)  # S = I / 2, Λ_b = 2 I
    1.5
    """
    seen = SeenCovariance(state, phi, weights.clamp_min(0))
    return 1.0 + linalg.largest_eigenvalue(seen)


@final
@dataclass(frozen=True, eq=False)
class CoefficientSpread:
    """Universal kriging: β = β̂ + T z, ε = ε̂ + Eᵀ z + δ with z ~ N(0, I_K), δ ~ N(0, Λ⁻¹).

    The posterior of y = H β + Φ ε + noise under a flat prior of β:

        T Tᵀ = (Hᵀ A⁻¹ H)⁻¹        Eᵀ = −Λ⁻¹ΦᵀΣ⁻¹ H T        A = ΦΦᵀ + Σ

    A functional f_* sees z as u_* = H_* T + φ_*ᵀ Eᵀ, which is H_* T in the shape that the data
    leave of it: nothing close to many data, all far away from them.

    directions (P, K): T. fields (K, M_w): E. draws (S, K): z_s of the draws that a posterior keeps.
    error: bound of the error of u, in standard deviations of the coefficients and of f_*.
    """

    directions: Annotated[Tensor, Layout("beta", "P K")]
    fields: Annotated[Tensor, Layout("field", "K M")]
    draws: Annotated[Tensor, Layout("beta", "S K")]
    error: float = 0.0

    @staticmethod
    def of_gram(gram: Tensor, T: Tensor, W: Tensor, seed: int, count: int) -> "CoefficientSpread":
        """Build from S (K, K) = Tᵀ Hᵀ A⁻¹ H T of any T (P, K), and W (K, M_w), Wᵀ = Λ⁻¹ΦᵀΣ⁻¹ H T.

        count: draws that the posterior keeps, keyed by seed.
        """
        root = inverse_root(gram)
        K = len(gram)
        normal = linalg.KeyedNormal(seed, _STREAM)
        z = torch.zeros(count, K, dtype=T.dtype)
        for s in range(count):
            z[s] = normal.draw(s, K)
        fields = -(root.mT.to(W) @ W)
        return CoefficientSpread(T @ root, fields, z.to(T.device))

    def seen(self, basis: Tensor, fields: Tensor) -> Tensor:
        """u (K, N) of functionals with H = basis (N, P), which see E as fields (K, N)."""
        return (basis @ self.directions).mT.to(fields.dtype) + fields

    def beside(self, other: "CoefficientSpread") -> "CoefficientSpread":
        """Return these directions and, independent of them, those of another spread."""
        return CoefficientSpread(
            torch.cat([self.directions, other.directions], dim=1),
            torch.cat([self.fields, other.fields]),
            torch.cat([self.draws, other.draws], dim=1),
            self.error,
        )

    def chosen(self, index: Tensor | slice) -> "CoefficientSpread":
        """Return the same with some of the draws."""
        return replace(self, draws=self.draws[index])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for `of_tensors`."""
        return {f"spread_{name}": getattr(self, name) for name in _NAMES}

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor]) -> "CoefficientSpread | None":
        """Build from `tensors`; None where they lack it: given coefficients, old versions."""
        if f"spread_{_NAMES[0]}" not in tensors:
            return None
        directions, fields, draws = (tensors[f"spread_{name}"] for name in _NAMES)
        return CoefficientSpread(directions, fields, draws)


@torch.no_grad()
def coefficient_spread(
    phi: linalg.AbstractOperator,
    precision: linalg.AbstractOperator,
    D: Tensor,
    U: Tensor,
    directions: Tensor,
    *,
    seed: int,
    count: int,
    preconditioner: linalg.AbstractOperator | None = None,
    max_steps: int = 500,
    progress: linalg.Progress = linalg.unwatched,
) -> CoefficientSpread:
    """The spread of coefficients fitted to y = H β + Φ ε + noise, by K solves with Λ.

        Λ Wᵀ = ΦᵀDU        S = UᵀD⁻¹A⁻¹D⁻¹U = ‖U − DΦWᵀ‖² + ‖Wᵀ‖²

    S is the least value of a quadratic form, exact to second order in the error of W. Where the
    field can imitate the mean it is far below 1, and so has the residual to be: every correction
    is asked for a residual that suits the S of the one before.

    Parameters
    ----------
    phi, precision : Φ (N, M_w) and Λ (M_w, M_w)
    D : (N,)
        Σ^{-1/2}.
    U, directions : (N, K), (P, K)
        D H directions = U, UᵀU = I.
    seed, count : of the draws of coefficients
    preconditioner, max_steps, progress : of the solves
    """
    solve = partial(
        linalg.pcg,
        precision,
        preconditioner=preconditioner,
        max_steps=max_steps,
        progress=progress,
    )
    W = torch.zeros(U.shape[1], phi.shape[1], dtype=phi.dtype, device=phi.device)
    best, gram, error = W, torch.eye(len(W), dtype=U.dtype, device=U.device), float("inf")
    for _ in range(_CORRECTIONS):
        misfit = U.mT - D * phi.matmul(W).double()
        r = phi.rmatmul((D * misfit).to(phi.dtype)) - W
        tried = misfit @ misfit.mT + W.double() @ W.double().mT
        left = float(torch.linalg.matrix_norm(inverse_root(tried).mT @ r.double(), 2))
        if not left < error:
            break
        best, gram, error = W, tried, left
        if error <= _ERROR:
            break
        least = float(torch.linalg.eigvalsh(tried).min().clamp_min(0.0)) ** 0.5
        # A column at a time: no more memory than one right-hand side takes.
        W = W + torch.stack([_solved(solve, one, 0.5 * _ERROR * least) for one in r])
    spread = CoefficientSpread.of_gram(gram, directions, best, seed, count)
    return replace(spread, error=error)


def _solved(solve: Callable[..., linalg.SolveResult], b: Tensor, tolerance: float) -> Tensor:
    """Return Λ⁻¹ b (M_w,), with a residual of norm `tolerance` or of rounding."""
    norm, eps = float(b.norm()), torch.finfo(b.dtype).eps
    rtol = max(min(1.0, tolerance / norm) if norm > 0 else 1.0, 4.0 * eps)
    return solve(b, rtol=rtol).x


def inverse_root(gram: Tensor) -> Tensor:
    """R (K, K) with R Rᵀ = gram⁻¹ for a positive definite matrix."""
    values, vectors = torch.linalg.eigh(0.5 * (gram + gram.mT))
    least = torch.finfo(values.dtype).eps * values.max()
    root: Tensor = vectors * values.clamp_min(least).rsqrt()
    return root
