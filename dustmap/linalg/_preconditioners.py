"""Randomised Nyström preconditioners, and preconditioners with a known root.

The latter serve roots of the matrices that they resemble.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import _operator, _world
from dustmap.linalg._chunks import PRODUCTS, Progress, chunks, unwatched, watched_chunks
from dustmap.linalg._toeplitz import CirculantOperator

# Eigenvalues below this many rounding errors of the largest are none, and below minus as many
# negative.
_NOISE = 10.0
_NEGATIVE = 100.0
# Products with A are taken of so many vectors at once, for their memory.
_ROWS_TOGETHER = 32
# Columns that products of vectors are summed over at once on a CPU, and bands of their rows.
_COLUMNS, _BANDS = 4096, 4


@final
@dataclass(frozen=True, eq=False)
class NystromPreconditioner(_operator.AbstractSymmetric):
    """P⁻¹ ≈ A⁻¹ (up to a factor) for A = shift · I + G with G ≈ Uᵀ diag(s) U of low rank.

        P⁻¹ = (s_r + shift) Uᵀ diag(1 / (s + shift)) U + (I − Uᵀ U)

    symmetric and positive definite. On the span of U the eigenvalues of P⁻¹A become s_r + shift;
    the rest of G is no larger than about s_r, so the condition number falls from
    1 + s_1/shift to about 1 + s_r/shift.

    Ranks of a world divide its columns among them, U_k (r, n_k) with n_k = `world.shares(n)`:

        P⁻¹ x = the ranks' x_k − (t · Σ_k x_k U_kᵀ) U_k, gathered,   t = (s − s_r) / (s + shift)

    All of them hold U, hand over the same x, get the same result, and have to ask for it.

    vectors (r, n): U, orthonormal rows; values (r,): s, descending, ≥ 0, float64; shift > 0; tail:
    s_r, or 0 if G has no more eigenvalues; world: the ranks.

    Reference: Frangella, Tropp & Udell (2023), "Randomized Nyström preconditioning".
    """

    vectors: Tensor
    values: Tensor
    shift: float
    tail: float
    world: _world.AbstractWorld = field(default_factory=_world.Alone)

    @property
    def rank(self) -> int:
        """r."""
        return self.vectors.shape[0]

    def matmul(self, x: Tensor) -> Tensor:
        _operator.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return _operator.apply_linear(x, self._product, self._product)

    def _product(self, x: Tensor) -> Tensor:
        n = self.shape[0]
        mine = self.world.share(n)
        x, vectors = x[..., mine], self.vectors[:, mine]
        taken = (self.values - self.tail) / (self.values + self.shift)
        along = self.world.total(x @ vectors.mT)
        return self.world.gathered(x - (along * taken.to(x.dtype)) @ vectors, self.world.shares(n))

    def stacked(self, scales: Tensor) -> "NystromStack":
        """Preconditioners of shift · I + D_k G D_kᵀ, D_k = (diag(scales_k1); …; diag(scales_kS))
        one below the other, for scales (K, S, n), or one for all vectors, K = 1."""
        mine = self.world.share(self.shape[0])
        f = ((self.values - self.tail) / (self.tail + self.shift)).clamp_min(0.0).sqrt()
        U, cores = self.vectors[:, mine], []
        for D in scales[..., mine]:
            # Rounded: what it preconditions is no more exact.
            inner = self.world.total(_scaled_gram(U, D.norm(dim=0))).double()
            inner = f[:, None] * inner * f + torch.eye(len(f), dtype=f.dtype, device=f.device)
            core = torch.cholesky_inverse(torch.linalg.cholesky(inner))
            cores.append((f[:, None] * core * f).to(self.dtype))
        none = self.vectors.new_zeros(0, self.rank, self.rank)
        return NystromStack(self, scales, torch.stack(cores) if cores else none)

    def refreshed(
        self, A: _operator.AbstractOperator, progress: Progress = unwatched
    ) -> "NystromPreconditioner":
        """Update for an operator that has changed a little, by one product with A on the basis U:
        a step of subspace iteration towards the largest eigenvectors of the new A."""
        _check(A, self.shift)
        if A.shape != self.shape:
            raise UserError(f"A: expected shape {self.shape} like before, got {A.shape}")
        with torch.no_grad():
            return _approximation(A, self.vectors, self.shift, self.world, progress)


@final
@dataclass(frozen=True, eq=False)
class NystromStack(_operator.AbstractStack):
    """Nyström preconditioners of A_k = shift · I + D_k G D_kᵀ (S n, S n) that share the vectors U
    of G's, D_k (S n, n) of S diagonal matrices one below the other.

    With Ã_k = I + D_k Uᵀ diag(f) U D_kᵀ, f = (s − s_r) / (s_r + shift), Woodbury's identity gives

        Ã_k⁻¹ = I − D_k Uᵀ C_k U D_kᵀ,   C_k = f^½ (I + f^½ U D_kᵀD_k Uᵀ f^½)⁻¹ f^½

    and for D_k = I the preconditioner itself. A product reads U twice however many k there are.

    base: of G; scales: diagonals of D_k (K, S, n), one for all vectors where K = 1; cores: C_k
    (K, r, r).
    """

    base: NystromPreconditioner
    scales: Tensor
    cores: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        length = self.scales.shape[1] * self.scales.shape[2]
        return length, length

    def _made_of(self) -> NystromPreconditioner:
        return self.base

    def matmul(self, x: Tensor) -> Tensor:
        world, (count, n) = self.base.world, self.scales.shape[1:]
        mine = world.share(n)
        U, D, own = self.base.vectors[:, mine], self.scales[..., mine], x.reshape(-1, count, n)
        own = own[..., mine]
        along = world.total((own * D).sum(1) @ U.mT)
        turned = (self.cores @ along[:, :, None]).squeeze(2) @ U
        product = torch.addcmul(own, turned[:, None], D, value=-1.0)
        return world.gathered(product, world.shares(n)).reshape(x.shape)

    def taken(self, which: Tensor) -> "NystromStack":
        if len(self.scales) == 1:
            return self
        return NystromStack(self.base, self.scales[which], self.cores[which])


def nystrom(
    A: _operator.AbstractOperator,
    rank: int,
    *,
    shift: float = 1.0,
    seed: int = 0,
    world: _world.AbstractWorld | None = None,
    progress: Progress = unwatched,
) -> NystromPreconditioner:
    """Preconditioner of A = shift · I + G, G positive semi-definite, of `rank` products with A.

        G ≈ Yᵀ (Ω Yᵀ)⁺ Y,   Y = Ω G,   Ω (rank, n) random with orthonormal rows

    The small matrices are float64. Directions in which G is lost in the rounding errors of A are
    left out: the result has the rank of G if that is smaller than `rank`. A that is not square or
    finite, or a negative eigenvalue of A − shift · I, is a UserError.

    world: ranks that make and apply it together, all of which have A.

    Reference: Frangella, Tropp & Udell (2023), algorithm 2.1; the pseudo-inverse takes the place of
    their shift.

    Examples
    --------
    >>> A = DiagonalOperator(torch.tensor([1.0, 1.0, 1.0, 9.0]))
    >>> preconditioner = nystrom(A, rank=2)
    >>> preconditioner.rank, preconditioner.values.round(decimals=3)
    (1, tensor([8.], dtype=torch.float64))
    """
    _check(A, shift)
    if rank < 0:
        raise UserError(f"nystrom: expected rank >= 0, got rank={rank}")
    world, n = world or _world.Alone(), A.shape[0]
    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(min(rank, n), n, dtype=A.dtype, generator=generator).to(A.device)
    with torch.no_grad():
        basis = _whole(_world.orthonormal_rows(omega[:, world.share(n)], world), n, world)
        return _approximation(A, basis, shift, world, progress)


def _approximation(
    A: _operator.AbstractOperator,
    omega: Tensor,
    shift: float,
    world: _world.AbstractWorld,
    progress: Progress,
) -> NystromPreconditioner:
    """Nyström from an orthonormal basis `omega` (l, n). Blocks of vectors are of a rank's share of
    the columns: their inner products are sums over ranks."""
    n = omega.shape[1]
    if len(omega) == 0:
        none = torch.zeros(0, dtype=torch.float64, device=omega.device)
        return NystromPreconditioner(omega, none, shift, 0.0, world)
    mine, parts = world.share(n), list[Tensor]()
    for rows in watched_chunks(len(omega), _ROWS_TOGETHER, PRODUCTS, progress):
        parts.append(A.matmul(omega[rows])[:, mine].sub(omega[rows, mine], alpha=shift))
    Y = torch.cat(parts)  # this rank's columns of ω G = ω A − shift ω
    parts.clear()
    core = world.total(_world.gram(omega[:, mine], Y))
    if not bool(core.isfinite().all()):
        raise UserError("nystrom: products with A are not finite; check its entries and scale")
    rounding = torch.finfo(Y.dtype).eps
    factor = _world.row_factor(core, _NOISE * rounding, shift)
    if factor.lowest < -_NEGATIVE * rounding * max(factor.highest, shift):
        raise UserError(
            f"nystrom: expected A - shift I positive semi-definite, got an eigenvalue below "
            f"{factor.lowest:.3g} for shift={shift}; lower the shift"
        )
    # G ≈ Bᵀ B; of B's singular values the squares are kept.
    B = _world.turned_in_place(factor.reduce, Y)
    values, rotation = torch.linalg.eigh(_world.symmetric(world.total(_world.gram(B, B))))
    values, rotation = values.flip(0), rotation.flip(1)
    scaled = _world.turned_in_place((rotation / values.sqrt()).mT, B)
    basis = _world.orthonormal_rows(scaled, world)
    tail = float(values[-1]) if len(values) else 0.0
    if len(values) < len(omega):
        # Rows are dependent in directions of G that rounding hides, of which random ones have r/n.
        hidden = _NOISE * rounding * factor.highest * n / len(omega)
        tail = min(tail, hidden) if hidden > shift else 0.0
    return NystromPreconditioner(_whole(basis, n, world), values, shift, tail, world)


def _scaled_gram(U: Tensor, D: Tensor) -> Tensor:
    """Return U diag(D)² Uᵀ (r, r) of U (r, n) and D (n,): its lower half, by columns of U that stay
    in cache, and the other half from that."""
    r, n = U.shape
    total, columns = U.new_zeros(r, r), _COLUMNS if U.device.type == "cpu" else max(1, n)
    for part in chunks(n, columns):
        along = U[:, part] * D[part]
        for rows in chunks(r, max(1, -(-r // _BANDS))):
            total[rows, : rows.stop].addmm_(along[rows], along[: rows.stop].mT)
    return total.tril() + total.tril(-1).mT


def _whole(part: Tensor, n: int, world: _world.AbstractWorld) -> Tensor:
    """(l, n) of what each rank has of its columns, in rows as one process would have them."""
    return world.gathered(part, world.shares(n)).contiguous()


def _check(A: _operator.AbstractOperator, shift: float) -> None:
    """Raise unless A is square and the shift positive."""
    _operator.check_square(A)
    if not shift > 0:
        raise UserError(f"shift: expected > 0, got {shift}")


@final
@dataclass(frozen=True, eq=False)
class RootPreconditioner:
    """P = L Lᵀ ≈ K (n, n), given by root = L and inverse = L⁻¹ (n, n), adjoint pairs that need not
    be symmetric or triangles."""

    root: _operator.AbstractOperator
    inverse: _operator.AbstractOperator

    def __post_init__(self) -> None:
        n = self.root.shape[0]
        if self.root.shape != (n, n) or self.inverse.shape != (n, n):
            raise UserError(
                "RootPreconditioner: expected a square root and its inverse of the same shape, got "
                f"{self.root.shape} and {self.inverse.shape}"
            )

    @staticmethod
    def circulant(lags: Tensor, dtype: torch.dtype | None = None) -> "RootPreconditioner":
        """T. Chan's circulant of a multilevel Toeplitz matrix: the nearest in Frobenius norm.

            c_j = ((M − j) lags_j + j lags_{M−j}) / M    along every axis

        It has K's size, so that its root is one, and its eigenvalues lie between those of K. lags
        (M1, …, MD): as in `ToeplitzOperator`; dtype: working precision, by default lags'.

        Reference: T. Chan (1988); Chan & Jin (2007), sections 2.2 and 5.2.
        """
        column = lags.detach().to(torch.float64)
        for axis, m in enumerate(column.shape):
            j = torch.arange(m, device=column.device)
            place = [m if a == axis else 1 for a in range(column.ndim)]
            share = (j.to(torch.float64) / m).reshape(place)
            mirrored = column.index_select(axis, (m - j) % m)
            column = (1.0 - share) * column + share * mirrored
        spectrum = torch.fft.rfftn(column).real
        lowest = float(spectrum.min())
        if not lowest > 0:
            raise UserError(
                f"circulant preconditioner: an eigenvalue {lowest:.3g} is not positive, so the "
                "Toeplitz matrix is not positive definite; add a nugget"
            )
        working, torus = lags.dtype if dtype is None else dtype, tuple(lags.shape)
        return RootPreconditioner(
            CirculantOperator(spectrum.sqrt().to(working), torus),
            CirculantOperator(spectrum.rsqrt().to(working), torus),
        )


@final
@dataclass(frozen=True, eq=False)
class PreconditionedOperator(_operator.AbstractSymmetric):
    """L⁻¹ K L⁻ᵀ (n, n), symmetric with K."""

    operator: _operator.AbstractOperator
    preconditioner: RootPreconditioner

    def __post_init__(self) -> None:
        if self.operator.shape != self.preconditioner.inverse.shape:
            raise UserError(
                f"preconditioner: expected shape {self.operator.shape} like the operator, got "
                f"{self.preconditioner.inverse.shape}"
            )

    def matmul(self, x: Tensor) -> Tensor:
        inverse = self.preconditioner.inverse
        return inverse.matmul(self.operator.matmul(inverse.rmatmul(x)))
