"""Hyperparameters by climbing the evidence: few outer steps, each one global solve.

The evidence itself is never computed, only its gradient. Random numbers are the same in every step,
so the gradient is a smooth, deterministic function of the parameters, whose root is found by Newton
steps in log-parameters with the average information as metric, inside a trust radius.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._journal import NO_JOURNAL, AbstractJournal
from dustmap.inference.evidence._climb import Climb
from dustmap.inference.evidence._learn_values import AbstractMaker as AbstractMaker
from dustmap.inference.evidence._learn_values import AbstractSolver as AbstractSolver
from dustmap.inference.evidence._learn_values import LearnedModel as LearnedModel
from dustmap.inference.evidence._learn_values import LearnSettings as LearnSettings
from dustmap.inference.evidence._learn_values import LearnStep as LearnStep
from dustmap.inference.evidence._learn_values import PosteriorMoments as PosteriorMoments
from dustmap.inference.evidence._learn_values import PriorDraws as PriorDraws
from dustmap.inference.evidence._learn_values import T
from dustmap.inference.solve._draws import GRID_STREAM
from dustmap.linalg import KeyedNormal


def learn_evidence(
    maker: AbstractMaker,
    data: Batch,
    settings: LearnSettings,
    solve: AbstractSolver[T],
    *,
    prior_draws: PriorDraws | None = None,
    weights: Tensor | None = None,
    ceilings: Mapping[int, float] | None = None,
    floors: Mapping[int, float] | None = None,
    progress: Callable[[LearnStep], None] | None = None,
    journal: AbstractJournal = NO_JOURNAL,
) -> LearnedModel[T]:
    """Maximises ln p(y | θ) over the learned parameters of kernel and likelihood, in place.

    All of them are logarithms. Coefficients of a learned mean take the values of each solution.

    maker: of the model; it may change the torus, and what solves can reuse is then dropped.
    prior_draws: without them the gradient in the length scale is many times noisier where the data
        determine the field well; `keyed_prior_draws` has those of `solve_global`.
    weights (N,): the noise variances are divided by them.
    ceilings: the largest log-parameters, by the id of the parameter; where the climb ends there, it
        says so. floors: the least ones; what ends there is next to nothing, and that is no fault.
    journal: kept after every step, and inside the solves; progress hears of new steps only.
    """
    climb = Climb(
        maker, data, settings, solve, prior_draws, weights, ceilings or {}, floors or {}, journal
    )
    return climb.learned(progress)


def keyed_prior_draws(seed: int) -> PriorDraws:
    """The prior draws of `solve_global` with this seed."""

    def draws(deviations: Tensor) -> Tensor:
        normal, width = KeyedNormal(seed, GRID_STREAM), deviations.shape[1]
        rows = range(len(deviations))
        return torch.stack(
            [normal.draw(s, width, deviations.dtype, deviations.device) for s in rows]
        )

    return draws
