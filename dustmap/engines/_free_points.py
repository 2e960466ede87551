"""Free inducing points in any dimension: svgp on minibatches, sgpr by the collapsed bound.

Both learn kernel, noise and points, and end with q(ε) of Cholesky whitening in the full family:
svgp by natural steps beside steps of Adam (Hensman et al. 2013; Salimbeni et al. 2018), sgpr along
Titsias' bound (2009), whose q has a closed form, by L-BFGS.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from dustmap import inference
from dustmap.engines import _inducing
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch, arrays_of
from dustmap.engines._learning import EvidenceSettings, Learned, learn
from dustmap.engines._memory import AbstractFitPlan, Component, During, MemoryPlan
from dustmap.engines._starts import best_start, places_of
from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel
from dustmap.gp.families import AbstractGaussian, FullRankFamily
from dustmap.gp.features import CholeskyFeatures, clustered_points, residual_variance_by_rows
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import RowSource, VariationalModel, VariationalPosterior

#: Largest gradient of the bound per datum at which L-BFGS ends.
_TOLERANCE = 1e-4
#: Inducing points of "auto", and its passes: at least so many, and enough for so many steps.
AUTO_INDUCING, AUTO_EPOCHS, _AUTO_STEPS = 500, 20, 200
#: Nugget of K_uu over the kernel's variance: learned points may come close to each other. It is
#: what is left unexplained at the points themselves, and the least noise they tell from it.
_NUGGET = 1e-8
#: Bytes of K_uu, its factor, their gradients and the matrices of q, in float64.
_BYTES_PER_PAIR = 72
#: Losses of the ELBO per row by learning: one that takes it back, more than settling leaves open,
#: and one that is worth a word.
_LOST, _LOST_MUCH = 1e-3, 0.1
#: Arrays of the size of a chunk of rows that `CholeskyFeatures` counts with, those that making one
#: takes, and those of the graph of the collapsed bound.
_ROWS_OF_CHUNK, _CHUNK_COPIES, _GRAPH_COPIES = 8, 4, 13
#: Length of natural steps: the share of the data in a minibatch, between these.
_LEAST_LENGTH, _MOST_LENGTH = 0.1, 0.5
#: Adam's rate falls tenfold at each of these fractions of the passes.
_DECAY = inference.StepDecay(0.1, (0.5, 0.8))
#: Natural steps fall to 0.3 of their length at each of these: Adam's gradient is taken at q after
#: the step on the same rows, which q then fits better than others, and learns too little noise.
_NATURAL_DECAY = inference.StepDecay(0.3, (0.25, 0.8))
#: Share of the rows held out for `patience`.
_HELD_OUT = 0.1
_MAX_PASSES = 20
#: Rows that choose among starts, passes over them, and how many have an inducing point.
_PROBE, _PROBE_PASSES, _ROWS_PER_POINT = 1000, 4, 5


@final
@dataclass(frozen=True)
class FreePointSettings:
    """Settings of free inducing points; None stands for "auto".

    Attributes
    ----------
    inducing, most_points : number of points, and that of "auto" where as many rows differ
    batch_size, epochs, learning_rate : of minibatches and of Adam (svgp)
    patience : passes without a better score of held-out rows that end the training; None for all
    learn_points : move the points, too
    dtype, max_memory, seed
    max_steps : of L-BFGS (sgpr)
    """

    inducing: int | None = None
    batch_size: int = 256
    epochs: int | None = None
    learning_rate: float = 0.05
    patience: int | None = None
    learn_points: bool = True
    dtype: torch.dtype = torch.float64
    max_memory: int = 2**32
    seed: int = 0
    most_points: int = AUTO_INDUCING
    max_steps: int = 100

    @property
    def max_points(self) -> int:
        """Inducing points that the memory holds, at least one."""
        return max(1, math.isqrt(self.max_memory // _BYTES_PER_PAIR))


@final
@dataclass(frozen=True)
class FreePointPlan(AbstractFitPlan):
    """Sizes of the variational model, without its prior and its points (n_inducing, D).

    nugget: of K_uu over the kernel's variance; plans saved before they had one have the default.
    """

    n_inducing: int
    n: int
    dtype: torch.dtype
    max_memory: int
    nugget: float = 1e-6

    @property
    def bytes_needed(self) -> int:
        """Bytes of K_uu, its factor and their gradients, and of the matrices of q, in float64."""
        return _BYTES_PER_PAIR * self.n_inducing**2

    @property
    def refusal(self) -> str:
        return (
            f"inducing = {self.n_inducing:,} points need {self.bytes_needed:,} bytes; "
            f"max_memory = {self.max_memory:,}: take fewer points, or raise max_memory"
        )

    def report(self) -> dict[str, Any]:
        """Sizes as plain values."""
        return {
            "n_inducing": self.n_inducing,
            "dtype": self.dtype_name,
            "bytes_needed": self.bytes_needed,
        }


@final
@dataclass(frozen=True)
class FreePointsEngine(AbstractEngine):
    """Inducing points anywhere.

    collapsed: learn with q integrated out (sgpr), for Gaussian noise; else on minibatches (svgp),
    for any likelihood. start: of the exact evidence of a few rows, where learning starts.
    """

    settings: FreePointSettings
    collapsed: bool
    start: EvidenceSettings | None = None
    most_rows: ClassVar[int] = 100_000_000

    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes of K_uu and of the rows, which are stored where half of the memory holds them."""
        n, settings = len(problem.data), self.settings
        count = settings.inducing or min(settings.most_points, n)
        row = count * torch.float64.itemsize
        chunk = min(n * row, CholeskyFeatures.memory // _ROWS_OF_CHUNK)
        stored = n * row if n * row <= settings.max_memory // 2 else 0
        what = f"covariance of {count:,} inducing points with its factor and gradients, float64"
        parts = [
            Component("points", _BYTES_PER_PAIR * count**2, During.WHOLE, what),
            Component("rows", stored, During.SOLVING, f"{n:,} of {count:,} features"),
            Component("chunk", _CHUNK_COPIES * chunk, During.SOLVING, "rows that are being made"),
        ]
        if self.collapsed and problem.model.is_learned:
            what = "rows that are being made, with their gradients"
            parts.append(Component("learning", _GRAPH_COPIES * chunk, During.LEARNING, what))
        return MemoryPlan(tuple(parts))

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn from all rows; then q from all rows."""
        data, start, learned = problem.data, self.start, Learned(problem.model, None)
        with watch.learning():
            if start is not None and start.search_start:
                score = partial(elbo_at_start, batch=data, settings=self.settings)
                learned = Learned(best_start(problem.model, places_of(data), score), None)
            if start is not None and start.rows > 0:
                learned = learn(learned.model, data, start, watch)
        fit = self.condition(replace(problem, model=learned.model), watch)
        return replace(fit, learning=learned.learning)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn the points, and of the model what is learned; then q from all rows."""
        with watch.conditioning():
            if isinstance(problem.model.likelihood, GaussianLikelihood):
                _inducing.refuse_negligible_noise(problem.model, problem.data)
            return self._collapsed(problem) if self.collapsed else self._stochastic(problem)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """q from its statistics."""
        with torch.no_grad():
            model = _variational(problem.model, plan, torch.from_numpy(arrays["inducing"]))
        posterior = _inducing.variational_posterior(model, arrays)
        return EngineFit(posterior, problem.model, plan=plan)

    def _start(self, problem: Problem) -> tuple[VariationalModel, FreePointPlan, torch.Generator]:
        """The model at the first inducing points, its plan, and a generator for what follows."""
        settings, data = self.settings, problem.data
        generator = torch.Generator().manual_seed(settings.seed)
        points = starting_points(problem.model.kernel, data, settings, generator)
        dtype = torch.float64 if self.collapsed else settings.dtype
        plan = FreePointPlan(len(points), len(data), dtype, settings.max_memory, _NUGGET)
        plan.check()
        model = _variational(problem.model, plan, points, settings.learn_points)
        return _with_noise_left(model, data), plan, generator

    def _stochastic(self, problem: Problem) -> EngineFit:
        """Natural steps of q alternate with steps of Adam for the rest; full passes at the end
        clear q of the noise of minibatches."""
        data, settings = problem.data, self.settings
        model, plan, generator = self._start(problem)
        best, advice, trained = None, list[str](), {"steps": 0, "epochs": 0, "taken_back": False}
        if settings.learning_rate > 0 and model.is_learned:
            best = _settled(model, None, data, plan, _PROBE_PASSES)
            last = _trained(model, data, settings, generator)
            after = _settled(last.model, last.posterior, data, plan)
            lost = (best[1].elbo - after[1].elbo) / len(data)
            trained = {"steps": last.step, "epochs": last.epoch, "taken_back": lost > _LOST}
            if lost > _LOST_MUCH:
                advice.append(
                    f"steps on minibatches lost {lost:.2g} nats per row, and kernel, noise and "
                    f"points are those where they started: a smaller learning_rate or a larger "
                    f"batch_size, or another engine"
                )
            best = best if lost > _LOST else after
        model, fit = best or _settled(model, None, data, plan)
        if not fit.converged:
            advice.append(
                f"the ELBO still rose after {fit.passes} passes over all rows: fewer inducing "
                f"points, or a larger learning_rate for the noise, may settle it"
            )
        report = {
            "passes": fit.passes,
            "settled": fit.converged,
            **trained,
            "advice": [*advice, *_few_points_advice(model, data, settings)],
        }
        source = RowSource(model.features, data.functional, plan.max_memory // 2)
        return _fit(problem, model, plan, source, fit.posterior, fit.elbo, report)

    def _collapsed(self, problem: Problem) -> EngineFit:
        """L-BFGS along the bound, each evaluation O(N M²) over all rows in chunks, in float64."""
        data = problem.data
        model, plan, _ = self._start(problem)
        climb: dict[str, Any] = {"evaluations": 0, "refused": 0}
        advice = []
        if model.is_learned:
            steps, tolerance = self.settings.max_steps, _TOLERANCE
            learned = inference.fit_collapsed(model, data, max_steps=steps, tolerance=tolerance)
            model = learned.model
            climb = {
                "status": learned.status.value,
                "evaluations": len(learned.objective),
                "refused": learned.refused,
                "largest_gradient": learned.largest_gradient,
            }
            if learned.status in _ENDED:
                advice.append(f"the bound {_ENDED[learned.status]}: {learned.status.remedy}")
        source = RowSource(model.features, data.functional, plan.max_memory // 2)
        solution = inference.solve_collapsed(model, data, source)
        report = {"climb": climb, "advice": advice + _few_points_advice(model, data, self.settings)}
        return _fit(problem, model, plan, source, solution.state, solution.value, report)


def _fit(
    problem: Problem,
    model: VariationalModel,
    plan: FreePointPlan,
    source: RowSource,
    q: AbstractGaussian,
    elbo: float,
    report: dict[str, Any],
) -> EngineFit:
    """The posterior with the spread of a fitted mean, at the kernel and points of the model."""
    spread = inference.mean_spread(model, q, problem.data, source)
    posterior, features = VariationalPosterior(model, q, spread), model.features
    assert isinstance(features, CholeskyFeatures)
    arrays = {
        **arrays_of({"inducing": features.points}),
        **_inducing.variational_arrays(posterior),
    }
    learned, report = GPModel(features.kernel, model.mean, model.likelihood), plan.report() | report
    return EngineFit(posterior, learned, report, evidence=elbo, arrays=arrays, plan=plan)


def _settled(
    model: VariationalModel,
    q: AbstractGaussian | None,
    batch: Batch,
    plan: FreePointPlan,
    most: int = _MAX_PASSES,
) -> tuple[VariationalModel, inference.SettledFit]:
    """A model with the q that all data settle at, from q, None for the prior, by at most so many
    passes; without their rows."""
    source = RowSource(model.features, batch.functional, plan.max_memory // 2)
    start = model.family.prior(plan.dtype, batch.y.device) if q is None else q
    return model, inference.settle(model, start, batch, source, max_passes=most)


@torch.no_grad()
def _variances(model: VariationalModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Residual variances of f, and variances of Gaussian noise, of some rows, float64."""
    some = batch[torch.linspace(0, len(batch) - 1, min(_PROBE, len(batch))).long()]
    left = residual_variance_by_rows(model.features, some.functional)
    return left.double(), model.likelihood.noise_variance(some).double()


def _with_noise_left(model: VariationalModel, batch: Batch) -> VariationalModel:
    """The model with no less learned noise than the points leave of f.

    Where the bound is best in its variance, homoscedastic noise has (y − m)² + Var f on average,
    in which the residual variance is. The evidence, where learning may have come from, knows of no
    points.
    """
    noise = model.likelihood
    learned = any(p.is_learned for p in noise.parameters() if p.is_one_of(("scatter",)))
    if not isinstance(noise, GaussianLikelihood) or not learned:
        return model
    left, stated = (values.mean() for values in _variances(model, batch))
    if left <= stated:
        return model
    return replace(model, likelihood=noise.with_value("scatter", 0.5 * left.log()))


def _few_points_advice(
    model: VariationalModel, batch: Batch, settings: FreePointSettings
) -> list[str]:
    """Advice where there are fewer points than "auto" takes, or they leave more than the noise
    unexplained."""
    advice, wanted = [], min(settings.most_points, len(batch))
    if settings.inducing is None and settings.max_points < wanted:
        advice.append(
            f"max_memory = {settings.max_memory:,} has room for {settings.max_points:,} inducing "
            f"points of {wanted:,}: raise it"
        )
    if isinstance(model.likelihood, GaussianLikelihood):
        residual, noise = _variances(model, batch)
        left = float((residual / noise).median())
        if left > 1.0:
            advice.append(
                f"the inducing points leave {left:.2g} times the noise variance of a typical row "
                f"unexplained, and standard deviations are too large: take more of them, or "
                f'engine="exact"'
            )
    return advice


def elbo_at_start(model: GPModel, batch: Batch, settings: FreePointSettings) -> float:
    """The ELBO of some rows at the present hyperparameters, to compare starts by.

    The evidence of these rows would prefer very short length scales to noise, which no few inducing
    points can follow.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    picked = torch.randperm(len(batch), generator=generator)[:_PROBE].sort().values
    some = batch[picked]
    most = settings.inducing or min(AUTO_INDUCING, settings.max_points)
    count = min(most, max(1, len(some) // _ROWS_PER_POINT))
    with torch.no_grad():
        points = _clusters(model.kernel, some, count, generator)
        sizes = len(points), len(some), torch.float64, settings.max_memory
        plan = FreePointPlan(*sizes, _NUGGET)
        variational = _variational(model, plan, points)
        source = RowSource(variational.features, some.functional)
        prior = variational.family.prior(torch.float64, points.device)
        return inference.settle(variational, prior, some, source, max_passes=_PROBE_PASSES).elbo


def _variational(
    model: GPModel, plan: FreePointPlan, inducing: Tensor, learn_points: bool = False
) -> VariationalModel:
    """Cholesky whitening at these points (M, D), with the full family."""
    features = CholeskyFeatures(
        model.kernel, inducing, nugget=plan.nugget, rows_dtype=plan.dtype, learn_points=learn_points
    )
    family = FullRankFamily(plan.n_inducing, max_bytes=plan.max_memory)
    return VariationalModel(features, model.mean, model.likelihood, family)


def starting_points(
    kernel: AbstractKernel, batch: Batch, settings: FreePointSettings, generator: torch.Generator
) -> Tensor:
    """Centres of clusters, as many as the settings ask for."""
    asked, n = settings.inducing, len(batch)
    if asked is not None and asked > n:
        raise UserError(
            f"inducing = {asked:,} but X has {n:,} rows: ask for no more points than rows, or "
            f'leave inducing="auto"'
        )
    count = min(settings.most_points, n, settings.max_points) if asked is None else asked
    points = _clusters(kernel, batch, count, generator)
    if asked is not None and len(points) < asked:
        raise UserError(
            f"inducing = {asked:,} but only {len(points):,} rows of X differ: ask for no more, or "
            f'leave inducing="auto"'
        )
    return points


def _clusters(
    kernel: AbstractKernel, batch: Batch, count: int, generator: torch.Generator
) -> Tensor:
    """Centres (≤ count, D) of clusters in units of the length scales."""
    assert isinstance(batch.functional, PointValues)
    with torch.no_grad():
        scale = kernel.terms()[0].lengthscale
    return clustered_points(batch.functional.x / scale, count, generator) * scale


def _trained(
    model: VariationalModel, batch: Batch, settings: FreePointSettings, generator: torch.Generator
) -> inference.SVIState:
    """The last state on minibatches, or the best by the score of held-out rows."""
    order = torch.randperm(len(batch), generator=generator)
    out = 0 if settings.patience is None else max(1, int(_HELD_OUT * len(batch)))
    part, held = batch[order[out:].sort().values], batch[order[:out].sort().values]
    size = min(settings.batch_size, len(part))
    length = min(max(size / len(part), _LEAST_LENGTH), _MOST_LENGTH)
    steps = -(-len(part) // size)
    svi = inference.SVISettings(
        batch_size=size,
        epochs=settings.epochs or max(AUTO_EPOCHS, -(-_AUTO_STEPS // steps)),
        schedule=inference.StepSchedule(length, power=0.0),
        one_pass=False,
        learning_rate=settings.learning_rate,
        patience=settings.patience or 1,
        decay=_DECAY,
        natural_decay=_NATURAL_DECAY,
    )
    source = RowSource(model.features, part.functional, 0)
    score = partial(_score, held=held) if out else None
    return inference.fit_svi(model, part, source, svi, generator, score=score)


@torch.no_grad()
def _score(state: inference.SVIState, held: Batch) -> float:
    """Mean log predictive density of the rows held out."""
    model = state.model
    prediction = VariationalPosterior(model, state.posterior).predict(held.functional)
    noise = model.likelihood.noise_variance(held)
    mean, variance = prediction.mean.to(held.y), prediction.variance.to(held.y)
    scores = model.likelihood.log_predictive_density(held.y, mean, variance, noise)
    return float(scores.mean())


#: Ends that are worth a word; a parameter at the end of its range, of which data say nothing, is
#: in the report.
_ENDED = {
    FitStatus.MAX_STEPS: "still rose after max_steps of L-BFGS",
    FitStatus.STAGNATED: "rose no more though its gradient is not small",
}
