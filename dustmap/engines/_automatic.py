"""The engine of "auto": what predicts best within the memory, by rows, columns and kernel.

Every other engine approximates the exact process, so that is what few data get, whatever their
columns, and more of them where no grid is fine enough. `python -m pipelines.reproduce engines` has
the scores that the rest follows: on a grid the full family of inducing points or the pathwise
engine, whichever leaves less of the posterior variance unexplained. The first has few nodes and
none beyond the data, which suits kernels as long as these are wide; the second has as many as short
ones ask for. The structured families of inducing points are not among them: their standard
deviations are too wide and their grids coarser. Where neither is near fine enough, and in more
columns than the four axes of a grid, free inducing points take over.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, final

from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch
from dustmap.engines._exact import ExactEngine
from dustmap.engines._free_points import FreePointsEngine
from dustmap.engines._grids import WIDE_SHARE, GridChoice, times
from dustmap.engines._inducing import InducingEngine
from dustmap.engines._inducing_grid import planned
from dustmap.engines._learning import learn_from_start, most_exact
from dustmap.engines._memory import MemoryPlan
from dustmap.engines._pathwise import PathwiseEngine
from dustmap.engines._pathwise_points import planned_points
from dustmap.gp.functionals import AbstractFunctional, PointValues

#: Columns of a grid at most.
MAX_GRID_DIM = 4
#: Rows up to which a dense fit takes seconds, so that nothing is quicker.
_QUICK = 2_000
#: Rows up to which a dense fit is preferred to a grid that is not quite fine enough.
_MODERATE = 10_000
#: Times the posterior variance beyond which free inducing points predict better than a grid.
_MOST_SHARE = 10.0
#: Operations N M² of a full family at most, a few minutes of a core.
_FULL_WORK = 4e12


_Engine: TypeAlias = ExactEngine | InducingEngine | PathwiseEngine | FreePointsEngine


@final
@dataclass(frozen=True)
class EngineChoice:
    """The name of an engine, "exact", "hip", "global" or "svgp", and the reason for the report."""

    name: str
    reason: str


@final
@dataclass(frozen=True)
class AutomaticEngine(AbstractEngine):
    """The engine that predicts point values best, by their number, their columns and the kernel.

    grid of `inducing`: the user's, on which "hip" is the choice where its full family fits, or
    where a family, blocks or a whitening were asked for, and else "global".
    """

    exact: ExactEngine
    inducing: InducingEngine
    pathwise: PathwiseEngine
    free: FreePointsEngine

    @property
    def most_rows(self) -> int:
        return self.free.most_rows

    def plan(self, problem: Problem) -> MemoryPlan:
        """The plan of the engine for the model where learning starts."""
        return self._named(self.choose(problem).name).plan(problem)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn by the exact evidence of a random part; the engine for the result does the rest."""
        choice = self._by_size(problem)
        if choice is not None and choice.name == "svgp":
            return _reported(self.free.fit(problem, watch), choice)
        settings = self.exact.settings
        learned = learn_from_start(problem, settings.learning, settings.max_memory, watch)
        choice = choice or self._by_kernel(replace(problem, model=learned.model))
        engine = self._named(choice.name)
        if isinstance(engine, FreePointsEngine):
            return _reported(engine.fit(problem, watch), choice)
        problem = replace(problem, model=learned.model)
        return _reported(engine.finish(problem, learned, watch), choice)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """The posterior at the present hyperparameters."""
        choice = self.choose(problem)
        return _reported(self._named(choice.name).condition(problem, watch), choice)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Refused: a fit is loaded by the engine that was chosen."""
        raise TypeError("load the fit by the engine that was chosen for it")

    def choose(self, problem: Problem) -> EngineChoice:
        """The engine for the problem at its kernel and noise."""
        return self._by_size(problem) or self._by_kernel(problem)

    def _by_size(self, problem: Problem) -> EngineChoice | None:
        """Decide by rows and columns alone; None where the kernel decides."""
        n, dim, settings = len(problem.data), problem.model.kernel.dim, self.inducing.settings
        dense = most_exact(settings.max_memory)
        if settings.grid is not None:
            return None
        no_grid = dim > MAX_GRID_DIM or _is_one_place(problem.data.functional)
        if n <= min(dense, _QUICK) or (no_grid and n <= dense):
            return EngineChoice("exact", f"{n:,} rows: dense matrices fit the memory")
        if dim > MAX_GRID_DIM:
            beyond = f"{n:,} rows are more than the {dense:,} of a dense fit"
            reason = f"{beyond}, and {dim} columns more than the {MAX_GRID_DIM} axes of a grid"
            return EngineChoice("svgp", reason)
        return None

    def _by_kernel(self, problem: Problem) -> EngineChoice:
        """Decide by the grid that the kernel and the noise ask for."""
        settings, n = self.inducing.settings, len(problem.data)
        if settings.grid is not None:
            return self._on_given_grid(problem)
        plan, full = planned(problem, self._full.settings)
        assert full is not None
        dense = most_exact(settings.max_memory)
        # Beside the n³ / 3 operations of a dense fit.
        is_quick = n > dense or 3 * plan.n_features**2 <= n**2 or self._is_asked_for
        if full.fits and full.fine_enough and is_quick:
            return EngineChoice("hip", f"{full.grid.size:,} inducing points are fine enough")
        if n <= min(dense, _MODERATE):
            return EngineChoice("exact", f"{n:,} rows: dense matrices fit the memory")
        choice, share = self._finer(problem, full)
        if self._is_asked_for:
            return choice
        if share > WIDE_SHARE and n <= dense:
            return EngineChoice("exact", f"dense matrices fit the memory; {choice.reason}")
        if share > _MOST_SHARE:
            return EngineChoice("svgp", f"no grid is fine enough: {choice.reason}")
        return choice

    def _finer(self, problem: Problem, full: GridChoice) -> tuple[EngineChoice, float]:
        """Of "hip" on the grid of its full family and "global" that whose grid leaves the less of
        the posterior variance unexplained, and how many times that."""
        _, wide = planned_points(problem, self.pathwise.settings.points)
        assert wide is not None
        if wide.fine_enough or not full.fits or wide.posterior_share <= full.posterior_share:
            name, grid = "global", wide
        else:
            name, grid = "hip", full
        nodes, share = times(grid.grid.shape), grid.posterior_share
        reason = f"a grid of {nodes} nodes leaves {share:.2g} times the posterior variance"
        n, dense = len(problem.data), most_exact(self.inducing.settings.max_memory)
        if n > dense:
            reason = f"{n:,} rows are more than the {dense:,} of a dense fit; {reason}"
        return EngineChoice(name, reason), share

    def _on_given_grid(self, problem: Problem) -> EngineChoice:
        """Decide for the user's grid."""
        plan, _ = planned(problem, self.inducing.settings)
        if plan.family == "full" or self._is_asked_for:
            return EngineChoice("hip", f"the given grid with its {plan.family} family")
        reason = f"the given grid has more nodes, {plan.grid.size:,}, than a full family"
        return EngineChoice("global", reason)

    @property
    def _is_asked_for(self) -> bool:
        """Whether there are arguments that inducing points on a grid alone have."""
        s = self.inducing.settings
        return (s.family, s.whitening, s.block) != ("auto", "auto", None)

    @property
    def _full(self) -> InducingEngine:
        """Inducing points in the family that they were chosen for, whatever is learned next."""
        settings = self.inducing.settings
        if self._is_asked_for or settings.grid is not None:
            return self.inducing
        return InducingEngine(replace(settings, family="full", most_work=_FULL_WORK))

    def _named(self, name: str) -> _Engine:
        """The engine of a choice."""
        engines: dict[str, _Engine] = {
            "exact": self.exact,
            "hip": self._full,
            "global": self.pathwise,
            "svgp": self.free,
        }
        return engines[name]


def _reported(fit: EngineFit, choice: EngineChoice) -> EngineFit:
    """The fit with the choice in its report."""
    return replace(fit, report={**fit.report, "engine_choice": asdict(choice)})


def _is_one_place(functional: AbstractFunctional) -> bool:
    """Whether all rows have the same inputs, around which there is no grid."""
    if not isinstance(functional, PointValues):
        return False
    return bool((functional.x == functional.x[:1]).all())
