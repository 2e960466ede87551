"""Gauss-Newton steps of means that have samples, by the metric of all samples together.

The energy mean_s ½ ‖t − f(ξ + δ_s)‖²_{Σ⁻¹} + ½ ‖ξ − a‖² has the metric

    I + mean_s J_sᵀ Σ⁻¹ J_s = I + Ĵᵀ Ĵ,   Ĵ = (W^½ J_1; …; W^½ J_S) / √S

with the J_s one below the other. That of the mean response alone, I + (mean J_s)ᵀ Σ⁻¹ (mean J_s),
leaves out how the J_s differ, and where densities are uncertain by factors its steps are far too
long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.inference.lognormal._lognormal_energy import Iterate, Move
from dustmap.inference.lognormal._lognormal_problem import (
    ANSWERED,
    Preconditioner,
    node_information,
)
from dustmap.inference.lognormal._tangent import (
    GramPreconditioner,
    NodePreconditioner,
    SeenNodes,
    Tangent,
)


@final
@dataclass(frozen=True, eq=False)
class SampledTangent:
    """Ĵ_k of K means with S samples each; vectors of data are (K, S N).

    tangents: J_ks at the samples (K S_r places) that this rank has, by means; shape: (K, S);
    world: the ranks that divide the samples of every mean.
    """

    tangents: Tangent
    shape: tuple[int, int]
    world: linalg.AbstractWorld

    @staticmethod
    def of(iterates: Sequence[Iterate]) -> "SampledTangent":
        """At iterates of one problem that have equally many samples."""
        problem, count = iterates[0].problem, len(iterates[0].deviations)
        own = problem.own_samples(count)
        densities = torch.cat([at.densities for at in iterates])
        c = torch.cat([at.all_c[own] for at in iterates])
        seen = torch.cat([at.seen[own] for at in iterates])
        # Products are of many vectors, which ranks divide, and not of the rows of one.
        tangents = problem.apart().tangent(densities, c, seen)
        return SampledTangent(tangents, (len(iterates), count), problem.world)

    @property
    def size(self) -> int:
        """S N."""
        return self.shape[1] * len(self.tangents.root_weights)

    @property
    def root_weights(self) -> Tensor:
        """(W/S)^½ (N,)."""
        return self.tangents.root_weights / math.sqrt(self.shape[1])

    def response(self, field: Tensor, c: Tensor) -> Tensor:
        """Ĵ x (K, S N) for T x (K, M) and the last variables (K, V) of x."""
        each, tangents = self._own_count, self.tangents
        every, own_c = (v.repeat_interleave(each, dim=0) for v in (tangents.entered(field), c))
        own = self.root_weights * tangents.of_entered(every, own_c)
        whole = own.reshape(self.shape[0], each, own.shape[-1]).transpose(0, 1)
        return self.world.stacked(whole, self.shape[1]).transpose(0, 1).flatten(1)

    def pulled(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The pull (K, M) on the log-density, and that on the last variables (K, V), of Ĵᵀ z."""
        means, count = self.shape
        own = z.reshape(means, count, self.size // count)[:, self.world.share(count)].flatten(0, 1)
        pull, c = (
            self.world.total(part.reshape(means, self._own_count, part.shape[-1]).sum(1))
            for part in self.tangents.pulled_entered(self.root_weights * own)
        )
        return self.tangents.whole(pull), c

    def taken(self, which: Tensor) -> "SampledTangent":
        """Of the means `which` (W,), ascending."""
        if len(which) == self.shape[0]:
            return self
        own = torch.arange(self._own_count, device=which.device)
        places = (which[:, None] * self._own_count + own).flatten()
        return replace(
            self, tangents=self.tangents.taken(places), shape=(len(which), self.shape[1])
        )

    @property
    def _own_count(self) -> int:
        """S_r."""
        return self.world.shares(self.shape[1])[self.world.rank]


@final
@dataclass(frozen=True, eq=False)
class SampledGram(linalg.AbstractStack):
    """I + Ĵ_k Ĵ_kᵀ (S N, S N) of K means."""

    tangent: SampledTangent

    @property
    def shape(self) -> tuple[int, int]:
        return self.tangent.size, self.tangent.size

    def _made_of(self) -> Tensor:
        return self.tangent.tangents.root_weights

    def matmul(self, x: Tensor) -> Tensor:
        tangent = self.tangent
        pull, c = tangent.pulled(x)
        return x + tangent.response(tangent.tangents.covaried(pull), c)

    def taken(self, which: Tensor) -> "SampledGram":
        return SampledGram(self.tangent.taken(which))


@final
@dataclass(frozen=True, eq=False)
class SampledSteps:
    """Gauss-Newton steps of K means: their moves, the multipliers z (K, S N) of their systems, or
    those among nodes (K, R), and steps of CG (K,)."""

    moves: list[Move]
    multipliers: Tensor
    cg_steps: Tensor


@torch.no_grad()
def sampled_steps(
    iterates: Sequence[Iterate],
    wanted: Tensor,
    preconditioner: Preconditioner | None,
    max_steps: int,
    progress: linalg.Progress = linalg.unwatched,
    start: Tensor | None = None,
) -> SampledSteps:
    """Gauss-Newton steps Δξ of K iterates of one problem:

        (I + mean_s J_sᵀ Σ⁻¹ J_s) Δξ = mean_s J_sᵀ Σ⁻¹ r_s − ξ

    from the side of the data, or among the nodes that these see. wanted (K,): residual of CG, root
    mean square over samples and data in units of the noise. start: multipliers of the steps that
    have led here, which leave a few hundredths of the residual that those of the end of all steps,
    the whitened residuals, would leave.
    """
    tangent = SampledTangent.of(iterates)
    problem, n = iterates[0].problem, iterates[0].problem.root.n_field
    xi, field = torch.stack([at.xi for at in iterates]), torch.stack([at.field for at in iterates])
    residuals = torch.stack([at.residuals for at in iterates]) * tangent.root_weights
    system = _System(tangent, residuals.flatten(1), field, xi[:, n:], start)
    wanted = wanted.double() * math.sqrt(len(problem.y))
    if problem.nodes is None:
        assert preconditioner is None or isinstance(preconditioner, GramPreconditioner)
        near = None if preconditioner is None else preconditioner.of_sizes(_sizes(iterates))
        solved = system.from_data(wanted, near, max_steps, progress)
    else:
        assert preconditioner is None or isinstance(preconditioner, NodePreconditioner)
        solved = system.from_nodes(problem.nodes, wanted, preconditioner, max_steps, progress)
    led = tangent.tangents.latent(solved.pull, solved.c)
    moved = tangent.tangents.covaried(solved.pull) - field
    moves = [Move(*each) for each in zip(led - xi, moved, strict=True)]
    return SampledSteps(moves, solved.multipliers, solved.cg_steps)


@final
@dataclass(frozen=True, eq=False)
class _Solved:
    """Where K steps lead, by its pull (K, M) on the log-density and that on the last variables
    (K, V); and of the solves multipliers and steps of CG (K,)."""

    pull: Tensor
    c: Tensor
    multipliers: Tensor
    cg_steps: Tensor


@final
@dataclass(frozen=True, eq=False)
class _System:
    """The linear systems of K steps: residuals r̂ = (W/S)^½ r_s (K, S N), and ξ as its field T ξ
    (K, M) and its last variables c (K, V); the multipliers that solves start from, if any."""

    tangent: SampledTangent
    residuals: Tensor
    field: Tensor
    c: Tensor
    start: Tensor | None

    def from_data(
        self,
        wanted: Tensor,
        preconditioner: linalg.NystromStack | None,
        max_steps: int,
        progress: linalg.Progress,
    ) -> _Solved:
        """By Ĵᵀ z of (I + Ĵ Ĵᵀ) z = r̂ + Ĵ ξ, which ends at r̂."""
        target = self.residuals + self.tangent.response(self.field, self.c)
        size = target.norm(dim=1).double().clamp_min(1e-30)
        solve = linalg.pcg(
            SampledGram(self.tangent),
            target,
            preconditioner=preconditioner,
            x0=self.residuals if self.start is None else self.start,
            rtol=(wanted / size).clamp_max(0.5),
            max_steps=max_steps,
            progress=progress,
        )
        return _Solved(*self.tangent.pulled(solve.x), solve.x, solve.steps)

    def from_nodes(
        self,
        nodes: SeenNodes,
        wanted: Tensor,
        preconditioner: NodePreconditioner | None,
        max_steps: int,
        progress: linalg.Progress,
    ) -> _Solved:
        """By v of (I + B K) v = mean_s ρ_s Lᵀ W r_s + B T ξ, B = mean_s ρ_s G ρ_s, which ends at
        the first of both."""
        information = node_information(nodes, self.tangent.tangents, None, self.tangent.shape[1])
        if preconditioner is not None:
            near = preconditioner.under(information)
            information = replace(information, preconditioner=near)
        pulled = nodes.taken(self.tangent.pulled(self.residuals)[0])
        solve = linalg.covariance_cg(
            information,
            pulled + information.informed(nodes.taken(self.field)),
            x0=pulled if self.start is None else self.start,
            tolerance=ANSWERED * wanted,
            max_steps=max_steps,
            progress=progress,
        )
        return _Solved(nodes.spread(solve.x), self.c[:, :0], solve.x, solve.steps)


def _sizes(iterates: Sequence[Iterate]) -> Tensor:
    """(W/S)^½ g L ρ_s (K, S, N)."""
    problem, seen = iterates[0].problem, torch.stack([at.seen for at in iterates])
    groups = problem.groups
    if groups is not None and groups.has_scales:
        seen = seen * torch.stack([groups.gains(at.all_c) for at in iterates])
    return seen * (problem.noise * seen.shape[1]).rsqrt()
