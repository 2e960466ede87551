"""Natural-gradient stochastic variational inference (002, S11-S12).

Adam on the hyperparameters alternates with natural steps (002, appendix B.2).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, Parameters
from dustmap.gp.families import AbstractGaussian, KnownDivergence
from dustmap.gp.features import Features
from dustmap.gp.functionals import AbstractFunctional, whole
from dustmap.inference import _state
from dustmap.inference.variational._all_data import one_pass_covariance
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.inference.variational._natural_step import NaturalStep, SVISettings, natural_step

#: Data whose quadrature is done at a time before the first step.
_CHUNK = 2**16
#: The names of the states of a fit, and of one step.
_SVI, _STATE = "fit_svi", "svi_state"


@final
@dataclass(frozen=True, eq=False)
class Adam:
    """The averages of Kingma & Ba (2015) after `steps` gradients: of g (P,), and of g² (P,)."""

    mean: _state.ParameterVector
    square: _state.ParameterVector
    steps: int = 0

    #: Decay of the two averages, and what keeps the denominator from 0.
    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8

    def updated(self, gradient: Tensor) -> "Adam":
        """With one more gradient (P,)."""
        return Adam(
            self.mean + (1.0 - self.BETA_1) * (gradient - self.mean),
            self.BETA_2 * self.square + (1.0 - self.BETA_2) * gradient.square(),
            self.steps + 1,
        )

    def step(self, rate: float) -> Tensor:
        """The step (P,) down the gradient."""
        mean = self.mean / (1.0 - self.BETA_1**self.steps)
        square = self.square / (1.0 - self.BETA_2**self.steps)
        return -rate * mean / (square.sqrt() + self.EPSILON)


@final
@dataclass(frozen=True, eq=False)
class LearnerState:
    """θ (P,), and the averages of its gradients."""

    theta: _state.ParameterVector
    adam: Adam


@final
class HyperparameterLearner:
    """Adam on kernel, mean and noise at fixed q(ε), through the exact gradient of the features.

    learning_rate 0 makes it inactive. theta (P,): where it is; `model`: built from it, with its
    graph where active.
    """

    def __init__(self, model: VariationalModel, learning_rate: float) -> None:
        self.parameters = Parameters.of(model)
        self.active = learning_rate > 0 and len(self.parameters) > 0
        zeros = torch.zeros_like(self.parameters.theta)
        self.theta, self.model, self._adam = self.parameters.theta, model, Adam(zeros, zeros)
        if self.active:
            self._move_to(self.theta)

    def rows(self, functional: AbstractFunctional) -> Features:
        """Rows of a minibatch at the present parameters, with their graph."""
        return self.model.features.rows(functional)

    def step(
        self, posterior: AbstractGaussian, rows: Features, batch: Batch, scale: float, rate: float
    ) -> None:
        """One Adam step of this rate down the minibatch's −ELBO / N; nothing when inactive."""
        if not self.active:
            return
        # Without the divergence of q, which knows nothing of the hyperparameters.
        loss = -self.model.expected_log_likelihood(posterior, rows, batch) / len(batch)
        (gradient,) = torch.autograd.grad(loss, self.theta)
        self._adam = self._adam.updated(gradient)
        self._move_to(self.theta.detach() + self._adam.step(rate))

    def at(self, theta: Tensor) -> VariationalModel:
        """The model at θ (P,), without a graph; the one it started from when inactive."""
        return self.parameters.build(theta.detach()) if self.active else self.model

    def snapshot(self) -> LearnerState | None:
        """Parameters and Adam's averages, None when inactive."""
        return LearnerState(self.theta, self._adam) if self.active else None

    def restore(self, state: LearnerState | None) -> None:
        """Go back to where `snapshot` was called."""
        if state is not None:
            self._adam = state.adam
            self._move_to(state.theta)

    def _move_to(self, theta: Tensor) -> None:
        self.theta = theta.detach().clone().requires_grad_()
        self.model = self.parameters.build(self.theta)


@final
@dataclass(frozen=True, eq=False)
class _GaussianState:
    """q by its mean and the statistics of its family, with its divergence from the prior."""

    mean: Annotated[Tensor, _state.Layout("field", "M")]
    statistics: Annotated[Tensor, _state.Layout("field", "statistics", dtype=torch.float64)]
    divergence: float


@final
@dataclass(frozen=True, eq=False)
class SVIState:
    """One state of the iteration.

    step, epoch: counts so far, from 1. model: at the present θ (P,) = theta, which is None where
    nothing is learned. taken: the step that led here, with q.
    """

    step: int
    epoch: int
    model: Annotated[VariationalModel, _state.REBUILT]
    taken: Annotated[NaturalStep, _state.REBUILT]
    theta: _state.ParameterVector | None = None

    @property
    def posterior(self) -> AbstractGaussian:
        """q(ε)."""
        return self.taken.posterior

    def snapshot(self) -> _state.State:
        """All of it but the model."""
        q, divergence = self.posterior, self.taken.divergence.value()
        gaussian = _GaussianState(q.mean, q.statistics, divergence)
        return _state.state_of(_STATE, self, self.taken, gaussian)

    @staticmethod
    def restored(learner: HyperparameterLearner, state: _state.State, y: Tensor) -> "SVIState":
        """The state of this learner's model in a snapshot; on the device of y."""
        model, family, start = learner.model, learner.model.family, learner.parameters.theta
        reader = _state.StateReader.of(state, _STATE)
        like = {"theta": start, "field": y[:0].to(model.features.dtype)}
        sizes = tuple(family.zero_statistics("meta").shape)
        gaussian = reader.read(_GaussianState, like, M=family.n_features, statistics=sizes)
        taken = NaturalStep(
            posterior=family.posterior(gaussian.mean, gaussian.statistics),
            divergence=KnownDivergence(gaussian.divergence),
            **reader.fields(NaturalStep),
        )
        values = reader.fields(SVIState, like, P=len(start))
        theta = values["theta"]
        return SVIState(model=model if theta is None else learner.at(theta), taken=taken, **values)


def svi(
    model: VariationalModel,
    batch: Batch,
    source: RowSource,
    settings: SVISettings,
    generator: torch.Generator,
) -> Iterator[SVIState]:
    """Yield the state after every minibatch; `fit_svi` exhausts it.

    The order of the data comes from `generator`. With learning_rate > 0 the rows of a minibatch
    are computed once with their graph: detached for the natural step, with it for Adam's.
    """
    run = _Run(model, batch, source, settings, generator, resumed=False)
    while run.epoch < settings.epochs:
        yield from run.one_pass()


@final
class _Run:
    """The iteration between two passes over the data; resumed: its state comes from elsewhere."""

    def __init__(
        self,
        model: VariationalModel,
        batch: Batch,
        source: RowSource,
        settings: SVISettings,
        generator: torch.Generator,
        *,
        resumed: bool,
    ) -> None:
        self.batch, self.source, self.settings, self.generator = batch, source, settings, generator
        if not resumed:
            self.posterior = _start(model, batch, source, settings)
        self.learner = HyperparameterLearner(model, settings.learning_rate)
        self.step = self.epoch = 0

    def one_pass(self) -> Iterator[SVIState]:
        """A step with every minibatch."""
        learner, batch = self.learner, self.batch
        self.epoch += 1
        order = torch.randperm(len(batch), generator=self.generator)
        for index in torch.split(order, self.settings.batch_size):
            part, scale = batch[index], len(batch) / len(index)
            active = learner.active
            rows = learner.rows(whole(part.functional)) if active else self.source.select(index)
            lengths = self.settings.lengths(self.step, self.epoch)
            taken = natural_step(
                learner.model, self.posterior, rows.detached(), part, scale, lengths
            )
            learner.step(taken.posterior, rows, part, scale, self.settings.rate(self.epoch))
            self.posterior, self.step = taken.posterior, self.step + 1
            theta = learner.theta.detach() if active else None
            yield SVIState(self.step, self.epoch, learner.model, taken, theta)


def fit_svi(
    model: VariationalModel,
    batch: Batch,
    source: RowSource,
    settings: SVISettings,
    generator: torch.Generator,
    *,
    score: Callable[[SVIState], float] | None = None,
    progress: Callable[[SVIState], None] | None = None,
    checkpointer: _state.AbstractCheckpointer = _state.NO_CHECKPOINTS,
) -> SVIState:
    """Exhaust `svi`; return the last state, or with `score` the best-scoring epoch's.

    Parameters
    ----------
    model, batch, settings
    source : rows of the batch's functional
    generator : of the minibatches
    score : callable
        Of the state after every epoch, such as the mean log-likelihood of held-out data: larger is
        better, and `settings.patience` epochs without a better one stop the run.
    progress : is called with every state
    checkpointer : saves a state after every epoch, with that of the generator

    Examples
    --------
    >>> from dustmap import gp
    >>> from dustmap.gp import families, features, functionals, kernels, likelihoods
    >>> grid = gp.RegularGrid.from_bounds((0.0,), (3.0,), (13,))
    >>> prior = gp.GridPrior.padded(kernels.Matern32(1.0, 4.0, dim=1).fixed(), grid)
    >>> torus, family = features.TorusFeatures(prior), families.MeanFieldFamily(prior.n_white)
    >>> noise = likelihoods.BernoulliLikelihood()
    >>> model = VariationalModel(torus, gp.ConstantMean(learn=False), noise, family)
    >>> x = torch.linspace(0.0, 3.0, 12, dtype=torch.float64)[:, None]
    >>> data = Batch(functionals.PointValues(x), (x[:, 0] > 1.5).double())
    >>> settings, generator = SVISettings(batch_size=6, epochs=20), torch.Generator().manual_seed(0)
    >>> rows = RowSource(torus, data.functional)
    >>> state = fit_svi(model, data, rows, settings, generator)
    >>> f = model.moments(state.posterior, rows.select(slice(None)), data.functional).mean
    >>> bool(((f > 0) == (data.y > 0.5)).all())
    True
    """
    reader = _state.load_reader(checkpointer, _SVI)
    run = _Run(model, batch, source, settings, generator, resumed=reader is not None)
    passes = _Passes.of(run, reader)
    if reader is None or not reader.finished:
        while run.epoch < settings.epochs and passes.waited < settings.patience:
            for state in run.one_pass():
                passes.last = state
                if progress is not None:
                    progress(state)
            if score is not None and passes.last is not None:
                passes.judge(passes.last, score(passes.last))
            checkpointer.save_if_due(lambda: passes.snapshot(run, finished=False))
    chosen = passes.best or passes.last
    if chosen is None:
        raise UserError("the data set is empty: at least one datum is needed")
    if reader is None or not reader.finished:
        checkpointer.finish(passes.snapshot(run, finished=True))
    if chosen.theta is None:
        return chosen
    return replace(chosen, model=run.learner.at(chosen.theta))


@final
@dataclass(frozen=True, eq=False)
class _RunState:
    """A fit of so many data after some passes. last, best: None where there is none; best_is_last:
    where both are one."""

    data: int
    step: int
    epoch: int
    learner: LearnerState | None
    generator: Annotated[Tensor, _state.Layout("generator", "bytes")]
    last_state: _state.State | None
    best_state: _state.State | None
    best_is_last: bool


@final
@dataclass(eq=False)
class _Passes:
    """The last state, the best one by its score, and the epochs since."""

    last: Annotated[SVIState | None, _state.REBUILT] = None
    best: Annotated[SVIState | None, _state.REBUILT] = None
    best_score: float = -math.inf
    waited: int = 0

    def judge(self, state: SVIState, value: float) -> None:
        """Take the state where its score is the best so far."""
        if value > self.best_score:
            self.best, self.best_score, self.waited = state, value, 0
        else:
            self.waited += 1

    def snapshot(self, run: _Run, *, finished: bool) -> _state.State:
        """With all that the next pass needs."""
        is_best = self.best is self.last
        stored = _RunState(
            len(run.batch),
            run.step,
            run.epoch,
            run.learner.snapshot(),
            run.generator.get_state(),
            None if self.last is None else self.last.snapshot(),
            None if self.best is None or is_best else self.best.snapshot(),
            is_best,
        )
        return _state.state_of(_SVI, self, stored, finished=finished)

    @staticmethod
    def of(run: _Run, reader: _state.StateReader | None) -> "_Passes":
        """Those of a stored state, to which the run is set; none without one."""
        if reader is None:
            return _Passes()
        learner, y, theta = run.learner, run.batch.y, run.learner.parameters.theta
        like = {"theta": theta, "generator": run.generator.get_state()}
        stored = reader.read(_RunState, like, P=len(theta))
        reader.refuse_other("data", stored.data, len(y))
        if (stored.learner is not None) != learner.active:
            other = "no learning of" if learner.active else "learned"
            raise reader.refusal(f"{other} hyperparameters")
        learner.restore(stored.learner)
        run.generator.set_state(stored.generator)
        last, best = (
            None if state is None else SVIState.restored(learner, state, y)
            for state in (stored.last_state, stored.best_state)
        )
        assert last is not None
        run.step, run.epoch, run.posterior = stored.step, stored.epoch, last.posterior
        chosen = last if stored.best_is_last else best
        return _Passes(last=last, best=chosen, **reader.fields(_Passes))


def _start(
    model: VariationalModel, batch: Batch, source: RowSource, settings: SVISettings
) -> AbstractGaussian:
    """The prior's mean with S of one pass (S4), or the prior itself.

    The weights are those of f ~ N(m_n, 1); negative ones are for the steps to find.
    """
    if not settings.one_pass:
        return model.family.prior(model.features.dtype, batch.y.device)
    with torch.no_grad():
        means = model.mean.values(batch.functional).to(batch.y)
        every = (batch.y, means, torch.ones_like(means), model.likelihood.noise_variance(batch))
        parts = zip(*(torch.split(values, _CHUNK) for values in every), strict=True)
        g2 = torch.cat([model.likelihood.moment_gradients(*part)[1] for part in parts])
        return one_pass_covariance(model, source, (-2.0 * g2).clamp_min(0.0))
