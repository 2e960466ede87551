"""The engine of "auto", which the learned kernel chooses."""

from dataclasses import dataclass, replace
from typing import Any, final

from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch
from dustmap.engines._exact import ExactEngine
from dustmap.engines._inducing import InducingEngine
from dustmap.engines._inducing_plan import planned
from dustmap.engines._learning import learn_from_start, most_exact
from dustmap.engines._memory import MemoryPlan
from dustmap.engines._pathwise import PathwiseEngine


@final
@dataclass(frozen=True)
class AutomaticEngine(AbstractEngine):
    """Exact, inducing or pathwise, for more than a few point values in few dimensions.

    Inducing points where a grid is fine enough for their full family, which is then as good as the
    exact process and quicker; else the exact process while the memory holds it; else inducing
    points where a grid is fine enough for their other families, and the pathwise engine, which has
    the finer grids, where none is.
    """

    exact: ExactEngine
    inducing: InducingEngine
    pathwise: PathwiseEngine

    @property
    def most_rows(self) -> int:
        return self.pathwise.most_rows

    def plan(self, problem: Problem) -> MemoryPlan:
        """The plan of the engine for the model where learning starts."""
        return self._chosen(problem).plan(problem)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn by the exact evidence of a random part; the engine for the result does the rest."""
        settings = self.exact.settings
        learned = learn_from_start(problem, settings.learning, settings.max_memory, watch)
        engine = self._chosen(replace(problem, model=learned.model))
        return engine.finish(problem, learned, watch)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Refused: a fit is loaded by the engine that was chosen."""
        raise TypeError("load the fit by the engine that was chosen for it")

    def _chosen(self, problem: Problem) -> ExactEngine | InducingEngine | PathwiseEngine:
        """The engine for the kernel and the noise of the problem."""
        settings = self.inducing.settings
        plan, choice = planned(problem, replace(settings, grid=None))
        is_fine = choice is not None and choice.fits and choice.fine_enough
        is_dense = len(problem.data) <= most_exact(settings.max_memory)
        is_full = plan.family == "full" or settings.family != "auto"
        if is_fine and (is_full or not is_dense):
            return self.inducing
        return self.exact if is_dense else self.pathwise
