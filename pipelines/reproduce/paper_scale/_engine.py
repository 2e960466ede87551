"""The global engine on the stars of `paper_scale`."""

from dataclasses import dataclass
from typing import final

from dustmap.gp import AbstractPosterior, Batch, ConstantMean, GPModel, RegularGrid
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalFit, GlobalSettings, LearnSettings, fit_global
from pipelines.reproduce._experiment import Row, Value
from pipelines.reproduce._timing import stopwatch

#: Nodes per axis of the stencil: rays average what the cheap one leaves out.
ORDER = 2
RTOL, MAX_STEPS = 1e-3, 200
#: Bytes for vectors and sparse rows.
MEMORY = 5 * 2**30


@final
@dataclass(frozen=True)
class Plan:
    """Where the hyperparameters are or start (kpc, mag/kpc), and what to do with them.

    steps: a fixed number of block steps, whatever the residual, instead of a tolerance.
    rank: of the preconditioner, None for the engine to choose. memory: bytes for vectors and rows.
    start_rows, learn_steps: stars that learning starts with, and solves of each of its stages
    at most.
    """

    length: float
    std: float
    mean: float
    samples: int
    learn: bool = False
    steps: int | None = None
    rank: int | None = None
    memory: int = MEMORY
    start_rows: int = 3000
    learn_steps: int = 12


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The posterior and what the engine reports."""

    posterior: AbstractPosterior
    report: Row


def fit(data: Batch, grid: RegularGrid, plan: Plan) -> Fitted:
    """Weights, learning where wanted, and the final solve."""
    kernel = Matern32(plan.length, plan.std**2, dim=3)
    kernel = kernel if plan.learn else kernel.fixed()
    mean = ConstantMean(plan.mean, learn=plan.learn)
    found, fit_s = stopwatch(
        lambda: fit_global(GPModel(kernel, mean, GaussianLikelihood()), data, grid, _settings(plan))
    )
    learned = found.gp.kernel
    report: Row = {
        "fit_s": fit_s,
        "steps_wanted": plan.steps,
        "length": float(learned.terms()[0].lengthscale[0]),
        "std": float(learned.variance().sqrt()),
        "mean": float(found.gp.mean.coefficients()),
        **_learning(found),
        "M_w": found.model.features.n_features,
        "block_steps": found.solution.block_steps,
        "worst_residual": found.solution.worst_residual,
        "converged": found.solution.converged,
        "residual_ratio": found.residual_ratio,
    }
    return Fitted(found.posterior, report)


def _settings(plan: Plan) -> GlobalSettings:
    rtol, steps = (RTOL, MAX_STEPS) if plan.steps is None else (1e-12, plan.steps)
    return GlobalSettings(
        samples=plan.samples,
        rtol=rtol,
        max_steps=steps,
        rank=plan.rank,
        order=ORDER,
        memory=plan.memory,
        start_rows=plan.start_rows,
        learn=LearnSettings(max_steps=plan.learn_steps),
    )


def _learning(found: GlobalFit) -> dict[str, Value]:
    if found.learned is None:
        return {}
    return {
        "learning_solves": len(found.learned.history),
        "learning_status": found.learned.status.value,
    }
