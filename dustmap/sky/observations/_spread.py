"""The variance of an extinction that comes from not knowing the star's distance."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior
from dustmap.gp.functionals import LineIntegrals
from dustmap.inference import GriddedDraws, LogNormalPosterior, PathwisePosterior
from dustmap.linalg import Progress, unwatched

#: Segments whose integrals are drawn at once: of fields that are stored as draws, and of others,
#: whose joint draws may take a dense covariance.
_STORED, _DENSE = 2**17, 128
#: What is done, for whoever watches.
_SPREADS = "spread of distances, stars"


@final
@dataclass(frozen=True, eq=False)
class DistanceSpread:
    """Var_d A(<d) of N stars whose distances d are distributions, for a density ρ:

        V_n = 2 ∫ρ(s) A(<s) sf(s) ds − (∫ρ sf ds)²,    A(<s) = ∫₀^s ρ,   sf(s) = P(d > s).

    With a_k = ∫ρ over segment k of the ray and U_k the fraction of it before the star,
    A(<d) = Σ_k a_k U_k, and since U_k > 0 only where U_i = 1 for i < k,

        V_n = Σ_k a_k² Var U_k + 2 Σ_{i<k} a_i a_k E U_k (1 − E U_i).

    rays: N rays whose weights (N, J) are E U_k; variance (N, J): Var U_k. The density is 0 where
    the rays end.
    """

    rays: LineIntegrals
    variance: Tensor

    def __len__(self) -> int:
        return len(self.rays)

    def __getitem__(self, index: slice | Tensor) -> "DistanceSpread":
        return DistanceSpread(self.rays[index], self.variance[index])

    def of_segments(self, a: Tensor, behind: Tensor | None = None) -> Tensor:
        """V_n (..., N) of the integrals a (..., N, J) of ρ over the segments.

        behind (N,): E A of what the rays have behind their last edge, which only stars see that
        have all of a before them: Cov(A, A_behind) = E A_behind Σ_k a_k (1 − E U_k).
        """
        a = a.to(self.variance)
        unseen = a * (1.0 - self.rays.weights)
        before = unseen.cumsum(-1) - unseen
        own = a.square() * self.variance
        # Not negative for ρ ≥ 0; of a field that dips below 0, but for round-off.
        within = (own + 2.0 * a * self.rays.weights * before).sum(-1).clamp_min(0.0)
        if behind is None:
            return within
        return (within + 2.0 * behind.to(a) * unseen.sum(-1)).clamp_min(0.0)

    def uniform(self, density: float | Tensor, behind: Tensor | None = None) -> Tensor:
        """V_n (N,) of the same density all along a ray, ρ² Var d: a start. Float64."""
        each = torch.as_tensor(density, dtype=self.variance.dtype, device=self.rays.device)
        return self.of_segments(self.rays.edges.diff(dim=-1) * each[..., None], behind)

    @torch.no_grad()
    def added_variance(
        self,
        posterior: AbstractPosterior,
        samples: int = 8,
        seed: int = 0,
        behind: Tensor | None = None,
        progress: Progress = unwatched,
    ) -> Tensor:
        """V_n (N,), the mean over at most `samples` draws of the posterior density. Float64.

        A posterior that is stored as fewer draws gives those it has. behind (N,): E A of what the
        rays have behind their last edge. progress: of the rays.

        With the variance of the weighted ray it makes up the variance of the extinction:
        Var A = Var_ρ E_d A + E_ρ Var_d A.
        """
        generator = torch.Generator()
        stored = _stored_draws(posterior)
        count = samples if stored is None else min(samples, stored)
        parts = [torch.zeros(0, dtype=self.variance.dtype, device=self.rays.device)]
        for rows in self._chunks(_DENSE if stored is None else _STORED):
            # Draws know a segment by its key: neither chunks nor ranks change them.
            progress(_SPREADS, rows.start, len(self))
            chunk = self[rows]
            a = chunk._segment_draws(posterior, count, generator.manual_seed(seed))
            more = None if behind is None else behind[rows]
            parts.append(chunk.of_segments(a, more).mean(0))
        progress(_SPREADS, len(self), len(self))
        return torch.cat(parts)

    def _chunks(self, segments: int) -> Iterator[slice]:
        step = max(1, segments // self.variance.shape[1])
        for start in range(0, len(self), step):
            yield slice(start, start + step)

    def _segment_draws(
        self, posterior: AbstractPosterior, samples: int, generator: torch.Generator
    ) -> Tensor:
        """Joint draws of ∫ρ over every segment (samples, N, J); 0 for those of no length."""
        segments, filled = self._segments()
        drawn = posterior.sample(segments, samples, generator)
        a = drawn.new_zeros(samples, filled.numel())
        a[:, filled.flatten()] = drawn
        return a.view(samples, *filled.shape)

    def _segments(self) -> tuple[LineIntegrals, Tensor]:
        """The segments that have a length as rays of their own, and which they are (N, J)."""
        rays = self.rays
        filled = rays.edges.diff(dim=-1) > 0
        row, segment = filled.nonzero(as_tuple=True)
        edges = torch.stack([rays.edges[row, segment], rays.edges[row, segment + 1]], dim=-1)
        keys = rays.keys[row] * filled.shape[1] + segment
        ones = torch.ones_like(edges[:, :1])
        return LineIntegrals(rays.origin[row], rays.direction[row], edges, ones, keys), filled


def _stored_draws(posterior: AbstractPosterior) -> int | None:
    """How many draws of the field the posterior keeps; None where it makes them anew."""
    if isinstance(posterior, LogNormalPosterior | GriddedDraws):
        return posterior.n_samples
    if isinstance(posterior, PathwisePosterior):
        return len(posterior.deviations)
    return None
