"""What every engine gives for stars: a posterior of the density, and how it was found."""

from dataclasses import asdict, dataclass
from typing import Any, final

from dustmap.gp import AbstractPosterior, HyperparameterFit


@final
@dataclass(frozen=True)
class Hyperparameters:
    """length in pc, std and mean in mag/pc; noise: factor on the errors of the data."""

    length: float
    std: float
    mean: float
    noise: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@final
@dataclass(frozen=True, eq=False)
class StarFit:
    """The posterior of the density, and how it was found.

    summary: what the engine says of its solution, for the report; a residual of iterations is
    `cg_residual`. learning: how the hyperparameters were found, if they were.
    """

    posterior: AbstractPosterior
    hyperparameters: Hyperparameters
    summary: dict[str, Any]
    learning: HyperparameterFit | None
