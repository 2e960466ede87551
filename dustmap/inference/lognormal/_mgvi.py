"""Variational inference for a positive field: mode, hyperparameters, metric samples, mean."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference.evidence._robust import RobustSettings
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_posterior import LogNormalPosterior
from dustmap.inference.lognormal._lognormal_state import Iterate, LogNormalProblem, Tether
from dustmap.inference.lognormal._mgvi_draws import Perturbations, bends, curved_draw, metric_draws
from dustmap.inference.lognormal._mgvi_hyper import HyperPrior, carry, evidence_step, read, write
from dustmap.inference.lognormal._mgvi_newton import Accuracy, Descent, descend
from dustmap.inference.lognormal._mgvi_report import (
    MGVIRound,
    MGVISettings,
    MGVISolution,
    MGVIStatus,
)
from dustmap.inference.lognormal._mgvi_torus import on_its_torus
from dustmap.inference.lognormal._mgvi_weights import Weighing
from dustmap.linalg import NystromPreconditioner, SolveResult, nystrom

_log = logging.getLogger(__name__)

#: Gauss-Newton steps between two looks at the preconditioner.
_STRIDE = 3
#: Samples whose mean response misses the data this many times more than the mode have strayed.
_STRAY = 1.75
#: CG steps below which a preconditioner need not be renewed.
_QUICK = 30
#: Rounds of weights at first that take the mode for the field: its spread is of the wide noise.
_BARE = 3
#: Change of the weights beyond which the preconditioner is renewed.
_MUCH = 0.1
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

    With Student-t noise (settings.robust) the rounds of 1 and 2 also renew the weights of the data,
    ν and the scale, from residuals and spread of the linearised model.

    Noise that grows with the response (likelihood.relative) takes that of the centre, renewed
    before every descent and every draw and held fixed in between: neither the pull on ξ nor the
    evidence's gradient has a derivative of it. These are the estimating equations of Carroll &
    Ruppert (1982), which are right on average whatever the shape of the noise.

    origin (Q,): centre of the priors of the log-parameters, in the order of
    `LogNormalModel.log_parameters`; None: where they start.

    Σ is the noise alone. What the multilinear interpolant leaves out between nodes is in neither.

    Reference: Knollmüller & Enßlin (2019), "Metric Gaussian variational inference"; Frank, Leike
    & Enßlin (2021), "Geometric variational inference".
    """
    if len(data) == 0:
        raise ValueError("data is empty: fit_mgvi needs at least one datum")
    settings = settings or MGVISettings()
    scale = model.likelihood.log_scale
    twice = settings.robust is not None and settings.robust.learn_scale
    if twice and scale is not None and scale.requires_grad:
        raise ValueError(
            "the scale of Student-t noise is learned with ν: give a GaussianLikelihood whose scale "
            "is fixed (log_scale.requires_grad_(False)), or RobustSettings(learn_scale=False)"
        )
    fit = _Fit(LogNormalProblem.of(model, data), settings, progress, origin)
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
        self.weighing: Weighing | None = None

    @property
    def problem(self) -> LogNormalProblem:
        """At the present hyperparameters."""
        return self.centre.problem

    def find_mode(self) -> None:
        """From ξ = 0 to where Gauss-Newton gains little, the preconditioner kept up to date."""
        accuracy = replace(self._accuracy(), decrease=0.01 * len(self.z))
        if self.settings.robust is not None:
            self._find_weights(self.settings.robust, accuracy)
        for _ in range(10):
            self._precondition()
            before = self.centre
            found = self._descend(replace(accuracy, steps=_STRIDE), "mode")
            gained = before.energy - found.iterate.energy
            if found.decrease < accuracy.decrease and gained < 0.05 * before.energy:
                return

    def _find_weights(self, robust: RobustSettings, accuracy: Accuracy) -> None:
        """Mode and weights by turns, from a noise that explains all data to what is left."""
        self._weigh(Weighing.first(robust, self._ratios(None)[0]))
        for turn in range(robust.max_rounds):
            self._precondition()
            found = self._descend(replace(accuracy, steps=_STRIDE), "weights")
            spread = None
            if turn >= _BARE:
                self._precondition()
                spread = self._probe()[1]
            assert self.weighing is not None
            self._weigh(self.weighing.updated(*self._ratios(spread), turn > _BARE))
            if turn > _BARE and self.weighing.settled and found.decrease < accuracy.decrease:
                return

    def _ratios(self, spread: Tensor | None) -> tuple[Tensor, Tensor]:
        """Squared residual of the mode, and spread (N,), each over σ_n² as given."""
        problem = self.problem
        given = problem.model.likelihood.noise_variance(problem.data).detach().double()
        left = self.centre.residuals[0].double().square() / given
        return left, torch.zeros_like(left) if spread is None else spread.double() / given

    def _weigh(self, weighing: Weighing) -> None:
        """Other weights, the mode where it is, and its multipliers where the residuals are."""
        before, self.weighing = self.centre, weighing
        problem = before.problem.weighted(weighing.precision_weights)
        self.z = self.z * (before.problem.noise / problem.noise).sqrt()
        self.centre = Iterate.at(problem, before.tether, before.xi)
        if weighing.change > _MUCH:
            self.slowest = _QUICK

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
        draws, spread = self._probe()
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
        rests = float(step.delta.abs().max()) < settings.tolerance or promised < _NEGLIGIBLE
        if self.weighing is not None:
            self._weigh(self.weighing.updated(*self._ratios(spread)))
            rests = rests and self.weighing.settled
        return rests

    def _probe(self) -> tuple[SolveResult, Tensor]:
        """z_s of the gradient's draws, and the variance (N,) of the mean response that they tell.

        W^½ J δ_s = η_s − z_s, for δ = ξ₀ + Jᵀ W^½ z.
        """
        settings = self.settings
        perturbations = Perturbations.of(self.problem, settings.seed, range(settings.draws))
        _, draws = metric_draws(
            self.centre,
            perturbations,
            settings.residual,
            settings.cg_steps,
            self.preconditioner,
            self.evidence_draws,
        )
        self.evidence_draws = draws.x
        self.slowest = max(self.slowest, int(draws.steps.max()))
        return draws, (perturbations.noise - draws.x).square().mean(0) * self.problem.noise

    def _move(self, delta: Tensor) -> None:
        """θ + t Δθ with the centre carried along, t halved until the data stay in reach."""
        before, theta = self.centre, read(self.problem)
        for length in (1.0, 0.5, 0.25, 0.125):
            write(before.problem, theta + length * delta)
            changed = on_its_torus(
                before.problem.rebuilt().with_present_noise(), self.settings.padding
            )
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
        self._precondition()
        mode, z = self.centre, self.z
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
        """All δ_s, then all −δ_s, at the centre, from the same random numbers every time."""
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
        if self.settings.curved is None and not self.curved:
            self.curved = bends(mode, straight)
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
        """Nyström of I + W^½ J Jᵀ W^½ at the centre, under the noise of its own response."""
        self.centre = self.centre.with_own_response()
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
        if self.progress is not None:
            self.progress(entry)

    def solution(self) -> MGVISolution:
        """What was found."""
        assert self.deviations is not None
        # every +δ_s followed by its −δ_s, so that the first samples are pairs too
        deviations = torch.stack(self.deviations.chunk(2), dim=1).flatten(0, 1)
        samples = self.centre.xi + deviations
        problem = self.problem
        with torch.no_grad():
            fields = problem.log_mean + problem.root.matmul(samples)
        posterior = LogNormalPosterior(problem.model.interpolation, self.centre.log_density, fields)
        return MGVISolution(
            problem.model,
            posterior,
            problem.model.coefficients(self.centre.xi),
            self.centre.xi,
            deviations,
            tuple(self.history),
            self._status(),
            self.weighing,
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
