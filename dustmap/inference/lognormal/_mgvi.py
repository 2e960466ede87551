"""Variational inference for a positive field: mode, hyperparameters, metric samples, mean."""

import enum
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractLatticePrior, Batch, ParameterErrors
from dustmap.gp.features._grouped import GroupSamples
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, load_reader
from dustmap.inference.evidence._student_t_noise import StudentTWeights
from dustmap.inference.lognormal._lognormal import LogNormalModel, LogNormalPosterior
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_means import Sampling
from dustmap.inference.lognormal._mgvi_phases import Learning, Rounds, Walk
from dustmap.inference.lognormal._mgvi_samples import Perturbations, Sampler
from dustmap.inference.lognormal._mgvi_settings import MGVIRound, MGVISettings
from dustmap.inference.lognormal._mgvi_state import MGVI, FitState, MGVIStart, Phase
from dustmap.linalg import AbstractWorld, Progress, unwatched

#: A mode that misses the data by more than this, in units of the noise, is no start for samples.
_LARGEST_MISFIT = 3.0
#: Samples that are turned into fields at once.
_FIELDS = 8


@final
class MGVIStatus(enum.Enum):
    """How a fit ended, from best to worst."""

    CONVERGED = "converged"
    MAX_ROUNDS = "max_rounds"
    REJECTED = "rejected"
    STRAYED = "strayed"
    UNSOLVED = "unsolved"
    MISFIT = "misfit"

    @property
    def remedy(self) -> str:
        """Advice to the caller."""
        return _REMEDIES[self]


_REMEDIES = {
    MGVIStatus.CONVERGED: "nothing to do",
    MGVIStatus.MAX_ROUNDS: (
        "the hyperparameters, the mean or the weights of the data were still moving: raise rounds "
        "or refinements"
    ),
    MGVIStatus.REJECTED: (
        "the next step of the hyperparameters leaves the data at any length and was not taken: use "
        "Student-t noise if some data are outliers, or start from other hyperparameters"
    ),
    MGVIStatus.STRAYED: (
        "the samples leave the data at second order of their deviations: set curved=True, or raise "
        "refinements"
    ),
    MGVIStatus.UNSOLVED: (
        "CG left larger residuals than asked for, so the samples are too wide: raise rank or "
        "cg_steps, or use float64"
    ),
    MGVIStatus.MISFIT: (
        "the mode does not reach the data: use Student-t noise if some of them are outliers, "
        "float64 if the errors are tiny, learn a noise scale or jitter, use a finer grid, or start "
        "from a larger variance or a shorter length scale"
    ),
}


@final
@dataclass(frozen=True, eq=False)
class MGVISolution:
    """q(ξ) = mean xi (n,) with deviations (S, n) of its samples, and how the fit went.

    Attributes
    ----------
    model, posterior : at the learned values; samples of the density
    coefficients : (P,), β of the mean, posterior means where they are learned; float64
    coefficient_covariance : (P, P), of the samples; None where they are not learned
    xi, deviations : (n,), (S, n)
        In pairs ±δ_0, ±δ_1, .., each about xi or about one of several means, by turns: an even
        number of the first is as good as a fit of so many.
    history, status
    start : of a later fit, of more data
    weights : of the data under Student-t noise; None for normal noise
    noise_width : by which noise of samples is wider than these weights; 1 of normal noise
    """

    model: LogNormalModel
    posterior: LogNormalPosterior
    coefficients: Tensor
    coefficient_covariance: Tensor | None
    xi: Tensor
    deviations: Tensor
    history: tuple[MGVIRound, ...]
    status: MGVIStatus
    start: MGVIStart
    weights: StudentTWeights | None = None
    noise_width: float = 1.0

    @property
    def errors(self) -> ParameterErrors | None:
        """Errors of what is learned of kernel and noise: the inverse of the average information of
        evidence and priors, where the last step started; None where nothing is learned."""
        steps = [entry.errors for entry in self.history if entry.errors is not None]
        return steps[-1] if steps else None

    @property
    def rejected_steps(self) -> int:
        """Evidence steps that were not taken."""
        return sum(entry.stage == "rejected" for entry in self.history)

    def message(self) -> str:
        """One sentence for the report."""
        last = self.history[-1]
        noise = "" if self.weights is None else f"{self.weights.message()}, "
        return (
            f"log-normal fit {self.status.value} after {len(self.history)} rounds, {noise}"
            f"rms residual {last.misfit:.2f} of the noise: {self.status.remedy}"
        )


def fit_mgvi(
    model: LogNormalModel,
    data: Batch,
    settings: MGVISettings | None = None,
    rounds: Rounds | None = None,
    *,
    origin: Tensor | None = None,
    start: MGVIStart | None = None,
    world: AbstractWorld | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: Progress = unwatched,
) -> MGVISolution:
    """Posterior of a log-normal field, with what is learned of kernel and noise.

    1. The mode of ξ by Gauss-Newton, every linear system solved from the side of the data.
    2. Newton steps on the evidence of the model linearised there, each followed by the mode of the
       new hyperparameters.
    3. Metric Gaussian variational inference: S/2 pairs ±δ_s ~ N(0, (I + Jᵀ Σ⁻¹ J)⁻¹) at ξ̄, then
       ξ̄ lowers the sampled energy mean_s ½ ‖y − L ρ(ξ̄ ± δ_s)‖²_{Σ⁻¹} + ½ ‖ξ̄‖² until it rests;
       repeated with the same random numbers to where it rests at the samples that are returned.
       With `curved` each sample follows the curvature of ρ instead, and every sixteen of them have
       a mean ξ̄_k of their own that begins at the mode of far larger noise: q is a mixture, since
       the posterior has a mode for every density that a datum may be explained by.

    With Student-t noise (settings.robust) the rounds of 1 and 2 also renew the weights of the data,
    ν and the scale, from residuals and spread of the linearised model. 3 goes on from the mode with
    data and noise that hold it there, and let it move as far as such noise does (`noise_width`).

    Noise that grows with the response (likelihood.relative) takes that of the centre, renewed
    before every descent and every draw and held fixed in between: neither the pull on ξ nor the
    evidence's gradient has a derivative of it. These are the estimating equations of Carroll &
    Ruppert (1982), which are right on average whatever the shape of the noise.

    Σ is the noise alone. What the multilinear interpolant leaves out between nodes is in neither:
    with its variance in Σ the scale of the noise is learned too small, and lengths come out no
    better. They come out too short on fields finer than the grid because interpolation smooths
    what nodes hold; a `ProjectedKernel` has its nodes hold more.

    Parameters
    ----------
    model, data, settings
    rounds : is called with new rounds
    origin : (Q,) or None
        Centre of the priors of the log-parameters, in the order of `LogNormalModel.learned`; None:
        where they start.
    start
        The end of an earlier fit, whose data come first and whose hyperparameters are near those of
        `model`: the same random numbers belong to its data, so that mode, weights and samples are
        near, too. Where few data are new and nothing is learned, or samples have one mean, they are
        drawn at means as far from the new mode as they were; these follow them, and they stay,
        unless the means have moved: then they are drawn again. Where the fit ends is the same
        within its own convergence; a start of other variables is not used, and of one with another
        number of samples the mode and the weights are.
    world
        Ranks that all call this with the same arguments and divide the draws among them, and the
        rows in products with one vector. Every rank has all data, and returns the same solution;
        states are those of one process. None where each rank has some of the data only, or for a
        rank alone.
    checkpointer : saves a state after every round, and between curved samples
    progress : is called with draws and steps of solvers

    References
    ----------
    Knollmüller & Enßlin (2019), "Metric Gaussian variational inference"; Frank, Leike & Enßlin
    (2021), "Geometric variational inference".

    Examples
    --------
    >>> import functools
    >>> from dustmap import gp
    >>> from dustmap.gp import features, functionals, kernels, likelihoods
    >>> grid = gp.RegularGrid((-1.0,) * 3, (0.5,) * 3, (5,) * 3)
    >>> ends = torch.tensor([[0.9, 0.1, 0.2], [-0.3, 0.8, 0.1], [0.2, -0.5, 0.9]]).double()
    >>> rays = functionals.LineIntegrals.from_observer(ends)
    >>> length = ends.norm(dim=1)
    >>> data = Batch(rays, length, torch.full_like(length, 1e-4))  # of a density of one
    >>> prior = gp.GridPrior.padded(kernels.Matern32(1.0, 0.25, dim=3).fixed(), grid)
    >>> noise = likelihoods.GaussianLikelihood(learn=False)
    >>> L = functools.partial(features.interpolation, grid=grid, dtype=torch.float64)
    >>> model = LogNormalModel(prior, gp.ConstantMean(learn=False), noise, L)
    >>> solution = fit_mgvi(model, data, MGVISettings(samples=4))
    >>> bool(((solution.posterior.predict(rays).mean - length).abs() < 0.05).all())
    True
    """
    if len(data) == 0:
        raise UserError("data is empty: fit_mgvi needs at least one datum")
    settings = settings or MGVISettings()
    _refuse_two_scales(model, settings)
    problem = LogNormalProblem.of(model, data, world, settings.among_nodes)
    if start is not None:
        start = start.under(problem) if start.fits(problem) else None
    reader = load_reader(checkpointer, MGVI)
    if reader is None:
        state = FitState.first(problem, settings, origin, start)
    else:
        state = FitState.restored(problem, settings, reader)
    if reader is None or not reader.finished:
        how = Sampler.of(settings, problem, progress, start), start
        walk = Walk(settings, rounds, progress)
        for part in (Learning(walk, *how), Sampling(walk, *how)):
            states = part.states(state)
            while state.phase in part.phases:
                del state  # The next turn frees what it replaces.
                state = next(states)
                if state.phase is not Phase.DONE:
                    checkpointer.save_if_due(state.snapshot)
        checkpointer.finish(state.snapshot())
    return _solution_of(state, settings.seed)


def _refuse_two_scales(model: LogNormalModel, settings: MGVISettings) -> None:
    """Refuse a scale of the noise that is learned both with ν and by the evidence."""
    twice = settings.robust is not None and settings.robust.learn_scale
    noise = model.likelihood.parameters()
    if twice and any(p.is_learned and p.name == "noise" for p in noise):
        raise UserError(
            "the scale of Student-t noise is learned with ν: give a GaussianLikelihood whose scale "
            'is fixed (likelihood.holding("noise")), or RobustSettings(learn_scale=False)'
        )


def _solution_of(state: FitState, seed: int) -> MGVISolution:
    """Return the samples of a state that is done, their fields and the status; seed: the fit's."""
    assert state.deviations is not None
    # every +δ_s followed by its −δ_s, so that the first samples are pairs too
    own, deviations = (
        torch.stack(each.chunk(2), dim=1).flatten(0, 1)
        for each in (state.deviations, state.samples().sub_(state.centre.xi))
    )
    problem, centre = state.centre.problem, state.centre.xi
    fields = _fields_of(problem, centre, deviations)
    log_density = state.centre.log_density
    points, first = problem.model.zero_points, problem.root.n_field
    groups = (
        None if points is None else GroupSamples(points, centre[first:] + deviations[:, first:])
    )
    moments = _NodeMoments.of(problem, seed, own, fields, log_density)
    return MGVISolution(
        problem.model,
        LogNormalPosterior(
            problem.model.interpolation,
            log_density,
            fields,
            moments.explained,
            groups,
            log_variance=moments.variance(problem.model.prior),
        ),
        problem.model.coefficients(centre),
        _coefficient_covariance(problem, deviations),
        centre,
        deviations,
        state.history,
        _status(state),
        state.end(),
        state.weights,
        state.noise_width,
    )


@torch.no_grad()
def _fields_of(problem: LogNormalProblem, centre: Tensor, deviations: Tensor) -> Tensor:
    """Log-densities (S, M) at ξ̄ + δ_s for a centre (n,) and deviations (S, n)."""
    own = deviations[problem.world.share(len(deviations))]
    parts = (centre + part for part in torch.split(own, _FIELDS))
    fields = torch.cat([problem.log_density(xi) for xi in parts])
    return problem.world.stacked(fields, len(deviations))


@final
@dataclass(frozen=True, eq=False)
class _NodeMoments:
    """Means (M,) over draws: `taken` of g_s², `left` of d_s², `field` of f_s², `both` of d_s f_s,
    and `shift` of d_s, which curved draws have.

    d_s: deviation of field s from the centre; f_s = R δ_s, what of it is of no mean; g_s =
    ±R ε₀_s − R δ_s: what the data have taken from the draw of the prior that deviation ±δ_s is made
    of. g and f are independent, and their variances add up to the prior's.
    """

    taken: Tensor
    left: Tensor
    field: Tensor
    both: Tensor
    shift: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        problem: LogNormalProblem, seed: int, deviations: Tensor, fields: Tensor, centre: Tensor
    ) -> "_NodeMoments":
        """Of fields (S, M) around `centre` (M,), at deviations (S, n) from the means of their own
        that come in pairs."""
        root, world, own = problem.model.prior.root(), problem.world, problem.root.n_white
        sums = torch.zeros_like(centre).repeat(5, 1)
        for s in range(len(deviations) // 2)[world.share(len(deviations) // 2)]:
            prior = root.matmul(Perturbations.of(problem, seed, range(s, s + 1)).white[0, :own])
            for row, sign in ((2 * s, 1.0), (2 * s + 1, -1.0)):
                d, f = fields[row] - centre, root.matmul(deviations[row, :own])
                g = sign * prior - f
                sums += torch.stack([g * g, d * d, f * f, d * f, d])
        return _NodeMoments(*(world.total(sums) / len(deviations)))

    @property
    def explained(self) -> Tensor:
        """The share (M,) of the prior's variance that the data have taken."""
        share: Tensor = self.taken / (self.taken + self.left)
        return share

    def variance(self, prior: AbstractLatticePrior) -> Tensor:
        """τ̂² (σ²/σ̂²)^β (M,) of ln ρ, with τ̂² of the draws, σ̂² = E g² + E f² of the draws of the
        prior that they are made of, and σ² of the prior.

        β = c (1 − e) / ((1 − e)² + e²), with e = E g²/σ̂² and c the square of the correlation of d
        and f, leaves the least error of all powers up to 1.
        """
        drawn = self.taken + self.field
        e, c = self.taken / drawn, self.both.square() / (self.left * self.field)
        power = (c * (1.0 - e) / ((1.0 - e).square() + e.square())).clamp_max(1.0)
        ratio = (prior.node_variance(drawn) / drawn) ** power
        spread = (self.left - self.shift.square()).clamp_min(0.0)
        return torch.where(ratio.isfinite(), spread * ratio, spread)


def _coefficient_covariance(problem: LogNormalProblem, deviations: Tensor) -> Tensor | None:
    """Covariance (P, P) of β over deviations of ξ (S, n); None where no mean is learned."""
    scales, first = problem.model.scales(), problem.root.n_white
    if len(scales) == 0:
        return None
    beta = deviations[:, first : first + len(scales)].to(scales) * scales
    centred = beta - beta.mean(0)
    return centred.mT @ centred / len(beta)


def _status(state: FitState) -> MGVIStatus:
    if state.misfit > _LARGEST_MISFIT:
        return MGVIStatus.MISFIT
    if state.unsolved:
        return MGVIStatus.UNSOLVED
    if state.strayed:
        return MGVIStatus.STRAYED
    steps = [entry.stage for entry in state.history if entry.gradient]
    if steps and steps[-1] == "rejected":
        return MGVIStatus.REJECTED
    return MGVIStatus.MAX_ROUNDS if state.moved else MGVIStatus.CONVERGED
