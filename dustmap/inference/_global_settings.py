"""Settings of a global fit, and how many data find the start of its learning."""

from dataclasses import dataclass, field
from typing import final

import torch

from dustmap.inference._model_maker import GridSettings
from dustmap.inference.evidence import _newton
from dustmap.inference.evidence._student_t_noise import RobustSettings
from dustmap.inference.solve._global_solve import SolveSettings

#: One of so many data finds the start, at most; fewer than so many would not find it.
_START_PART, _LEAST_START = 4, 250


@final
@dataclass(frozen=True)
class GlobalSettings:
    """Settings of `fit_global`.

    Attributes
    ----------
    samples : draws S; standard deviations have a relative error of 1/√(2S)
    rtol, max_steps, seed, rank : see `SolveSettings`
    start_rows : so many data find the start in cheap steps, see `start_rows`; 0 leaves that out
    learn_rows : at most so many random data take part in learning
    order, padding, dtype, memory, rows_memory : see `GridSettings`
    solve_memory : bytes of a solve's vectors; None for half
    learn : Newton's method on the evidence
    robust : Student-t noise; None for Gaussian
    shared_residuals : whether rays in one beam share residuals in the draws, see `SolveSettings`
    by_matrix : whether few data are solved for by their covariance as a matrix, see `suits_dense`;
        the gradient of the evidence then has no Monte Carlo error
    """

    samples: int = 32
    rtol: float = 1e-3
    max_steps: int = 500
    seed: int = 0
    rank: int | None = None
    start_rows: int = 3000
    learn_rows: int = 100_000
    order: int | None = None
    padding: float = 4.0
    dtype: torch.dtype = torch.float32
    memory: int = 2**33
    rows_memory: int | None = None
    solve_memory: int | None = None
    learn: _newton.LearnSettings = field(default_factory=_newton.LearnSettings)
    robust: RobustSettings | None = None
    shared_residuals: bool = True
    by_matrix: bool = True

    @property
    def grid(self) -> GridSettings:
        """How the grid carries the field."""
        return GridSettings(self.padding, self.order, self.dtype, self.memory, self.rows_memory)

    def solve(self, samples: int, fit_mean: bool) -> SolveSettings:
        """The settings of a solve for so many draws."""
        return SolveSettings(
            rtol=self.rtol,
            max_steps=self.max_steps,
            samples=samples,
            seed=self.seed,
            rank=self.rank,
            memory=self.memory // 2 if self.solve_memory is None else self.solve_memory,
            fit_mean=fit_mean,
            shared_residuals=self.shared_residuals,
            by_matrix=self.by_matrix,
        )


def start_rows(asked: int, n: int) -> int:
    """Data that find the start of learning from n: those asked for, a quarter at most, or none.

    Examples
    --------
    >>> start_rows(3000, 100_000), start_rows(3000, 4000), start_rows(3000, 800)
    (3000, 1000, 0)
    """
    few = min(asked, n // _START_PART)
    return few if few >= min(asked, _LEAST_START) else 0
