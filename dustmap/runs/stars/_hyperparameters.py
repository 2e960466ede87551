"""The fit of a star map: its hyperparameters by name, and the posterior with its predictions."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, final

from scipy.stats import norm, t
from torch import Tensor

from dustmap import inference
from dustmap.engines import Arrays, Learning
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction
from dustmap.linalg import Progress, unwatched
from dustmap.runs._ranks import predicted
from dustmap.runs.reports import Predictions
from dustmap.sky.observations import Observations

#: Upper end of the central 68 %.
_UPPER = float(norm.cdf(1.0))

#: Parts of the model that few have -> their values where it has none.
_ABSENT: tuple[Mapping[str, float], ...] = (
    {"scatter": 0.0},
    {"relative_scatter": 0.0},
    {"beyond": 1.0, "beyond_std": 0.0},
)


@final
@dataclass(frozen=True)
class Hyperparameters:
    """length in pc; noise: factor on the errors of the data; scatter in mag, beyond the errors;
    relative_scatter: the same as a fraction of the extinction itself.

    std and mean in mag/pc for a Gaussian density; for a log-normal one std is that of ln ρ and
    mean the median density in mag/pc, of a disc in its plane at the Sun's distance from the centre.
    disc_height and disc_length in pc, of a log-normal density: negative where it grows.
    nu: degrees of freedom of Student-t noise, None for Gaussian. beyond, beyond_std: factor on the
    prior's expectation of the dust beyond the box, and its standard deviation.
    """

    length: float
    std: float
    mean: float
    noise: float
    nu: float | None = None
    scatter: float = 0.0
    disc_height: float | None = None
    disc_length: float | None = None
    relative_scatter: float = 0.0
    beyond: float = 1.0
    beyond_std: float = 0.0

    def squared_width(self, errors: Tensor, predicted: Prediction | None = None) -> Tensor:
        """Return noise² σ² + scatter² + relative_scatter² E a² (N,) for errors σ² (N,): the
        variance of normal noise, s² of Student-t noise s t_ν.

        predicted: of the extinctions a, by the model, for measured ones are wrong by their noise;
        only a relative scatter needs it.
        """
        constant = self.noise**2 * errors + self.scatter**2
        if self.relative_scatter == 0.0:
            return constant
        assert predicted is not None
        square = (predicted.mean.square() + predicted.variance).to(errors)
        return constant + self.relative_scatter**2 * square

    def noise_variance(
        self, errors: Tensor, predicted: Prediction | None = None, added: Tensor | float = 0.0
    ) -> Tensor:
        """Return the same of normal noise, plus the variance `added` (N,) that no measurement
        causes; of Student-t noise the variance of a normal distribution whose ±1σ holds as much:
        its own speaks of outliers, and is infinite for ν ≤ 2."""
        width = 1.0 if self.nu is None else float(t.ppf(_UPPER, self.nu))
        return width**2 * self.squared_width(errors, predicted) + added

    def scored(
        self, y: Tensor, errors: Tensor, predicted: Prediction, added: Tensor | float = 0.0
    ) -> inference.DatumScores:
        """Score measurements y (N,) under the predicted extinctions and this noise; added (N,):
        variance of a normal kind on top."""
        width2, variance = self.squared_width(errors, predicted), predicted.variance + added
        if self.nu is None:
            return inference.scores_of_normal(y, predicted.mean, variance + width2)
        return inference.scores_of_student_t(y, predicted.mean, variance, width2, self.nu)

    def with_student_t(self, noise: inference.StudentTNoise) -> "Hyperparameters":
        """Return the same for Student-t noise whose scale multiplies errors and scatter."""
        scale = noise.scale
        return replace(
            self,
            noise=scale * self.noise,
            scatter=scale * self.scatter,
            relative_scatter=scale * self.relative_scatter,
            nu=noise.nu,
        )

    @staticmethod
    def from_dict(values: Any) -> "Hyperparameters":
        """Read the values of `as_dict` in a file; other content is a ValueError."""
        names = {each.name for each in fields(Hyperparameters)}
        needed = {each.name for each in fields(Hyperparameters) if each.default is MISSING}
        numbers = isinstance(values, Mapping) and all(
            (isinstance(v, int | float) and not isinstance(v, bool))
            or (v is None and name not in needed)
            for name, v in values.items()
        )
        if not (numbers and needed <= set(values) <= names):
            raise UserError(
                f"the learned hyperparameters must be numbers {', '.join(sorted(needed))} and "
                f"perhaps others of {', '.join(sorted(names - needed))}, got {values!r:.200}; run "
                "it again"
            )
        return Hyperparameters(**values)

    def as_dict(self) -> dict[str, float]:
        """Return those of the parts that the model has: no scatter of zero, none that is None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        for part in _ABSENT:
            if part.items() <= values.items():
                values = {name: value for name, value in values.items() if name not in part}
        return values


@final
@dataclass(frozen=True, eq=False)
class StarFit:
    """The posterior of the density, and how a fit has reached it.

    summary: what the engine says of its solution, for the report; a residual of iterations is
    `cg_residual`. learning: of the hyperparameters, if any. arrays: what brings the posterior back
    beside hyperparameters and data; empty where it is quickly computed again.
    at_nodes: the density at the nodes of the run's grid, of engines that have it at hand. on_grid:
    a posterior that draws rays by the thousand, of engines whose own does not.
    """

    posterior: AbstractPosterior
    hyperparameters: Hyperparameters
    summary: dict[str, Any]
    learning: Learning | None
    arrays: Arrays = field(default_factory=dict)
    at_nodes: Callable[[], Prediction] | None = None
    on_grid: Callable[[], AbstractPosterior] | None = None

    def for_many_rays(self) -> AbstractPosterior:
        """Return the posterior, or its draws on a grid where every ray is a solve."""
        return self.posterior if self.on_grid is None else self.on_grid()

    def predictions(
        self, observed: Observations, index: Tensor, progress: Progress = unwatched
    ) -> Predictions:
        """Return measured extinctions of some observations beside their prediction, noise
        included."""
        at, rays = self.hyperparameters, observed.batch.functional[index]
        inside = predicted(self.posterior, rays, progress)
        errors, added = observed.error_variance[index], observed.added_variance[index]
        std = (inside.variance + at.noise_variance(errors, inside, added)).sqrt()
        # What has been taken for the dust beyond the box comes back.
        y, beyond = observed.measured[index], observed.expected_beyond[index]
        whole = replace(inside, mean=inside.mean + beyond.to(inside.mean))
        rows = observed.rows[index.cpu().numpy()]
        return Predictions(y, whole.mean, std, at.scored(y, errors, whole, added), rows)
