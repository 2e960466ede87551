"""The posterior of a positive field, from samples of its logarithm at the nodes."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior, Prediction
from dustmap.gp.features import chunks
from dustmap.gp.functionals import AbstractFunctional
from dustmap.inference.lognormal._lognormal import Interpolation

#: Functionals answered at once.
_CHUNK = 65_536


@final
@dataclass(frozen=True, eq=False)
class LogNormalPosterior(AbstractPosterior):
    """Samples ρ_s = exp(s_s) at the nodes, multilinear in between: nothing is ever negative.

    log_density (M,): logarithm of the density at the centre ξ̄ of q, the median of ρ where q is
    Gaussian; log_samples (S, M), pairs about the centre one after the other; interpolation: L of
    any functional. The relative Monte Carlo error of a standard deviation is `monte_carlo_error`.

    explained (M,), where it is known: the share of the prior's variance of ln ρ that the data have
    taken away, from the draws of the prior that the samples are made of. Where the data say nothing
    they take nothing of any draw, so that it is 0 however few there are.
    """

    interpolation: Interpolation
    log_density: Tensor
    log_samples: Tensor
    explained: Tensor | None = None

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
        """Relative standard deviation 1/√(2 (S/2)) of a standard deviation: S/2 antithetic pairs
        count as one draw each."""
        return 1.0 / math.sqrt(self.n_samples)

    def predict(self, functional: AbstractFunctional) -> Prediction:
        """Mean (N,) and variance (N,) of f = L ρ over the samples."""
        parts = [self._draws(part) for part in self._parts(functional)]
        means = torch.cat([draws.mean(0) for draws in parts])
        return Prediction(means, torch.cat([draws.var(0) for draws in parts]))

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Sample covariance (N, N), of rank S − 1 at most."""
        draws = self._all_draws(functional)
        centred = draws - draws.mean(0)
        return centred.mT @ centred / (self.n_samples - 1)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """The first `count` stored draws (count, N); `generator` is not needed."""
        if not 0 <= count <= self.n_samples:
            raise ValueError(
                f"count must be at most the {self.n_samples} samples that were drawn, got {count}: "
                "fit with more samples"
            )
        return self._all_draws(functional)[:count]

    def log_moments(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ln f (N,) over the samples; −∞ and 0 where f = 0.

        The samples come in pairs about a known centre, so the sum of squares is divided by S.
        """
        found = [_log_moments(self._draws(part)) for part in self._parts(functional)]
        return torch.cat([mean for mean, _ in found]), torch.cat([std for _, std in found])

    def percentiles(self, functional: AbstractFunctional, q: Tensor) -> Tensor:
        """Quantiles of f (Q, N) at probabilities q (Q,) in (0, 1); > 0 and ascending in q.

        exp(mean + Φ⁻¹(q) std) with the moments of ln f: exact at nodes for a Gaussian q(ln ρ), and
        smoother than order statistics of S samples.
        """
        if q.ndim != 1 or not bool(((q > 0) & (q < 1)).all()):
            raise ValueError(
                f"q must be a vector of probabilities in (0, 1), e.g. 0.16, 0.5, 0.84, got {q}"
            )
        mean, std = self.log_moments(functional)
        normal: Tensor = torch.special.ndtri(q.to(std))
        return (mean + normal[:, None] * std).exp()

    def median(self, functional: AbstractFunctional) -> Tensor:
        """exp(mean of ln f) (N,)."""
        return self.log_moments(functional)[0].exp()

    def at_nodes(self) -> Prediction:
        """Mean and variance of ρ at the nodes of the grid, (M,) each, without any rows."""
        density = self.log_samples.exp()
        return Prediction(density.mean(0), density.var(0))

    def node_log_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ln ρ at the nodes, (M,) each."""
        mean = self.log_samples.mean(0)
        return mean, self.log_samples.std(0, correction=0)

    def _draws(self, functional: AbstractFunctional) -> Tensor:
        rows = self.interpolation(functional)
        with torch.no_grad():
            return rows.matmul(self.log_samples.exp().to(rows.dtype))

    def _all_draws(self, functional: AbstractFunctional) -> Tensor:
        return torch.cat([self._draws(part) for part in self._parts(functional)], dim=-1)

    def _parts(self, functional: AbstractFunctional) -> list[AbstractFunctional]:
        return [functional[part] for part in chunks(len(functional), _CHUNK)]


def _log_moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    positive = (draws > 0).all(0)
    logs = torch.where(positive, draws, 1.0).log()
    mean = torch.where(positive, logs.mean(0), -torch.inf)
    return mean, torch.where(positive, logs.std(0, correction=0), 0.0)
