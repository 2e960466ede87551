"""Positive fields: ρ = exp(μ + R ε) at the nodes of a grid, multilinear between them.

Their posterior comes from samples of its logarithm at the nodes.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap import gp
from dustmap.errors import UserError
from dustmap.gp import log_normal_variance, variance_of_pairs
from dustmap.gp.features import chunks
from dustmap.gp.features._grouped import GroupSamples
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    PointValues,
    groups_of,
    without_groups,
)
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference.lognormal._unresolved import Unresolved
from dustmap.linalg import AbstractComposite, AbstractOperator

#: Gives L (N, M), the multilinear rows of N functionals on the nodes of the model's grid.
Interpolation: TypeAlias = Callable[[AbstractFunctional], AbstractOperator]
#: Functionals answered at once.
_CHUNK = 65_536
#: Errors below 0 of a sum of data down to which these are of no field, and not of the wrong sign.
_NO_FIELD = 5.0


@final
@dataclass(frozen=True, eq=False)
class LogNormalModel(gp.AbstractParametric):
    """y = L ρ + noise with ρ = exp(H β + R ε) at the grid's nodes, ε ~ N(0, I).

    Between nodes ρ is its multilinear interpolant: weights ≥ 0 that sum to one, the same for
    integrals, queries and exports, so nothing is ever negative and a constant log-density gives
    ρ · d exactly. What the interpolant leaves out of the field between the nodes is not part of
    the noise, but of what is predicted (`Unresolved`). Nodes hold values of the log-density, or,
    where the prior's kernel is a `ProjectedKernel`, coefficients of its projection.

    A mean that is learned has the prior β ~ N(β₀, B²) around its present value, with
    B = `mean.prior_stds` at the nodes, and its uncertainty is in every result.

    Attributes
    ----------
    prior, mean : of the log-density; H β at the nodes
    likelihood : the noise
    interpolation : L of any functional, on `prior.lattice`
    mean_std : size of the effects on ln ρ that B lets a learned mean have
    zero_points : prior of those of groups of data, and of their scales,
        y = (1 + s_g) L ρ + b_g + noise; None for none
    """

    parts = ("prior", "mean", "likelihood")

    prior: gp.AbstractLatticePrior
    mean: gp.AbstractMean
    likelihood: GaussianLikelihood
    interpolation: Interpolation
    mean_std: float = 2.0
    zero_points: gp.ZeroPoints | None = None

    def __post_init__(self) -> None:
        if not self.mean_std > 0:
            raise UserError(
                f"mean_std must be positive, got {self.mean_std}; to fix the mean, build it with "
                "learn=False"
            )

    def learned(self) -> "gp.Parameters[LogNormalModel]":
        """Parameters learned of kernel and noise, kernel first; the mean is part of the field."""
        return gp.Parameters.of(self, without=("mean",))

    @torch.no_grad()
    def log_mean(self) -> Tensor:
        """H β at the nodes (M,), in the prior's dtype."""
        return self.mean.values(self._nodes()).to(self.prior.dtype)

    @torch.no_grad()
    def latent_root(self) -> "LatentRoot":
        """T = (R, H B, 0), from ξ = (ε, b, c, c') to the log-density at the nodes."""
        scales = self.scales()
        columns = self.mean.basis(self._nodes())[:, : len(scales)] * scales
        groups = 0 if self.zero_points is None else self.zero_points.n_variables
        return LatentRoot(self.prior.root(), columns.to(self.prior.dtype), groups)

    @torch.no_grad()
    def scales(self) -> Tensor:
        """B (P,), P = 0 where the mean is not learned; float64."""
        basis = self.mean.basis(self._nodes())
        if not self.mean.is_learned:
            return basis.new_zeros(0)
        return self.mean.prior_stds(basis, self.mean_std)

    @torch.no_grad()
    def coefficients(self, xi: Tensor) -> Tensor:
        """β = β₀ + B b (P,) of the mean at ξ = (ε, b, c, c') (n,); float64."""
        start, scales = self.mean.coefficients().detach().double(), self.scales()
        if len(scales) == 0:
            return start
        first = self.prior.root().shape[1]
        return start + scales * xi[first : first + len(scales)].to(scales)

    def _nodes(self) -> PointValues:
        return PointValues(self.prior.lattice.points(device=self.prior.device))


@final
@dataclass(frozen=True, eq=False)
class LatentRoot(AbstractComposite):
    """T = (R, H B, 0) (M, M_w + P + G): the log-density is its mean plus T ξ with
    ξ = (ε, b, c, c') ~ N(0, I).

    root R (M, M_w); columns H B (M, P), P = 0 for a fixed mean; groups G: numbers (c, c') behind
    zero points and scales of the data, which the density does not see.
    """

    root: AbstractOperator
    columns: Tensor
    groups: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.root.shape[0], self.n_field + self.groups

    @property
    def n_white(self) -> int:
        """M_w, where ε ends and b begins."""
        return self.root.shape[1]

    @property
    def n_field(self) -> int:
        """M_w + P, where b ends and c begins."""
        return self.n_white + self.columns.shape[1]

    def matmul(self, x: Tensor) -> Tensor:
        white = self.root.matmul(x[..., : self.n_white])
        if self.columns.shape[1] == 0:
            return white
        return white + x[..., self.n_white : self.n_field] @ self.columns.mT

    def rmatmul(self, y: Tensor) -> Tensor:
        none = y.new_zeros((*y.shape[:-1], self.groups))
        return torch.cat([self.root.rmatmul(y), y @ self.columns, none], dim=-1)


@torch.no_grad()
def typical_log_density(
    data: gp.Batch, variance: float = 0.0, profile: gp.AbstractMean | None = None
) -> float:
    """ln(Σ y / Σ L p) − variance/2: ln of the factor of p with which it explains the data's sum.

    Both sums weigh a datum by 1 / (σ_n² + median σ²), lest those of much noise rule them. A sum of
    y that is below its error, down to 5 of them below 0, counts as that: there is no field.

    variance: of the log-density around it, whose exponential has the mean exp(variance/2).
    profile p: of the density; 1 everywhere where it is left out.

    Examples
    --------
    >>> from dustmap.gp.functionals import LineIntegrals
    >>> rays = LineIntegrals.from_observer(torch.tensor([[100.0, 0.0, 0.0], [0.0, 50.0, 0.0]]))
    >>> y = torch.tensor([0.2, 0.1], dtype=torch.float64)
    >>> density = typical_log_density(gp.Batch(rays, y, torch.full_like(y, 1e-4)))
    >>> round(math.exp(density), 6)  # mag/pc
    0.002
    """
    profile = profile or gp.ConstantMean(1.0).to(data.y.device)
    weight, error = torch.ones_like(data.y, dtype=torch.float64), 0.0
    if data.noise_variance is not None:
        noise = data.noise_variance.double()
        weight = noise.median() / (noise + noise.median())
        error = float((weight.square() * noise).sum().sqrt())
    mass = float((weight * profile.values(data.functional)).sum())
    total = float((weight * data.y.double()).sum())
    total = max(total, error) if total > -_NO_FIELD * error else total
    if not (total > 0 and mass > 0):
        raise UserError(
            f"a positive field needs data with a positive sum, got {total:.3g} (the least y "
            f"is {float(data.y.min()):.4g}) over lengths of {mass:.3g} (weighted by 1/σ²): check "
            "signs and units, leave missing values such as -99 out, or use the Gaussian model"
        )
    return math.log(total / mass) - 0.5 * variance


@final
@dataclass(frozen=True, eq=False)
class LogNormalPosterior(gp.AbstractPosterior):
    """Samples ρ_s = exp(s_s) at the nodes, multilinear in between: nothing is ever negative.

    The relative Monte Carlo error of a standard deviation is `monte_carlo_error`.

    Attributes
    ----------
    interpolation
        L of any functional.
    log_density
        Logarithm (M,) of the density at the centre ξ̄ of q, the median of ρ where q is Gaussian.
    log_samples
        s_s (S, M), pairs about the centre one after the other.
    explained
        Where it is known, the share (M,) of the prior's variance of ln ρ that the data have taken
        away, from the draws of the prior that the samples are made of. Where the data say nothing
        they take nothing of any draw, so that it is 0 however few there are.
    groups
        Samples of zero points, which measurements of a group have on top of L ρ, and of scales.
    unresolved
        What the grid leaves out, which variances of integrals and values then have; draws have the
        nodes alone. None for a field that is its interpolant.
    log_variance
        τ² (M,) of ln ρ at the nodes, where it is known better than from the samples.
    """

    interpolation: Interpolation
    log_density: Tensor
    log_samples: Tensor
    explained: Tensor | None = None
    groups: GroupSamples | None = None
    unresolved: Unresolved | None = None
    log_variance: Tensor | None = None

    @property
    def n_samples(self) -> int:
        """S."""
        return len(self.log_samples)

    @property
    def independent(self) -> int:
        """Draws that count: pairs."""
        return (self.n_samples + 1) // 2

    @property
    def monte_carlo_error(self) -> float:
        """Relative error of a standard deviation, 1/√(2 (S/2)): antithetic pairs are one draw."""
        return 1.0 / math.sqrt(self.n_samples)

    def predict(self, functional: AbstractFunctional) -> gp.Prediction:
        """Mean (N,) and variance (N,) of f = L ρ over the samples, with what is unresolved.

        Values at places have the variance of their `log_normal_variance`.
        """
        moments = []
        for part in self._parts(functional):
            draws, lacking = self._draws_and_lacking(part)
            moments.append((draws.mean(0), self._spread(part, draws) + lacking))
        means, variances = (torch.cat(each) for each in zip(*moments, strict=True))
        unknown = self._unknown(functional, means.square() + variances)
        return gp.Prediction(means, variances + unknown)

    @torch.no_grad()
    def _draws_and_lacking(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        """Draws (S, N) of (1 + s) L ρ + b, and the variance (N,) that they lack: E[(1 + s)²] times
        that of L ρ alone, since zero points say nothing of what lies between the nodes."""
        field = self._field_draws(functional)
        draws, lacking = field, torch.zeros_like(field[0])
        if self.unresolved is not None:
            lacking = self.unresolved.variance(functional, variance_of_pairs(field), self._squares)
        if self.groups is not None:
            draws = self.groups.measured(functional, field)
            lacking = lacking * self.groups.mean_square_gain(functional, field)
        return draws, lacking

    def lacking(self, rays: LineIntegrals) -> Tensor:
        """∫ Λ w² E[ρ²] dt (N,): the variance that a grid leaves out of integrals along rays, before
        the data; 0 where it leaves out nothing."""
        if self.unresolved is None:
            return self.log_density.new_zeros(len(rays))
        parts = (replace(rays[part], groups=None) for part in chunks(len(rays), _CHUNK))
        return torch.cat([self.unresolved.whole(part, self._squares) for part in parts])

    def unknown_share(self, rays: LineIntegrals, nodes: Tensor | None = None) -> Tensor:
        """√(S/V) (N,), at most 1: how much of what the grid leaves out of integrals along rays is
        unknown; 1 where it leaves out nothing. nodes (M,): such shares at the nodes, in place of
        which L E[ρ²] nodes / L E[ρ²] is then their mean along the rays."""
        assert self.unresolved is not None
        shares = []
        for part in chunks(len(rays), _CHUNK):
            some = without_groups(rays[part])
            rows = self.interpolation(some)
            weight = self.unresolved.length if nodes is None else nodes
            both = torch.stack([self._mean_square, self._weighted(weight)])
            squares, weighted = rows.matmul(both.to(rows.dtype))
            if nodes is not None:
                share = weighted / squares
            else:
                share = (variance_of_pairs(self._field_draws(some)) / weighted).sqrt()
            shares.append(torch.where(squares > 0.0, share, 1.0).clamp_max(1.0))
        return torch.cat(shares)

    @functools.cached_property
    def sampled_log_variance(self) -> Tensor:
        """Variance (M,) of the samples of ln ρ at the nodes."""
        return self.log_samples.var(0, correction=0)

    @property
    def node_log_variance(self) -> Tensor:
        """Variance (M,) of ln ρ at the nodes."""
        return self.sampled_log_variance if self.log_variance is None else self.log_variance

    def _log_moments_at(
        self, functional: AbstractFunctional, draws: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (N,) of ln of draws (S, N), at places with the variance that
        the nodes around have over that of their samples."""
        mean, std = _log_moments(draws)
        if self.log_variance is None or not isinstance(functional, PointValues):
            return mean, std
        rows = self.interpolation(functional)
        both = torch.stack([self.log_variance, self.sampled_log_variance]).to(rows.dtype)
        known, sampled = rows.matmul(both)
        return mean, torch.where(sampled > 0.0, std * (known / sampled).sqrt(), std)

    def _spread(self, functional: AbstractFunctional, draws: Tensor) -> Tensor:
        """The variance (N,) of draws (S, N) of integrals, or of values at places."""
        if isinstance(functional, PointValues):
            return log_normal_variance(draws.mean(0), self._log_moments_at(functional, draws)[1])
        return variance_of_pairs(draws)

    def _squares(self, functional: AbstractFunctional, weight: Tensor | None) -> Tensor:
        """L E[ρ²] (N,), or L (v E[ρ²]) with v (M,) at the nodes."""
        rows = self.interpolation(functional)
        return rows.matmul(self._weighted(1.0 if weight is None else weight).to(rows.dtype))

    def _weighted(self, weight: float | Tensor) -> Tensor:
        """v E[ρ²] (M,) with v, or v (M,), at the nodes."""
        if isinstance(weight, Tensor):
            weight = weight.to(self._mean_square)
        return weight * self._mean_square

    @functools.cached_property
    def _mean_square(self) -> Tensor:
        """E[ρ²] at the nodes (M,)."""
        return (2.0 * self.log_samples).exp().mean(0)

    def zero_points(self) -> gp.Prediction | None:
        """Mean and variance (G,) of b, the zero points of groups; None where there are none."""
        return None if self.groups is None else self.groups.zero_points()

    def scales(self) -> gp.Prediction | None:
        """Mean and variance (G,) of s, the scales 1 + s of groups less one; None without."""
        return None if self.groups is None else self.groups.scales()

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Covariance (N, N) of samples, scaled to `predict`, and on its diagonal what they lack."""
        parts = [self._draws_and_lacking(part) for part in self._parts(functional)]
        draws, unresolved = (torch.cat(each, dim=-1) for each in zip(*parts, strict=True))
        ratio = self._spread(functional, draws) / draws.var(0, correction=0)
        centred = (draws - draws.mean(0)) * ratio.nan_to_num(nan=1.0).sqrt()
        covariance = centred.mT @ centred / self.n_samples + unresolved.diag()
        square = draws.mean(0).square() + covariance.diagonal()
        return covariance + self._unknown(functional, square).diag()

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """Return the first `count` stored draws (count, N); `generator` is not needed."""
        if not 0 <= count <= self.n_samples:
            raise UserError(
                f"count must be at most the {self.n_samples} samples that were drawn, got {count}: "
                "fit with more samples"
            )
        few = replace(self, log_samples=self.log_samples[:count], groups=self._first_groups(count))
        return torch.cat([few._draws(part) for part in few._parts(functional)], dim=-1)

    def log_moments(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ln f (N,) over the samples; −∞ and 0 where f = 0.

        The samples come in pairs about a known centre, so the sum of squares is divided by S.
        """
        moments = []
        for part in self._parts(functional):
            draws, lacking = self._draws_and_lacking(part)
            mean, std = self._log_moments_at(part, draws)
            more = (lacking / draws.mean(0).square()).log1p()
            moments.append((mean, torch.where(std > 0, std.square() + more, 0.0).sqrt()))
        return torch.cat([mean for mean, _ in moments]), torch.cat([std for _, std in moments])

    def percentiles(self, functional: AbstractFunctional, q: Tensor) -> Tensor:
        """Quantiles of f (Q, N) at probabilities q (Q,) in (0, 1), ascending in q.

        exp(mean + Φ⁻¹(q) std) with the moments of ln f, exact at nodes for a Gaussian q(ln ρ); of
        measurements in groups, which may be below 0, mean + Φ⁻¹(q) std.
        """
        if q.ndim != 1 or not bool(((q > 0) & (q < 1)).all()):
            raise UserError(
                f"q must be a vector of probabilities in (0, 1), e.g. 0.16, 0.5, 0.84, got {q}"
            )
        normal: Tensor = torch.special.ndtri(q.double())[:, None]
        if self.groups is not None and groups_of(functional) is not None:
            f = self.predict(functional)
            return f.mean + normal.to(f.mean) * f.std
        mean, std = self.log_moments(functional)
        return (mean + normal.to(std) * std).exp()

    def at_nodes(self) -> gp.Prediction:
        """Mean and variance of ρ at the nodes of the grid, (M,) each, without any rows."""
        mean = self.log_samples.exp().mean(0)
        return gp.Prediction(mean, log_normal_variance(mean, self.node_log_variance.sqrt()))

    def node_log_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ln ρ at the nodes, (M,) each."""
        return self.log_samples.mean(0), self.node_log_variance.sqrt()

    def _unknown(self, functional: AbstractFunctional, square: Tensor) -> Tensor:
        """Variance (N,) of zero points and scales of groups that no data know; square: E f²."""
        groups = self.groups
        more = None if groups is None else groups.prior.unknown_variance(functional, square)
        return torch.zeros_like(square) if more is None else more.to(square)

    def _first_groups(self, count: int) -> GroupSamples | None:
        """Zero points and scales of the first draws."""
        if self.groups is None:
            return None
        return replace(self.groups, white=self.groups.white[:count])

    @torch.no_grad()
    def _field_draws(self, functional: AbstractFunctional) -> Tensor:
        """Draws (S, N) of L ρ."""
        rows = self.interpolation(functional)
        return rows.matmul(self.log_samples.exp().to(rows.dtype))

    def _draws(self, functional: AbstractFunctional) -> Tensor:
        """Draws (S, N) of (1 + s) L ρ + b."""
        draws = self._field_draws(functional)
        return draws if self.groups is None else self.groups.measured(functional, draws)

    def _parts(self, functional: AbstractFunctional) -> Iterator[AbstractFunctional]:
        return (functional[part] for part in chunks(len(functional), _CHUNK))


def _log_moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    positive = (draws > 0).all(0)
    logs = torch.where(positive, draws, 1.0).log()
    mean = torch.where(positive, logs.mean(0), -torch.inf)
    return mean, torch.where(positive, logs.std(0, correction=0), 0.0)
