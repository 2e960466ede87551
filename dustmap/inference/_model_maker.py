"""The gridded model of every value of the kernel, on a torus that follows its length; and the
settings of a global fit, which learns with such models.
"""

import math
from dataclasses import dataclass, field
from typing import final

import torch

from dustmap import gp
from dustmap.gp.covariances import AbstractEstimator
from dustmap.gp.features import (
    ORDERS,
    KrigingFeatures,
    LocalFeatures,
    NestedFeatures,
    StencilOrder,
    stencil_order,
)
from dustmap.gp.kernels import AbstractKernel, SquaredExponentialProfile
from dustmap.inference._state import State, StateReader, state_of
from dustmap.inference.evidence import _newton
from dustmap.inference.evidence._newton_point import AbstractMaker
from dustmap.inference.evidence._student_t_noise import RobustSettings
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._solution import SolveSettings
from dustmap.linalg import AbstractWorld, fast_length

#: A torus is kept while its padding is at least this part of what was asked for,
_LEAST_PADDING = 0.75
#: and while it has at most this many times the points that are needed.
_MOST_POINTS = 4.0
#: The padding makes no axis of the torus longer than this many boxes, or points, unless a length
#: that is given asks for more.
_MOST_BOXES, _MOST_LENGTH = 3, 64
#: By this factor a torus grows that such a length asks for.
_LARGER = 1.1
#: Range of log lengths below the box in which the largest is sought, and the accuracy of it.
_RANGE, _BISECTED = 3.0, 0.01
#: The name of a maker's states.
_MAKER = "model_maker"
#: Relative to the largest eigenvalue: below it a smooth kernel on a fine grid is round-off.
_NUGGETS = {torch.float32: 2e-6, torch.float64: 1e-12}
#: One of so many data finds the start, at most; fewer than so many would not find it.
_START_PART, _LEAST_START = 4, 250


@final
@dataclass(frozen=True)
class GridSettings:
    """How the grid carries the field.

    padding: length scales around the grid. order: nodes per axis of the kriging stencils, None for
    `stencil_order` to choose. dtype: of fields and products. memory: bytes. rows_memory: of
    them for W, None for half.
    """

    padding: float = 4.0
    order: int | None = None
    dtype: torch.dtype = torch.float32
    memory: int = 2**33
    rows_memory: int | None = None

    @property
    def for_rows(self) -> int:
        """Bytes that W may take."""
        return self.memory // 2 if self.rows_memory is None else self.rows_memory


@final
@dataclass(frozen=True)
class _MakerState:
    """The present torus and the order of the stencils, None before they are chosen."""

    torus: tuple[int, ...] | None
    stencils: StencilOrder | None


@final
class ModelMaker(AbstractMaker):
    """Makes the model of a kernel on a grid, or on nested ones, on a torus that follows the
    kernel's length: of nested grids that of the coarsest.

    What it remembers is the torus, and the order of the stencils once that is chosen, with the
    features that were compared for it: the next model of the same kernel has their tables.

    Examples
    --------
    >>> from dustmap.gp import covariances, kernels, likelihoods
    >>> grid = gp.RegularGrid((0.0,), (0.25,), (13,))
    >>> maker = ModelMaker(grid, GridSettings(order=4), covariances.ClosedForm())
    >>> kernel, noise = kernels.Matern32(1.0, dim=1), likelihoods.GaussianLikelihood()
    >>> maker.build(gp.GPModel(kernel, gp.ConstantMean(), noise)).features.prior.torus_shape
    (30,)
    """

    def __init__(
        self,
        grid: gp.RegularGrid | gp.NestedGrids,
        settings: GridSettings,
        estimator: AbstractEstimator,
        world: AbstractWorld | None = None,
    ) -> None:
        self.grid, self.settings, self.estimator = grid, settings, estimator
        self.world = world
        self._box = gp.widened_grids(grid)[0]
        self._nested: gp.NestedPrior | None = None
        self.stencils: StencilOrder | None = None
        self._torus: tuple[int, ...] | None = None
        self._compared: KrigingFeatures | None = None

    @property
    def order(self) -> int:
        """Nodes per axis of the stencils: those of the settings, the chosen ones, or 4."""
        if self.settings.order is not None:
            return self.settings.order
        return 4 if self.stencils is None else self.stencils.order

    def build(self, model: gp.GPModel) -> GridModel:
        """The model; its torus stays that of the last one while the padding suits the kernel."""
        return self.on_torus(model, self._fitted_torus(model.kernel), self.order)

    def snapshot(self) -> State:
        """The torus, and how the order of the stencils was chosen."""
        return state_of(_MAKER, _MakerState(self._torus, self.stencils))

    def restore(self, state: State) -> None:
        reader = StateReader.of(state, _MAKER)
        stored = reader.read(_MakerState)
        torus, dim = stored.torus, self.grid.dim
        if torus is not None and len(torus) != dim:
            raise reader.refusal(f"a torus {torus}, this problem {dim} axes")
        self._torus, self.stencils = torus, stored.stencils

    def on_torus(self, model: gp.GPModel, torus: tuple[int, ...], order: int) -> GridModel:
        """The model on a torus of this shape."""
        return GridModel.of(model, self._features(model.kernel, torus, order))

    def _features(
        self, kernel: AbstractKernel, torus: tuple[int, ...], order: int
    ) -> KrigingFeatures:
        known = self._compared
        place = None if known is None else (known.prior.torus_shape, known.order)
        if known is not None and known.prior.kernel is kernel and place == (torus, order):
            return known
        return self._of_order(self._prior(kernel, torus), order)

    def _of_order(self, prior: gp.GridPrior | gp.NestedPrior, order: int) -> KrigingFeatures:
        if isinstance(prior, gp.NestedPrior):
            return NestedFeatures(prior, order, self.settings.for_rows)
        return LocalFeatures(prior, self.estimator, order, self.settings.for_rows)

    @torch.no_grad()
    def ceilings(self, kernel: AbstractKernel) -> dict[str, float]:
        """Largest log length scale for learning, by the name of the parameter.

        At most that of the box: what is smoother looks the same in it. And no more than what the
        largest torus holds: with longer ones the images would raise the variance at every node.
        """
        sides = [b - a for a, b in zip(self.grid.lower, self.grid.upper, strict=True)]
        high = math.log(max(sides))
        low = high - _RANGE
        while high - low > _BISECTED:
            middle = 0.5 * (low + high)
            there = kernel.with_value("length", torch.tensor(middle, dtype=torch.float64))
            if gp.wrap_inflation(there, self._box, self._largest()) > gp.MOST_INFLATION:
                high = middle
            else:
                low = middle
        return {"length": low}

    @torch.no_grad()
    def choose_order(self, model: gp.GPModel, data: gp.Batch) -> None:
        """Choose the order of the stencils for this model, unless it is given."""
        if self.settings.order is not None:
            return
        prior = self._prior(model.kernel, self._fitted_torus(model.kernel))
        noise = model.likelihood.noise_variance(data)
        compared = {order: self._of_order(prior, order) for order in ORDERS}
        self.stencils = stencil_order(compared, data.functional, noise)
        self._compared = compared[self.stencils.order]

    def _prior(
        self, kernel: AbstractKernel, torus: tuple[int, ...]
    ) -> gp.GridPrior | gp.NestedPrior:
        if isinstance(self.grid, gp.NestedGrids):
            settings, world = self.settings, self.world
            if self._nested is None:
                self._nested = gp.NestedPrior.of(
                    kernel.detached(),
                    self.grid,
                    dtype=settings.dtype,
                    torus_shape=torus,
                    memory=settings.memory,
                    world=world,
                )
            return self._nested.on_torus(kernel, torus)
        return gp.GridPrior.padded(
            kernel,
            self.grid,
            nugget=nugget_for(kernel, self.settings.dtype),
            dtype=self.settings.dtype,
            torus_shape=torus,
            memory=self.settings.memory,
            world=self.world,
        )

    def _fitted_torus(self, kernel: AbstractKernel) -> tuple[int, ...]:
        """The present torus while it suits the kernel, else another one from now on."""
        wanted = self._padded(kernel, self.settings.padding)
        present = self._torus or wanted
        least = self._padded(kernel, _LEAST_PADDING * self.settings.padding)
        covers = all(have >= need for have, need in zip(present, least, strict=True))
        lavish = math.prod(present) > _MOST_POINTS * math.prod(wanted)
        self._torus = present if covers and not lavish else wanted
        return self._torus

    def _padded(self, kernel: AbstractKernel, padding: float) -> tuple[int, ...]:
        torus = gp.torus_for(kernel, self._box, padding)
        limit = 1.0
        while True:
            most = (math.ceil(limit * m) for m in self._largest())
            shape = tuple(
                min(length, fast_length(m)) for length, m in zip(torus, most, strict=True)
            )
            if shape == torus or gp.wrap_inflation(kernel, self._box, shape) <= gp.MOST_INFLATION:
                return shape
            limit *= _LARGER

    def _largest(self) -> tuple[int, ...]:
        """The largest torus that learning asks for."""
        return tuple(max(_MOST_LENGTH, _MOST_BOXES * m) for m in self._box.shape)


def nugget_for(kernel: AbstractKernel, dtype: torch.dtype) -> float:
    """Return the nugget, relative to λ_max, that a kernel needs in a dtype; 0 for rough ones.

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern32, SquaredExponential
    >>> [nugget_for(kernel([1.0]), torch.float32) for kernel in (Matern32, SquaredExponential)]
    [0.0, 2e-06]
    """
    smooth = any(isinstance(term.profile, SquaredExponentialProfile) for term in kernel.terms())
    return _NUGGETS[dtype] if smooth else 0.0


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

    @property
    def vector_memory(self) -> int:
        """Bytes that a solve's vectors may take."""
        return self.memory // 2 if self.solve_memory is None else self.solve_memory

    def solve(self, samples: int, fit_mean: bool) -> SolveSettings:
        """The settings of a solve for so many draws."""
        return SolveSettings(
            rtol=self.rtol,
            max_steps=self.max_steps,
            samples=samples,
            seed=self.seed,
            rank=self.rank,
            memory=self.vector_memory,
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
