"""Variational inference for a positive field: mode, hyperparameters, metric samples, mean."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch, GridPrior
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_posterior import LogNormalPosterior
from dustmap.inference.lognormal._lognormal_state import Iterate, LogNormalProblem, Tether
from dustmap.inference.lognormal._mgvi_draws import Perturbations, curved_draw, metric_draws
from dustmap.inference.lognormal._mgvi_hyper import HyperPrior, carry, evidence_step, read, write
from dustmap.inference.lognormal._mgvi_newton import Accuracy, Descent, descend
from dustmap.inference.lognormal._mgvi_report import (
    MGVIRound,
    MGVISettings,
    MGVISolution,
    MGVIStatus,
)
from dustmap.linalg import NystromPreconditioner, SolveResult, fast_length, nystrom

_log = logging.getLogger(__name__)

#: Gauss-Newton steps between two looks at the preconditioner.
_STRIDE = 3
#: Samples whose mean response misses the data this many times more than the mode have strayed.
_STRAY = 1.75
#: CG steps below which a preconditioner need not be renewed.
_QUICK = 30
#: Prior correlation of opposite faces beyond which the torus is enlarged.
_LARGEST_WRAP = 0.15
#: A torus with this many times the points that the present length scale asks for is replaced.
_WASTE = 1.5
#: Bounds |Δθ| of one evidence step.
_LARGEST_STEP = 0.5
#: Gain in nats of an evidence step below which θ is as good as it need be.
_NEGLIGIBLE = 0.3
#: A mean response that still moves by more than this, in units of the noise, has not converged;
#: fresh deviations of few samples alone move it by half of that.
_RESTLESS = 1.0
#: A mode that misses the data by more than this, in units of the noise, is no start for samples.
_LARGEST_MISFIT = 3.0


Progress = Callable[[MGVIRound], None]


def fit_mgvi(
    model: LogNormalModel,
    data: Batch,
    settings: MGVISettings | None = None,
    progress: Progress | None = None,
    *,
    origin: Tensor | None = None,
) -> MGVISolution:
    """Posterior of a log-normal field, hyperparameters of kernel and noise learned in place.

    1. The mode of ξ by Gauss-Newton, every linear system solved from the side of the data.
    2. Newton steps on the evidence of the model linearised there, each followed by the mode of the
       new hyperparameters.
    3. Metric Gaussian variational inference: S/2 pairs ±δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) at ξ̄, then
       ξ̄ lowers the sampled energy mean_s ½ ‖y − L ρ(ξ̄ ± δ_s)‖²_{Σ⁻¹} + ½ ‖ξ̄‖²; repeated with the
       same random numbers. With `curved` each sample follows the curvature of ρ instead.

    origin (Q,): centre of the priors of the log-parameters, in the order of
    `LogNormalModel.log_parameters`; None: where they start.

    Σ is the noise alone. What the multilinear interpolant leaves out between nodes is in neither.

    Reference: Knollmüller & Enßlin (2019), "Metric Gaussian variational inference"; Frank, Leike
    & Enßlin (2021), "Geometric variational inference".
    """
    if len(data) == 0:
        raise ValueError("data is empty: fit_mgvi needs at least one datum")
    fit = _Fit(LogNormalProblem.of(model, data), settings or MGVISettings(), progress, origin)
    fit.find_mode()
    fit.learn()
    fit.sample()
    return fit.solution()


@final
class _Fit:
    """The fit while it runs: the centre, its multipliers z (N,), and what they need."""

    def __init__(
        self,
        problem: LogNormalProblem,
        settings: MGVISettings,
        progress: Progress | None,
        origin: Tensor | None,
    ) -> None:
        self.settings, self.progress = settings, progress
        self.history: list[MGVIRound] = []
        self.centre = _start(problem, torch.zeros(problem.n_latent).to(problem.y))
        self.z = torch.zeros_like(problem.y)
        self.preconditioner: NystromPreconditioner | None = None
        self.hyper_prior = HyperPrior.around(problem.model, origin, settings.prior_std)
        self.deviations: Tensor | None = None
        self.evidence_draws: Tensor | None = None
        self.sample_draws: Tensor | None = None
        self.curve_draws: Tensor | None = None
        self.last_step: Tensor | None = None
        self.largest_step = _LARGEST_STEP
        self.slowest = _QUICK
        self.moved, self.unsolved, self.strayed = False, False, False
        self.curved = bool(settings.curved)

    @property
    def problem(self) -> LogNormalProblem:
        """At the present hyperparameters."""
        return self.centre.problem

    def find_mode(self) -> None:
        """From ξ = 0 to where Gauss-Newton gains little, the preconditioner kept up to date."""
        accuracy = replace(self._accuracy(), decrease=0.01 * len(self.z))
        for _ in range(10):
            before = self.centre
            self._precondition()
            found = self._descend(replace(accuracy, steps=_STRIDE), "mode")
            gained = before.energy - found.iterate.energy
            if found.decrease < accuracy.decrease and gained < 0.05 * before.energy:
                return

    def learn(self) -> None:
        """Evidence steps until θ rests."""
        if len(self.hyper_prior.origin) == 0:
            self._descend(self._accuracy(), "mode")
            return
        for _ in range(self.settings.rounds):
            self._precondition()
            self._descend(self._accuracy(), "mode", quiet=True)
            if self._evidence_round():
                self._descend(self._accuracy(), "mode")
                return
        self.moved = True

    def _evidence_round(self) -> bool:
        """One step in θ; whether θ rests: a small step, or one that promises next to nothing."""
        before, settings = self.centre, self.settings
        perturbations = Perturbations.of(self.problem, settings.seed, range(settings.draws))
        _, draws = metric_draws(
            before,
            perturbations,
            settings.residual,
            settings.cg_steps,
            self.preconditioner,
            self.evidence_draws,
        )
        self.evidence_draws = draws.x
        self.slowest = max(self.slowest, int(draws.steps.max()))
        step = evidence_step(
            before,
            self.z,
            draws.x,
            self.hyper_prior,
            self._accuracy(),
            self.preconditioner,
            self.largest_step,
        )
        self._damp(step.delta)
        self._move(step.delta)
        self._record(
            "evidence",
            before,
            int(draws.steps.max()),
            gradient=tuple(step.gradient.tolist()),
            gradient_error=tuple(step.error.tolist()),
        )
        promised = 0.5 * float(step.gradient @ step.delta)
        return float(step.delta.abs().max()) < settings.tolerance or promised < _NEGLIGIBLE

    def _move(self, delta: Tensor) -> None:
        """θ + t Δθ with the centre carried along, t halved until the data stay in reach."""
        before, theta = self.centre, read(self.problem)
        for length in (1.0, 0.5, 0.25, 0.125):
            write(before.problem, theta + length * delta)
            changed = self._on_its_torus(before.problem.rebuilt().with_present_noise())
            self.centre, self.z = carry(
                before, changed, self.z, self._accuracy(), self.preconditioner
            )
            if self.centre.misfit() < 2.0 * max(before.misfit(), 1.0):
                return

    def _damp(self, delta: Tensor) -> None:
        """Halve the reach of steps that turn back: the linearisation moves with θ."""
        if self.last_step is not None and float(delta @ self.last_step) < 0:
            self.largest_step = 0.5 * float(delta.abs().max())
        self.last_step = delta

    def sample(self) -> None:
        """Deviations at ξ̄, then ξ̄ at those deviations, until ξ̄ rests."""
        mode, z = self.centre, self.z
        self._precondition()
        self._draw()
        for _ in range(self.settings.refinements):
            before = self.centre
            self.centre = Iterate.at(self.problem, before.tether, before.xi, self.deviations)
            self.slowest = _QUICK  # the mean density of the samples is not that of their centre
            self._precondition()
            self._descend(replace(self._accuracy(), steps=2, residual=0.5), "mean")
            self.strayed = self.centre.misfit() > _STRAY * max(mode.misfit(), 0.5)
            if self.strayed and self.settings.curved is None and not self.curved:
                _log.info("straight deviations leave the data: the samples are curved")
                self.curved, self.centre, self.z = True, mode, z
            self._precondition()
            self._draw()
        self.moved = self.moved or self.history[-1].moved > _RESTLESS

    def _draw(self) -> None:
        """±δ_s at the centre, from the same random numbers every time."""
        settings, pairs = self.settings, self.settings.samples // 2
        perturbations = Perturbations.of(self.problem, settings.seed, range(pairs))
        mode = Iterate.at(self.problem, self.centre.tether, self.centre.xi)
        if self.curve_draws is not None and self.deviations is not None:
            self._curve(mode, perturbations, self.deviations, self.curve_draws)
            return
        straight, solve = metric_draws(
            mode,
            perturbations,
            settings.residual,
            settings.cg_steps,
            self.preconditioner,
            self.sample_draws,
        )
        self._check(solve)
        self.sample_draws, self.slowest = solve.x, max(self.slowest, int(solve.steps.max()))
        self.deviations = torch.cat([straight, -straight])
        if self.curved:
            multipliers = torch.cat([solve.x, -solve.x])
            self._curve(mode, perturbations, self.deviations, multipliers)

    def _curve(self, mode: Iterate, perturbations: Perturbations, start: Tensor, z: Tensor) -> None:
        white = torch.cat([perturbations.white, -perturbations.white])
        noise = torch.cat([perturbations.noise, -perturbations.noise])
        accuracy = Accuracy(0.3, 0.02 * len(self.z), 3, self.settings.cg_steps)
        found = [
            curved_draw(mode, white[s], noise[s], start[s], z[s], accuracy, self.preconditioner)
            for s in range(len(start))
        ]
        self.deviations = torch.stack([draw.iterate.xi for draw in found]) - mode.xi
        self.curve_draws = torch.stack([draw.z for draw in found])

    def _descend(self, accuracy: Accuracy, stage: str, quiet: bool = False) -> Descent:
        before = self.centre
        found = descend(before, self.z, accuracy, self.preconditioner)
        self.centre, self.z = found.iterate, found.z
        self.slowest = max(self.slowest, found.cg_steps // max(1, found.steps))
        if not quiet:
            self._record(stage, before, found.cg_steps)
        return found

    def _precondition(self) -> None:
        """Nyström of I + W^½ J Jᵀ W^½ at the centre."""
        n = len(self.z)
        rank = min(128, n // 8) if self.settings.rank is None else self.settings.rank
        if rank == 0:
            return
        old = self.preconditioner
        if old is not None and self.slowest < _QUICK:
            return
        self.slowest = 0
        gram = self.problem.gram(self.centre.density)
        self.preconditioner = nystrom(gram, rank, seed=0) if old is None else old.refreshed(gram)

    def _on_its_torus(self, problem: LogNormalProblem) -> LogNormalProblem:
        """On another torus where ℓ has outgrown the padding, or shrunk to where it is wasted."""
        prior = problem.model.prior
        if prior.wrapping is None:
            return problem
        wanted = math.prod(_torus_shape(prior, self.settings.padding))
        outgrown = prior.report.wrap_error > _LARGEST_WRAP
        if not (outgrown or prior.n_white > _WASTE * wanted):
            return problem
        other = GridPrior.padded(
            prior.kernel,
            prior.grid,
            padding=self.settings.padding,
            nugget=prior.nugget,
            dtype=prior.dtype,
            memory=prior.memory,
        )
        _log.info("torus %s -> %s for the present length", prior.torus_shape, other.torus_shape)
        return problem.on(other)

    def _accuracy(self) -> Accuracy:
        return Accuracy(self.settings.residual, 2.0, 4, self.settings.cg_steps)

    def _check(self, solve: SolveResult) -> None:
        self.unsolved = self.unsolved or not solve.converged

    def _record(
        self,
        stage: str,
        before: Iterate,
        cg_steps: int,
        gradient: tuple[float, ...] = (),
        gradient_error: tuple[float, ...] = (),
    ) -> None:
        change = self.centre.responses.mean(0) - before.responses.mean(0)
        moved = float((change.square() / self.problem.noise).mean().sqrt())
        theta = tuple(read(self.problem).tolist())
        entry = MGVIRound(
            stage,
            self.centre.energy,
            self.centre.misfit(),
            moved,
            theta,
            gradient,
            gradient_error,
            cg_steps,
        )
        self.history.append(entry)
        _log.debug(
            "%s: energy %.1f, misfit %.3f, moved %.3f, θ %s",
            stage,
            entry.energy,
            entry.misfit,
            moved,
            theta,
        )
        if self.progress is not None:
            self.progress(entry)

    def solution(self) -> MGVISolution:
        """What was found."""
        assert self.deviations is not None
        samples = self.centre.xi + self.deviations
        problem = self.problem
        with torch.no_grad():
            fields = problem.log_mean + problem.root.matmul(samples)
        posterior = LogNormalPosterior(problem.model.interpolation, self.centre.log_density, fields)
        return MGVISolution(
            problem.model,
            posterior,
            problem.model.coefficients(self.centre.xi),
            self.centre.xi,
            self.deviations,
            tuple(self.history),
            self._status(),
        )

    def _status(self) -> MGVIStatus:
        if self.centre.misfit() > _LARGEST_MISFIT:
            return MGVIStatus.MISFIT
        if self.unsolved:
            return MGVIStatus.UNSOLVED
        if self.strayed:
            return MGVIStatus.STRAYED
        return MGVIStatus.MAX_ROUNDS if self.moved else MGVIStatus.CONVERGED


def _start(problem: LogNormalProblem, xi: Tensor) -> Iterate:
    return Iterate.at(problem, Tether(problem.y, torch.zeros_like(xi)), xi)


def _torus_shape(prior: GridPrior, padding: float) -> tuple[int, ...]:
    """Points per axis of a torus with this padding, in length scales."""
    scales = torch.stack([t.lengthscale.detach() for t in prior.kernel.terms()]).amax(0)
    return tuple(
        fast_length(m + math.ceil(padding * scale / h))
        for m, scale, h in zip(
            prior.grid.shape,
            scales.expand(prior.grid.dim).tolist(),
            prior.grid.spacing,
            strict=True,
        )
    )
