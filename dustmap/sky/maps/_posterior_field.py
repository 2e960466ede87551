"""The density that any engine's posterior describes, by its predictions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, final, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction, RegularGrid
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.sky.maps import _field, _quantities
from dustmap.sky.maps._field import DEPTH, EVERY, AbstractDensityField, Planes, Point
from dustmap.sky.maps._node_field import NodeTable
from dustmap.sky.maps._quantities import PERCENTILES, MapRequest, Quantity
from dustmap.sky.maps._trilinear import Cells
from dustmap.sky.systems import ExtinctionSystem

#: Functionals answered at once.
_CHUNK = 4096


@runtime_checkable
class LogMoments(Protocol):
    """A posterior of a positive field: mean and standard deviation of ln f, (N,) each."""

    def log_moments(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]: ...


@final
@dataclass(frozen=True, eq=False)
class OwnNodes:
    """Mean and variance at the nodes of `grid`, which some engines have at hand.

    coverage (M,), where it is known better than by the standard deviation: multilinear in between.
    """

    grid: RegularGrid
    predict: Callable[[], Prediction]
    coverage: Tensor | None = None


@final
@dataclass(frozen=True, eq=False)
class PosteriorField(AbstractDensityField):
    """Any posterior in the box from `lower_corner` to `upper_corner`.

    prior_std: of ρ in mag/pc before the data, of ln ρ where the posterior has `log_moments`.
    stored_samples: how many draws `posterior.sample` gives that are the same field for every
    functional; 0 for none. seed: of what such draws add at random.
    """

    posterior: AbstractPosterior
    extinction_system: ExtinctionSystem
    lower_corner: Point
    upper_corner: Point
    prior_std: float
    stored_samples: int = 0
    own: OwnNodes | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prior_std > 0:
            raise UserError(f"prior_std: expected more than 0, got {self.prior_std}")

    @property
    def system(self) -> ExtinctionSystem:
        return self.extinction_system

    @property
    def lower(self) -> Point:
        return self.lower_corner

    @property
    def upper(self) -> Point:
        return self.upper_corner

    @property
    def n_samples(self) -> int:
        return self.stored_samples

    @property
    def positive(self) -> bool:
        return isinstance(self.posterior, LogMoments)

    @torch.no_grad()
    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        self.check(request)
        _field.refuse_coverage_of_rays(functional, request)
        return self._evaluate(functional, request, 0)

    def _evaluate(
        self, functional: AbstractFunctional, request: MapRequest, stream: int
    ) -> dict[str, NDArray[np.float32]]:
        """Answer with the random numbers of a stream, so that slabs do not change what is drawn."""
        generator = torch.Generator()
        generator.manual_seed((self.seed << 20) + stream)
        return _field.in_chunks(
            functional, _CHUNK, request, lambda part: self._answer(part, request, generator)
        )

    @torch.no_grad()
    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        self.check(request)
        self.check_grid(grid)
        at_hand = self._at_hand(grid, request)
        missing = request.without(at_hand)
        for start, stop in _field.slabs(grid.shape[2], depth, part):
            arrays = _field.empty_arrays(grid, request, stop - start)
            for k in range(start, stop):
                answers = _cut(at_hand, grid, k)
                if missing is not None:
                    answers |= self._plane(grid, k, missing)
                for name, values in answers.items():
                    plane = values.reshape(*values.shape[:-1], *grid.shape[1::-1])
                    arrays[name][..., k - start, :, :] = plane
            yield Planes(start, stop, arrays)

    def _plane(
        self, grid: RegularGrid, k: int, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        """All of plane k, in the order of (y, x)."""
        x, y, z = grid.axes(self.device)
        yy, xx = torch.meshgrid(y, x, indexing="ij")
        points = torch.stack([xx, yy, z[k].expand_as(xx)], dim=-1).reshape(-1, 3)
        return self._evaluate(PointValues(points), request, k)

    def _at_hand(self, grid: RegularGrid, request: MapRequest) -> dict[str, NDArray[np.float32]]:
        """Take what the engine has at its own nodes, in the order of (x, y, z): no samples."""
        if self.own is None or self.own.grid != grid or self.positive:
            return {}
        answers = _of_normal(self.own.predict(), request, self.prior_std)
        if self.own.coverage is not None and Quantity.COVERAGE in request:
            answers[Quantity.COVERAGE.value] = self.own.coverage
        return _field.as_numpy(answers)

    def _answer(
        self, functional: AbstractFunctional, request: MapRequest, generator: torch.Generator
    ) -> dict[str, Tensor]:
        answers: dict[str, Tensor] = {}
        if isinstance(self.posterior, LogMoments):
            answers = _of_log_normal(self.posterior, functional, request, self.prior_std)
            if request.any_of((Quantity.MEAN, Quantity.STD)):
                answers |= _moments(self.posterior.predict(functional))
        elif request.cubes:
            answers = _of_normal(self.posterior.predict(functional), request, self.prior_std)
            if self._covered is not None and Quantity.COVERAGE in request:
                assert isinstance(functional, PointValues)  # coverage is of places only
                cells = Cells.of(self._covered.grid, functional.x.double().cpu().numpy())
                answers[Quantity.COVERAGE.value] = self._covered.at(cells)[:, 0]
        if request.samples:
            draws = self.posterior.sample(functional, request.samples, generator)
            answers[Quantity.SAMPLES.value] = draws
        return answers

    @cached_property
    def _covered(self) -> NodeTable | None:
        """Coverage at the nodes, where the engine knows it."""
        if self.own is None or self.own.coverage is None:
            return None
        return NodeTable.of(self.own.grid, self.own.coverage.cpu()[None])


def _moments(prediction: Prediction) -> dict[str, Tensor]:
    return {Quantity.MEAN.value: prediction.mean, Quantity.STD.value: prediction.std}


def _of_normal(prediction: Prediction, request: MapRequest, prior_std: float) -> dict[str, Tensor]:
    answers = _moments(prediction)
    for quantity, q in PERCENTILES.items():
        answers[quantity.value] = prediction.mean + _quantities.normal_quantile(q) * prediction.std
    if Quantity.COVERAGE in request:
        answers[Quantity.COVERAGE.value] = _quantities.coverage(prediction.std, prior_std)
    return {name: values for name, values in answers.items() if Quantity(name) in request}


def _of_log_normal(
    posterior: LogMoments, functional: AbstractFunctional, request: MapRequest, prior_std: float
) -> dict[str, Tensor]:
    if not request.any_of((*PERCENTILES, Quantity.COVERAGE)):
        return {}
    centre, width = posterior.log_moments(functional)
    answers = {
        quantity.value: (centre + _quantities.normal_quantile(q) * width).exp()
        for quantity, q in PERCENTILES.items()
        if quantity in request
    }
    if Quantity.COVERAGE in request:
        answers[Quantity.COVERAGE.value] = _quantities.coverage(width, prior_std)
    return answers


def _cut(
    nodes: dict[str, NDArray[np.float32]], grid: RegularGrid, k: int
) -> dict[str, NDArray[np.float32]]:
    """Plane k in the order of (y, x) of values in the order of (x, y, z)."""
    return {
        name: values.reshape(grid.shape)[:, :, k].transpose().ravel()
        for name, values in nodes.items()
    }
