"""Families of structured S: diagonal, block-diagonal over tiles of the (torus) grid, low-rank."""

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.families import _family
from dustmap.linalg import TilePartition, chunks

#: Numbers of the float64 copies made at a time while statistics of blocks are summed. Small enough
#: for a cache: larger pieces take three times as long.
_BLOCK_CHUNK = 2**19
#: Numbers of a chunk of rows that low-rank statistics sum.
_CHUNK = 2**22
#: Columns of the sketch for rank r: 2 r + this. Fewer lose the smaller of r eigenvectors.
_OVERSAMPLING = 10
#: Steps of expectation maximisation from the leading eigenvectors to the best S. After 10 the
#: divergence from the best was 1e-2 or less, after 20 there is little left to gain.
_REFINEMENTS = 20
#: Relative size of what is rounding: eigenvalues of the sketch, negative ones, and what the sketch
#: leaves of a diagonal.
_ROUNDING = 1e-13
_NEGATIVE = 1e-11
_REMAINDER = 1e-10


@final
@dataclass(frozen=True, eq=False)
class MeanFieldGaussian(_family.AbstractRootedGaussian):
    """N(m, diag(s²)); mean (M_w,), statistics (M_w,) = s⁻² − 1, std (M_w,) = s."""

    std: Tensor

    def apply_root(self, v: Tensor) -> Tensor:
        return self.std * v

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return self.std * v

    def precision(self) -> Tensor:
        return 1.0 + self.statistics

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        precision = self.precision()
        return precision.reciprocal().sum(), -precision.log().sum()


@final
@dataclass(frozen=True)
class MeanFieldFamily(_family.AbstractFamily):
    """Diagonal S: M_w numbers.

    The optimum S = diag(Λ)⁻¹ is never wider than the posterior of any single ε_i, yet ignores the
    correlations through which data determine sums of many ε: there it is far too wide.
    """

    n_features: int

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(self.n_features, dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> MeanFieldGaussian:
        precision = 1.0 + statistics
        _family.refuse_precision(precision > 0)
        return MeanFieldGaussian(mean, statistics, precision.rsqrt().to(mean.dtype))

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        # Terms of one sign: float32 products lose nothing, only their sum over batches must not.
        into += weights.to(phi.dtype) @ phi.square()


@final
@dataclass(frozen=True, eq=False)
class BlockGaussian(_family.AbstractRootedGaussian):
    """N(m, S) with S = blockdiag(S_1, ..., S_B), S_b = Q_b Q_bᵀ (S1).

    mean (M_w,) in grid order; statistics (B, M_b, M_b) = S_b⁻¹ − I; root (B, M_b, M_b) = Q_b.
    Padded slots of ragged tiles are independent with unit variance, and count nowhere.
    """

    root: Tensor
    partition: TilePartition

    def apply_root(self, v: Tensor) -> Tensor:
        return self._blockwise(self.root, v)

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return self._blockwise(self.root.mT, v)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        padded = self.statistics.shape[0] * self.statistics.shape[1] - self.mean.numel()
        root = self.root.double()
        log_det = 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum()
        return root.square().sum() - padded, log_det

    def _blockwise(self, matrices: Tensor, v: Tensor) -> Tensor:
        blocks = self.partition.to_blocks(v)  # (..., B, M_b)
        return self.partition.from_blocks(torch.einsum("bij,...bj->...bi", matrices, blocks))


@final
@dataclass(frozen=True)
class BlockFamily(_family.AbstractFamily):
    """Block-diagonal S over the tiles of `partition` (eq. 23): B M_b² numbers.

    One tile is the full-rank family, tiles of one point the mean-field family.
    """

    partition: TilePartition
    max_bytes: int = 8 * 2**30
    n_features: int = field(init=False)

    def __post_init__(self) -> None:
        B, M_b = self.partition.n_blocks, self.partition.block_size
        what = f"BlockFamily with {B:,} blocks of {M_b:,} features"
        _family.refuse_beyond(self.max_bytes, 4 * 8 * B * M_b**2, what)
        object.__setattr__(self, "n_features", math.prod(self.partition.shape))

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        B, M_b = self.partition.n_blocks, self.partition.block_size
        return torch.zeros((B, M_b, M_b), dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> BlockGaussian:
        root = _family.precision_root(_family.plus_identity(statistics)).to(mean.dtype)
        return BlockGaussian(mean, statistics, root, self.partition)

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        blocks = self.partition.to_blocks(phi)  # (n, B, M_b)
        # By blocks, not by rows: each block of the statistics is then touched once.
        step = max(1, _BLOCK_CHUNK // max(1, len(phi) * self.partition.block_size))
        for part in chunks(self.partition.n_blocks, step):
            X = blocks[:, part].double().transpose(0, 1)  # (b, n, M_b)
            into[part].baddbmm_((X * weights.double().unsqueeze(-1)).mT, X)


@final
@dataclass(frozen=True, eq=False)
class LowRankDiagonalGaussian(_family.AbstractRootedGaussian):
    """N(m, S) with S⁻¹ = D^{½} (I + U diag(s) Uᵀ) D^{½} = D + V Vᵀ, D diagonal, U orthonormal.

    mean (M_w,); diagonal (M_w,) = diag D, float64; basis (M_w, r) = U, of the mean's dtype;
    gains (r,) = s ≥ 0, float64. Every product is O(M_w r), by Woodbury:

        S = D^{-½} (I − U diag(s / (1 + s)) Uᵀ) D^{-½},   Q = D^{-½} (I − U diag(1 − (1+s)^{-½}) Uᵀ)

    statistics (M_w, 1 + l): diagonal and sketch of all that data said of S⁻¹, before it was cut
    down to this form; signs (M_w, l): what the sketch was taken with.
    """

    diagonal: Tensor
    basis: Tensor
    gains: Tensor
    signs: Tensor

    def apply_root(self, v: Tensor) -> Tensor:
        return self._narrowed(v) * self._scale(v)

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return self._narrowed(v * self._scale(v))

    def precision(self) -> Tensor:
        """Diagonal and sketch of S⁻¹ (M_w, 1 + l), which are linear in it; not S⁻¹ itself."""
        omega = self.signs.double()
        return self.statistics + torch.cat([omega.new_ones(len(omega), 1), omega], dim=1)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        taken = self.basis.double().square() @ (self.gains / (1.0 + self.gains))
        log_det = -self.diagonal.log().sum() - self.gains.log1p().sum()
        return ((1.0 - taken) / self.diagonal).sum(), log_det

    def _narrowed(self, v: Tensor) -> Tensor:
        """(I + U diag(s) Uᵀ)^{-½} v."""
        taken = 1.0 - (1.0 + self.gains).rsqrt()
        return v - (v @ self.basis * taken.to(v.dtype)) @ self.basis.mT

    def _scale(self, like: Tensor) -> Tensor:
        return self.diagonal.rsqrt().to(like.dtype)


@final
@dataclass(frozen=True)
class LowRankDiagonalFamily(_family.AbstractFamily):
    """S⁻¹ = D + V Vᵀ with V (M_w, rank): O(M_w rank) numbers and operations, at any M_w.

    Data add precision to the whitened prior in some directions and leave the others as they are,
    so it is the precision that is of low rank beside a diagonal. (S = D + V Vᵀ would want as
    many columns as there are directions left alone.) Rank 0 is the mean-field family, rank M_w
    the full-rank one; N data or fewer of weights ≥ 0 are met exactly by rank N.

    The precision I + G, G = Σ_n w_n φ_n φ_nᵀ, adds over batches; V does not. What is added is
    therefore linear in G: its diagonal, and its product G Ω with fixed random signs Ω of
    2 rank + 10 columns. Natural steps (S12) average these, exactly as they average G. Every
    state is then cut down to the form:

    1. G ≈ B Bᵀ = GΩ (ΩᵀGΩ)⁺ (GΩ)ᵀ (Nyström), never larger than G, and the rest of G's diagonal.
    2. The D and V that minimise KL[q ‖ q*] from q* = N(m, (I + G)⁻¹), i.e. tr(SΛ) − ln|S| with
       Λ = I + G. That is factor analysis with Λ in place of a sample covariance, D its noise and
       V its loadings: V starts from the leading eigenvectors and expectation maximisation ends
       it, each step an increase of the ELBO. At the optimum diag(S⁻¹) = diag(Λ).

    There is no closed-form D and V; 1 with 20 steps of 2 take the place of gradients in them.
    Mishkin et al. (2018) take the leading eigenvectors and the diagonal alone. Negative weights, of
    likelihoods that are not log-concave, are met by 1 as well.

    Reference: Mishkin et al. (2018), "SLANG"; Rubin & Thayer (1982), "EM algorithms for ML factor
    analysis"; Tropp et al. (2017), "Fixed-rank approximation of a positive-semidefinite matrix from
    streaming data".
    """

    n_features: int
    rank: int
    seed: int = 0
    max_bytes: int = 8 * 2**30
    signs: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= self.n_features:
            raise UserError(
                f"rank must be from 0 (mean-field) to n_features = {self.n_features} (full rank), "
                f"got {self.rank}"
            )
        width = 0 if self.rank == 0 else _width(self.n_features, self.rank)
        what = f"LowRankDiagonalFamily with {self.n_features:,} features and rank {self.rank:,}"
        _family.refuse_beyond(self.max_bytes, 4 * 8 * self.n_features * (1 + width), what)
        object.__setattr__(self, "signs", _signs(self.n_features, width, self.seed))

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        shape = (self.n_features, 1 + self.signs.shape[1])
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> LowRankDiagonalGaussian:
        signs = self.signs.to(statistics.device)
        _family.refuse_precision((1.0 + statistics[:, 0] > 0) & statistics.isfinite().all(-1))
        B, shift = _nystrom_factor(statistics[:, 1:], signs)
        D, V = _best_factors(*_split(1.0 + statistics[:, 0], B, shift), self.rank)
        # Of W = D^{-½} V the left singular vectors and squared singular values.
        U, singular, _ = torch.linalg.svd(V / D.sqrt()[:, None], full_matrices=False)
        return LowRankDiagonalGaussian(
            mean, statistics, D, U.to(mean.dtype), singular.square(), signs
        )

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        signs = self.signs.to(phi.device).double()
        rows = max(1, _CHUNK // self.n_features)
        for X, w in zip(torch.split(phi, rows), torch.split(weights, rows), strict=True):
            X, w = X.double(), w.double()
            into[:, 0] += w @ X.square()
            into[:, 1:].addmm_(X.mT, w[:, None] * (X @ signs))


def _width(n: int, rank: int) -> int:
    """Return the columns of the sketch: all n where half of them would be wanted."""
    width = 2 * rank + _OVERSAMPLING
    return width if 2 * width < n else n


def _signs(n: int, width: int, seed: int) -> Tensor:
    """Return Ω (n, width) of ±1, int8; the identity where nothing is to be compressed."""
    if width == n:
        return torch.eye(n, dtype=torch.int8)
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randint(0, 2, (n, width), generator=generator, dtype=torch.int8) - 1


def _nystrom_factor(sketch: Tensor, signs: Tensor) -> tuple[Tensor, float]:
    """Return B (M_w, k) with B Bᵀ ≈ G + κ I, and κ; orthogonal columns, the largest first.

    B Bᵀ = Y (ΩᵀY)⁺ Yᵀ for Y = (G + κ I) Ω. κ = 0 unless G is seen to fall below zero, by δ < 1:
    weights of likelihoods that are not log-concave may be negative. Then κ = min(2 δ, ½ (1 + δ)),
    for Nyström's approximation is one of positive matrices, and I + G is one.
    """
    if sketch.shape[1] == 0:
        return sketch, 0.0
    omega = signs.double()
    gram = omega.mT @ omega
    core = omega.mT @ sketch
    values, vectors = torch.linalg.eigh(0.5 * (core + core.mT))
    shift = 0.0
    if bool(values[0] < -_NEGATIVE * values[-1].abs()):
        root = torch.linalg.cholesky(torch.linalg.inv(gram))
        ritz = torch.linalg.eigvalsh(root.mT @ (0.5 * (core + core.mT)) @ root)
        delta = float(-ritz[0])
        shift = min(2.0 * delta, 0.5 * (1.0 + delta))
        sketch, core = sketch + shift * omega, core + shift * gram
        values, vectors = torch.linalg.eigh(0.5 * (core + core.mT))
    kept = values > _ROUNDING * values[-1].clamp_min(0.0)
    factor = sketch @ (vectors[:, kept] / values[kept].sqrt())
    U, singular, _ = torch.linalg.svd(factor, full_matrices=False)
    return U * singular, shift


def _split(diagonal: Tensor, B: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """E (M_w,) > 0 and B with I + G ≈ diag(E) + B Bᵀ, whose diagonal is that of I + G, (M_w,).

    For G ≥ 0 Nyström leaves E ≥ 1. For others it may take more than there is: rows of B are then
    shortened, so that the diagonal stays the one of the data, and S⁻¹ positive where that is.
    """
    taken = B.square().sum(-1)
    most = diagonal - torch.minimum(torch.full_like(diagonal, 1.0 - shift), 0.5 * diagonal)
    over = taken > most
    B = torch.where(over, (most / taken).sqrt(), 1.0)[:, None] * B
    rest = diagonal - torch.where(over, most, taken)
    is_rounding = (rest - 1.0 + shift).abs() <= _REMAINDER * diagonal
    return torch.where(is_rounding, 1.0 - shift, rest), B


def _best_factors(left: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """D (M_w,) and V (M_w, r) of largest −tr(P⁻¹Λ) − ln|P|, P = D + V Vᵀ, Λ = diag(left) + B Bᵀ.

        β = VᵀP⁻¹, C = Λβᵀ:   V ← C (I − βV + βC)⁻¹,   D ← diag(Λ − V Cᵀ)

    D stays above what no datum can take away, min(left, 1), so that S ≤ I for weights ≥ 0.
    """
    if B.shape[1] <= rank:
        return left, B
    V, whole, lowest = B[:, :rank], left + B.square().sum(-1), left.clamp_max(1.0)
    D = left + B[:, rank:].square().sum(-1)
    identity = torch.eye(rank, dtype=B.dtype, device=B.device)
    for _ in range(_REFINEMENTS):
        W = V / D[:, None]
        beta = torch.linalg.solve(identity + V.mT @ W, W.mT)  # (r, M_w)
        C = left[:, None] * beta.mT + B @ (B.mT @ beta.mT)
        V = torch.linalg.solve(identity - beta @ V + beta @ C, C.mT).mT
        D = torch.maximum(whole - (V * C).sum(-1), lowest)
    return D, V
