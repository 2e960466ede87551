"""Regression with Student-t noise: normal data in the place of each datum, and then as ever.

See `dustmap.inference.evidence._student_t_noise`. Kernel, noise and sites are learned from a part
of the rows by dense algebra, in turns until neither kernel nor noise has more to gain; noise and
sites of all rows follow at the kernel that was found.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, ExactGP, FitStatus, fit_hyperparameters
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_JOURNAL,
    AbstractJournal,
    AbstractSolver,
    DataSpaceSolution,
    GlobalSolution,
    GridModel,
    Kept,
    RobustSettings,
    Sites,
    StudentTModel,
    StudentTNoise,
    fit_student_t,
    fitted_around,
    nats_left,
    noise_nats,
    student_t_moments,
)
from dustmap.regression import _global
from dustmap.regression._global import GlobalPlan
from dustmap.regression._learning import TOLERANCE, Prior, learn, random_part
from dustmap.regression._scaling import Array

#: Rows that kernel and noise are learned from by dense algebra, at most.
LEARNING_ROWS = 1_000
#: Targets that stand out by so many robust standard deviations have no part in the start.
_GROSS = 10.0
#: Turns of kernel and noise, rounds of sites in each, the length of a round's step, the change of
#: the sites below which they rest, and draws of a round of the global engine.
_TURNS, _ROUNDS, _STEP, _REST, _SAMPLES = 10, 25, 0.7, 0.01, 16
#: Nats that may remain to be gained.
_NATS_LEFT = 0.25
_START_NU = 4.0
#: Least width of the noise over the prior standard deviation: the density of a t that narrows about
#: data which a field can pass through has no upper bound.
_LEAST_WIDTH = 1e-4


@final
@dataclass(frozen=True, eq=False)
class SiteFit:
    """noise: ν, with the widths in the likelihood; data: the normal ones in the place of all rows,
    with their whole noise; report: plain values."""

    noise: StudentTNoise
    data: Batch
    report: dict[str, Any]


def plain_rows(y: Array) -> Array:
    """Which targets (N,) do not stand out grossly from the median."""
    off = np.abs(y - np.median(y))
    width = 1.4826 * float(np.median(off))
    return np.asarray(off <= _GROSS * width if width > 0 else np.ones(len(y), bool))


def ordinary_part(batch: Batch, n: int, seed: int) -> Batch:
    """At most n of the rows that do not stand out, picked at random."""
    rows = torch.from_numpy(plain_rows(batch.y.numpy())).nonzero().squeeze(-1)
    return random_part(batch[rows], n, seed)


def learn_robustly(
    prior: Prior, batch: Batch, max_steps: int, seed: int
) -> tuple[StudentTNoise, dict[str, Any]]:
    """Kernel, widths and ν from a part of the rows, in place, in turns until both rest.

    They start from what rows that do not stand out tell under normal noise.
    """
    learn(prior, ordinary_part(batch, LEARNING_ROWS, seed), max_steps)
    batch = random_part(batch, LEARNING_ROWS, seed)
    noise, sites, nats = StudentTNoise(_START_NU), _first(prior, batch), [float("inf")]
    before = _law(prior, noise).logs()
    for _ in range(_TURNS):
        noise, sites, rested = _dense_rounds(prior, batch, noise, sites)
        after = _law(prior, noise).logs()
        moved, before = noise_nats(before, after, len(batch)), after
        if not prior.kernel.is_learned:
            return noise, {"status": "converged" if rested else "max_steps", "n_data": len(batch)}
        normal, data = (
            replace(prior.model, likelihood=GaussianLikelihood()),
            site_batch(batch, sites),
        )
        found = fit_hyperparameters(normal, data, max_steps=max_steps, tolerance=TOLERANCE)
        prior.kernel, prior.mean = found.model.kernel, found.model.mean
        gain = len(batch) * (found.objective[-1] - found.objective[0])
        nats.append(max(gain, 0.0) + moved)
        if rested and nats_left(nats[1:]) <= _NATS_LEFT:
            break
    settled = rested and nats_left(nats[1:]) <= _NATS_LEFT
    return noise, {
        "status": (found.status if settled else FitStatus.MAX_STEPS).value,
        "n_data": len(batch),
        "turns_nats": nats[1:],
        "largest_gradient": found.largest_gradient,
    }


def fit_dense(prior: Prior, batch: Batch, noise: StudentTNoise) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by dense algebra."""
    noise, sites, rested = _dense_rounds(prior, batch, noise, _first(prior, batch))
    return _site_fit(batch, noise, sites, rested)


def fit_on_grid(prior: Prior, batch: Batch, noise: StudentTNoise, plan: GlobalPlan) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by solves on the grid."""
    settings = RobustSettings(
        max_rounds=_ROUNDS,
        samples=_SAMPLES,
        nu=noise.nu,
        learn_nu=prior.likelihood.is_learned,
        learn_scale=False,
    )
    model = _global.build_global(prior, plan)
    fit = fit_student_t(model, batch, settings, lambda data: _Solver(prior, data, plan))
    prior.mean, prior.likelihood = fit.model.mean, fit.model.likelihood
    return _site_fit(batch, fit.noise, fit.sites, fit.converged)


def site_batch(batch: Batch, sites: Sites) -> Batch:
    """The rows with targets and noise of their sites."""
    return Batch(batch.functional, sites.target, sites.precision.reciprocal())


def _site_fit(batch: Batch, noise: StudentTNoise, sites: Sites, rested: bool) -> SiteFit:
    report = {"dof": noise.nu, "converged": rested}
    return SiteFit(noise, site_batch(batch, sites), report)


def _law(prior: Prior, noise: StudentTNoise) -> StudentTModel:
    """The likelihood has the width, so that there is no other scale."""
    return StudentTModel.of(noise, prior.likelihood, prior.likelihood.is_learned, False)


@torch.no_grad()
def _first(prior: Prior, batch: Batch) -> Sites:
    residual = batch.y - prior.mean.values(batch.functional)
    residual = residual - residual.median()
    return Sites.first(batch.y, residual, prior.likelihood.noise_variance(batch), _START_NU)


@torch.no_grad()
def _dense_rounds(
    prior: Prior, batch: Batch, noise: StudentTNoise, sites: Sites
) -> tuple[StudentTNoise, Sites, bool]:
    """Rounds of posterior, noise and sites at a fixed kernel; whether they came to rest."""
    nats, whole = [float("inf")], None
    covariance = ExactGP(prior.kernel, prior.mean).covariance(batch.functional)
    for k in range(_ROUNDS):
        mean, variance = _posterior(prior, batch, covariance, sites)
        before = _law(prior, noise)
        after = _widened(prior, batch, fitted_around(before, batch, mean, variance, None))
        noise, prior.likelihood = after.noise, after.likelihood
        nats.append(noise_nats(before.logs(), after.logs(), len(batch)))
        width2 = noise.scale**2 * prior.likelihood.noise_variance(batch).double()
        whole = student_t_moments(batch.y, mean, variance, width2, noise.nu)
        change = sites.change(whole, mean, width2)
        sites = sites.updated(whole, mean, width2, 1.0 if k == 0 else _STEP)
        if change <= _REST and nats_left(nats[1:]) <= _NATS_LEFT:
            return noise, sites, True
    return noise, sites, False


def _widened(prior: Prior, batch: Batch, law: StudentTModel) -> StudentTModel:
    """With widths no smaller than `_LEAST_WIDTH`."""
    least = _LEAST_WIDTH * float(prior.kernel.variance().sqrt())
    typical = float(law.likelihood.noise_variance(batch).median().sqrt())
    if typical >= least:
        return law
    wider = [
        p.at(p.value + math.log(least / typical)) if p.is_learned else p
        for p in law.likelihood.parameters()
    ]
    return replace(law, likelihood=law.likelihood.with_parameters(wider))


def _posterior(prior: Prior, batch: Batch, K: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
    """Mean and variance (N,) of f given the sites, with the mean's coefficients fitted."""
    noise = sites.precision.reciprocal()
    if prior.mean.is_learned:
        gp = ExactGP(prior.kernel, prior.mean)
        beta = gp.fitted_coefficients(batch.functional, sites.target, noise)
        prior.mean = prior.mean.with_coefficients(beta)
    prior_mean = prior.mean.values(batch.functional)
    L = torch.linalg.cholesky(K + torch.diag(noise))
    white = torch.linalg.solve_triangular(
        L, torch.cat([K, (sites.target - prior_mean)[:, None]], 1), upper=False
    )
    half = white[:, :-1]
    variance = (K.diagonal() - half.square().sum(0)).clamp_min(0.0)
    return prior_mean + half.mT @ white[:, -1], variance


@final
@dataclass(frozen=True, eq=False)
class _Solver(AbstractSolver[GlobalSolution | DataSpaceSolution]):
    """The global engine of normal data, in whichever space it chooses."""

    prior: Prior
    data: Batch
    plan: GlobalPlan

    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: GlobalSolution | DataSpaceSolution | None,
        journal: AbstractJournal = NO_JOURNAL,
    ) -> GlobalSolution | DataSpaceSolution:
        plan = replace(self.plan, samples=samples)
        residual = model.features.residual_variance(self.data.functional).double()
        data = Batch(self.data.functional, self.data.y, (sigma - residual).to(self.data.y))
        prior = Prior(self.prior.kernel, self.prior.mean, GaussianLikelihood())
        return _global.fit_whole(prior, data, plan).solution

    def kept(self, solution: GlobalSolution | DataSpaceSolution) -> Kept:
        return Kept({}, {})

    def restored(self, model: GridModel, kept: Kept) -> GlobalSolution | DataSpaceSolution:
        raise ValueError("a regression keeps no journal to go on from: fit it again")
