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
from dustmap.gp import Batch, Parameters, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import world_of
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import _state
from dustmap.inference.variational import _model
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.inference.variational._natural_step import NaturalStep, SVISettings, natural_step

#: Data whose quadrature is done at a time before the first step.
_CHUNK = 2**16
#: Rest of an order of the data at the end of a pass.
_NONE_LEFT = torch.empty(0, dtype=torch.int64)
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

    def updated(self, gradient: Tensor, rate: float) -> "LearnerState":
        """After a step of this rate down one more gradient (P,)."""
        adam = self.adam.updated(gradient)
        return LearnerState(self.theta + adam.step(rate), adam)


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
    """The posterior after a minibatch.

    step, epoch: counts so far, from 1. parameters: of the model, whose present θ (P,) = theta is
    None where nothing is learned. taken: the step that led here, with q.
    """

    step: int
    epoch: int
    parameters: Annotated[Parameters[VariationalModel], _state.REBUILT]
    taken: Annotated[NaturalStep, _state.REBUILT]
    theta: _state.ParameterVector | None = None

    @property
    def model(self) -> VariationalModel:
        """The model at θ, made when it is asked for."""
        return self.parameters.model if self.theta is None else self.parameters.build(self.theta)

    @property
    def posterior(self) -> AbstractGaussian:
        """q(ε)."""
        return self.taken.posterior

    def snapshot(self) -> _state.State:
        """All of it but the model."""
        q, divergence = self.posterior, self.taken.divergence()
        gaussian = _GaussianState(q.mean, q.statistics, divergence)
        return _state.state_of(_STATE, self, self.taken, gaussian)


@final
@dataclass(frozen=True, eq=False)
class RunState:
    """Complete state of a run over so many data between two minibatches.

    learner: None where nothing is learned. generator: after it drew the order of this pass, of
    which the data `left` (n,) remain. last, best: None before the first minibatch, and where no
    pass was scored; waited: passes since the best one.
    """

    data: int
    learner: LearnerState | None
    posterior: Annotated[AbstractGaussian, _state.REBUILT]
    generator: Annotated[Tensor, _state.Layout("generator", "bytes")]
    left: Annotated[Tensor, _state.Layout("left", "n")] = _NONE_LEFT
    step: int = 0
    epoch: int = 0
    last: Annotated[SVIState | None, _state.REBUILT] = None
    best: Annotated[SVIState | None, _state.REBUILT] = None
    best_score: float = -math.inf
    waited: int = 0

    def judged(self, value: float) -> "RunState":
        """With the last state as the best one where its score is the best so far."""
        if value > self.best_score:
            return replace(self, best=self.last, best_score=value, waited=0)
        return replace(self, waited=self.waited + 1)

    def snapshot(self, finished: bool = False) -> _state.State:
        """All of it."""
        is_best = self.best is self.last
        states = _Visited(
            None if self.last is None else self.last.snapshot(),
            None if self.best is None or is_best else self.best.snapshot(),
            is_best,
        )
        return _state.state_of(_SVI, self, states, finished=finished)


@final
@dataclass(frozen=True, eq=False)
class _Visited:
    """The states of a run. best_is_last: where both are one."""

    last_state: _state.State | None
    best_state: _state.State | None
    best_is_last: bool


@final
@dataclass(frozen=True, eq=False)
class Run:
    """The iteration over a data set. parameters: all that the model could learn."""

    parameters: Parameters[VariationalModel]
    batch: Batch
    source: RowSource
    settings: SVISettings
    generator: torch.Generator
    score: Callable[[SVIState], float] | None = None

    @property
    def learns(self) -> bool:
        """Whether it learns any of them."""
        return self.settings.learning_rate > 0 and len(self.parameters) > 0

    @property
    def covariance_rests(self) -> bool:
        """Whether S of one pass is the optimum: weights of Gaussian noise know nothing of q."""
        is_gaussian = isinstance(self.parameters.model.likelihood, GaussianLikelihood)
        return self.settings.one_pass and is_gaussian and not self.learns

    def first(self) -> RunState:
        """Before any minibatch."""
        if len(self.batch) == 0:
            raise UserError("the data set is empty: at least one datum is needed")
        theta, learner = self.parameters.theta, None
        if self.learns:
            learner = LearnerState(theta, Adam(torch.zeros_like(theta), torch.zeros_like(theta)))
        posterior = _start(self.parameters.model, self.batch, self.source, self.settings)
        return RunState(len(self.batch), learner, posterior, self.generator.get_state())

    def states(self, state: RunState) -> Iterator[RunState]:
        """Yield the state after every minibatch that follows."""
        most, patience = self.settings.epochs, self.settings.patience
        while len(state.left) or (state.epoch < most and state.waited < patience):
            state = self._next(state if len(state.left) else self._ordered(state))
            if self.score is not None and state.last is not None and not len(state.left):
                state = state.judged(self.score(state.last))
            yield state

    def _ordered(self, state: RunState) -> RunState:
        """At the start of the next pass."""
        generator = self.generator.set_state(state.generator)
        order = torch.randperm(len(self.batch), generator=generator)
        return replace(state, epoch=state.epoch + 1, left=order, generator=generator.get_state())

    def _next(self, state: RunState) -> RunState:
        """A natural step on the next minibatch, then one of Adam.

        Minibatches of a pass are of one size, within one: a small rest would stand for all data as
        the others do, and q would end at it. The rows are computed once: detached for the natural
        step, with their graph for Adam's.
        """
        settings, model, learner = self.settings, self.parameters.model, state.learner
        batches = math.ceil(len(state.left) / settings.batch_size)
        size = math.ceil(len(state.left) / batches)
        index, left = state.left[:size], state.left[size:]
        part, scale = self.batch[index], len(self.batch) / len(index)
        theta = (self.parameters if learner is None else learner).theta.clone().requires_grad_()
        if learner is None:
            rows = self.source.select(index)
        else:
            model = self.parameters.build(theta)
            rows = _model.rows_of(model.features, own_batch(part).functional)
        lengths = settings.lengths(state.step, state.epoch)
        if self.covariance_rests:
            lengths = replace(lengths, covariance=0.0)
        taken = natural_step(model, state.posterior, rows.detached(), part, scale, lengths)
        if learner is not None:
            gradient = _loss_gradient(model, taken.posterior, rows, part, theta)
            learner = learner.updated(gradient, settings.rate(state.epoch))
        learned = None if learner is None else learner.theta
        last = SVIState(state.step + 1, state.epoch, self.parameters, taken, learned)
        moved = replace(state, learner=learner, posterior=taken.posterior, left=left)
        return replace(moved, step=last.step, last=last)

    def restored(self, reader: _state.StateReader) -> RunState:
        """The state of a snapshot, and the generator as it was."""
        theta, n = self.parameters.theta, len(self.batch)
        like = {"theta": theta, "generator": self.generator.get_state(), "left": _NONE_LEFT}
        values = reader.fields(RunState, like, P=len(theta))
        reader.refuse_other("data", values["data"], n)
        if (values["learner"] is not None) != self.learns:
            other = "no learning of" if self.learns else "learned"
            raise reader.refusal(f"{other} hyperparameters")
        visited = reader.read(_Visited)
        last, best = (
            None if state is None else self._visited(state)
            for state in (visited.last_state, visited.best_state)
        )
        assert last is not None
        best = last if visited.best_is_last else best
        self.generator.set_state(values["generator"])
        return RunState(posterior=last.posterior, last=last, best=best, **values)

    def _visited(self, state: _state.State) -> SVIState:
        """One of its states."""
        model, start = self.parameters.model, self.parameters.theta
        reader, family = _state.StateReader.of(state, _STATE), model.family
        like = {"theta": start, "field": self.batch.y[:0].to(model.features.dtype)}
        sizes = tuple(family.zero_statistics("meta").shape)
        gaussian = reader.read(_GaussianState, like, M=family.n_features, statistics=sizes)
        taken = NaturalStep(
            posterior=family.posterior(gaussian.mean, gaussian.statistics),
            divergence=lambda: gaussian.divergence,
            **reader.fields(NaturalStep),
        )
        values = reader.fields(SVIState, like, P=len(start))
        return SVIState(parameters=self.parameters, taken=taken, **values)


def svi(
    model: VariationalModel,
    batch: Batch,
    source: RowSource,
    settings: SVISettings,
    generator: torch.Generator,
) -> Iterator[SVIState]:
    """Yield the state after every minibatch; `fit_svi` exhausts it.

    The order of the data comes from `generator`.
    """
    run = Run(Parameters.of(model), batch, source, settings, generator)
    for state in run.states(run.first()):
        if state.last is not None:
            yield state.last


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
    """Take natural-gradient steps on minibatches; return the last state, or the best-scoring one.

    Parameters
    ----------
    model, batch, settings
    source : rows of the batch's functional
    generator : of the minibatches
    score : callable
        Of the state after every epoch, such as the mean log-likelihood of held-out data: larger is
        better, and `settings.patience` epochs without a better one stop the run.
    progress : is called with every state
    checkpointer : saves the state after any minibatch, with that of the generator

    Ranks that share the functional of the batch compute the rows of their own data and add up what
    these say; all of them end with the same bits.

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
    run = Run(Parameters.of(model), batch, source, settings, generator, score)
    reader = _state.load_reader(checkpointer, _SVI)
    state = run.first() if reader is None else run.restored(reader)
    if reader is None or not reader.finished:
        states = run.states(state)
        for state in states:
            if progress is not None and state.last is not None:
                progress(state.last)
            checkpointer.save_if_due(state.snapshot)
        checkpointer.finish(state.snapshot(finished=True))
    chosen = state.best or state.last
    assert chosen is not None
    return chosen


def _loss_gradient(
    model: VariationalModel, posterior: AbstractGaussian, rows: Features, part: Batch, theta: Tensor
) -> Tensor:
    """Gradient (P,) in θ of the negative expected log-likelihood per datum, of all ranks' rows.

    Without the divergence of q, which knows nothing of the hyperparameters.
    """
    own, gradient = own_batch(part), torch.zeros_like(theta)
    if len(own) > 0:
        loss = -model.expected_log_likelihood(posterior, rows, own) / len(part)
        (gradient,) = torch.autograd.grad(loss, theta)
    return world_of(part.functional).total(gradient.detach())


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
        return _model.one_pass_covariance(model, source, (-2.0 * g2).clamp_min(0.0))
