"""The hip engine: inducing points on a grid, any whitening and family (Wu et al. 2021).

The feature map is a value of the plan: "hip" (PCG on the box), "torus" (points on all of the padded
torus), "cholesky" or "ciq". Gaussian noise has its closed form, one pass for S and CG for the mean;
epochs of natural-gradient steps on minibatches converge to the same.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, final

import torch

from dustmap import inference
from dustmap.engines import _engine, _inducing_grid, _learning
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch, with_errors
from dustmap.engines._grids import first_length, judged_grid
from dustmap.engines._inducing_grid import ExtrapolatingFeatures, InducingPlan, InducingSettings
from dustmap.engines._inducing_report import error_advice, rows_report, sizes, steps_advice
from dustmap.engines._memory import WORKING_COMPONENT, Component, During, MemoryPlan
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, GridPrior, RegularGrid, families, features
from dustmap.gp.features import AbstractFeatureMap, HIPFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import VariationalModel, VariationalPosterior
from dustmap.linalg import TilePartition

log = logging.getLogger(__name__)

#: Data whose rounding stands for that of all.
_ROUNDED = 64
#: Steps of the solve for the mean, at most: tens to hundreds are the rule.
_MAX_STEPS = 3000
#: Nodes of the quadrature of K_uu^{-1/2}: its error is below the rtol of the rows up to conditions
#: of 10¹⁰ and 10¹¹.
_CIQ_NODES = {torch.float32: 18, torch.float64: 24}
#: Least nugget of a Cholesky factor of K_uu.
_LEAST_NUGGET = 1e-10
#: Largest part of the noise variance that rounding to float32 may add, and least noise variance
#: over the prior variance.
_ROUNDING_SHARE, _LEAST_NOISE = 0.1, 1e-13
#: Copies of dense rows, with the parts that are joined and products with them: of rays by a factor,
#: of rays by iterations, and of points and the torus, which need no solve. Bytes of rows that are
#: made anew; copies of a minibatch with its products.
_FACTOR_COPIES, _SOLVED_COPIES, _COPIES, _STREAMED, _MINIBATCH = 2.75, 1.75, 1.25, 2**28, 4


@final
@dataclass(frozen=True)
class InducingEngine(AbstractEngine):
    """q(ε) = N(m, S) in a structured family, ε whitened inducing points on a grid."""

    settings: InducingSettings
    most_rows: ClassVar[int] = 10_000_000

    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes of inducing points at the length scale where learning starts."""
        plan, _ = _inducing_grid.planned(problem, self.settings)
        is_stored = plan.bytes_rows <= plan.max_memory // 2
        is_lean = isinstance(problem.data.functional, PointValues) or plan.whitening == "torus"
        has_factor = plan.whitening == "hip" and plan.grid.size <= HIPFeatures.dense_below
        copies = _COPIES if is_lean else _FACTOR_COPIES if has_factor else _SOLVED_COPIES
        rows = round(copies * plan.bytes_rows) if is_stored else _STREAMED
        if self.settings.epochs:
            part = min(self.settings.batch, len(problem.data)) / len(problem.data)
            rows = max(rows, round(_MINIBATCH * part * plan.bytes_rows))
        spectra = f"spectra of {plan.grid.size:,}"
        statistics = f"{plan.family}, statistics of {plan.n_features:,} variables"
        made_of = f"{plan.n:,} of {plan.n_features:,} features, and what they are made of"
        parts = [
            Component("inducing points", plan.bytes_prior, During.FIT, spectra),
            Component("family", plan.bytes_family, During.FIT, statistics),
            Component("rows", rows, During.FIT, made_of),
            *_learning.learning_component(problem, self.settings.learning),
            WORKING_COMPONENT,
        ]
        if has_factor:
            what = f"of the covariance of {plan.grid.size:,} inducing points, float64"
            parts.insert(1, Component("factor", 16 * plan.grid.size**2, During.FIT, what))
        how = "stored" if is_stored else "computed anew in every pass"
        return MemoryPlan(tuple(parts), {"rows of the data": how})

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn by the exact evidence of a random part; then the posterior of all data."""
        settings = self.settings
        learned = _learning.learn_from_start(problem, settings.learning, settings.max_memory, watch)
        return self.finish(problem, learned, watch)

    def finish(self, problem: Problem, learned: _learning.Learned, watch: Watch) -> EngineFit:
        """The posterior at the learned hyperparameters."""
        model, report = _within_the_box(learned.model, problem.single)
        learned = replace(learned, model=model)
        if isinstance(problem.data.functional, PointValues):
            refuse_negligible_noise(learned.model, problem.data)
        with watch.conditioning():
            fit = self.condition(replace(problem, model=learned.model), watch)
        learning = learned.learning
        if report and learning is not None and learning.errors is not None:
            learning = replace(learning, errors=learning.errors.holding("length"))
        fit = replace(fit, report={**fit.report, **report}, learning=learning)
        return with_errors(fit, problem.data)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """The posterior at the present hyperparameters."""
        plan, choice = _inducing_grid.planned(problem, self.settings)
        plan.check()
        plan, advice = self._precise_enough(problem, plan)
        if self.settings.epochs:
            model = self._model(problem.model.fixed(), plan)
            fit = self._stochastic(problem, model, plan, watch.within("condition"))
        else:
            fit = self._direct(problem, self._model(problem.model, plan), plan, watch)
        if choice is None and isinstance(problem.data.functional, PointValues):
            choice = judged_grid(problem, plan.grid)
        report = {**fit.report, "expected": {} if choice is None else choice.expected}
        coarse = [] if choice is None else choice.advice
        report["advice"] = [*advice, *(report["advice"] or coarse)]
        return replace(fit, report=report)

    def prepared(self, problem: Problem) -> tuple[VariationalModel, InducingPlan]:
        """The model at the present hyperparameters that data would be fitted with, and its plan."""
        plan, _ = _inducing_grid.planned(problem, self.settings)
        return self._model(problem.model.fixed(), plan), plan

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """q from its statistics, or computed again where none were saved."""
        if plan is None and not arrays:
            return self.condition(problem, Watch())
        if plan is None:
            plan, _ = _inducing_grid.planned(problem, self.settings)
        device = problem.data.y.device
        posterior = variational_posterior(self._model(problem.model, plan), arrays, device)
        return replace(self._fit(problem, posterior, plan, None, {}), model=problem.model)

    @torch.no_grad()
    def _model(self, model: GPModel, plan: InducingPlan) -> VariationalModel:
        phi = self._features(model.kernel, plan)
        return VariationalModel(phi, model.mean, model.likelihood, make_family(plan))

    def _features(self, kernel: AbstractKernel, plan: InducingPlan) -> AbstractFeatureMap:
        """Rows of Φ; for point values on a grid of their own, of places beyond it as well."""
        settings, grid, dtype = self.settings, plan.grid, plan.dtype
        nugget = settings.nugget
        if nugget is None:
            nugget = inference.nugget_for(kernel, dtype)
        estimator, steps = settings.estimator, settings.pcg_steps
        if plan.whitening == "cholesky":
            nugget = max(nugget, _LEAST_NUGGET) if settings.nugget is None else nugget
            return features.CholeskyFeatures(
                kernel, grid, estimator, nugget=nugget, rows_dtype=dtype
            )
        if plan.whitening == "ciq":
            return features.CIQFeatures(
                kernel,
                grid,
                estimator,
                nugget=nugget,
                rows_dtype=dtype,
                rtol=plan.rtol,
                nodes=_CIQ_NODES[dtype],
            )
        prior = GridPrior.padded(
            kernel, grid, nugget=nugget, dtype=dtype, torus_shape=plan.torus_shape
        )
        inner: AbstractFeatureMap = features.TorusFeatures(prior, estimator)
        if plan.whitening == "hip":
            inner = HIPFeatures(prior, estimator, rtol=plan.rtol, max_steps=steps)
        if settings.points_per_length is not None:
            return inner
        return ExtrapolatingFeatures.around(inner, prior, plan.rtol, steps)

    def _direct(
        self, problem: Problem, model: VariationalModel, plan: InducingPlan, watch: Watch
    ) -> EngineFit:
        """S by one pass and the mean by CG; rows are stored where half of the memory holds them.

        On a grid over the data a learned mean gets the coefficients that fit these best, and their
        spread enters the posterior. On the map's box it stays as the evidence had it: a fit of the
        mean would absorb what the inducing points leave unexplained of a ray.
        """
        data = problem.data
        source = inference.RowSource(model.features, data.functional, plan.max_memory // 2)
        solution = inference.solve_direct(
            model,
            data,
            source,
            rtol=1e-6 if model.features.dtype == torch.float64 else 1e-4,
            max_steps=_MAX_STEPS,
            progress=watch.progress,
        )
        state, elbo = solution.state, solution.elbo
        spread = None
        if self.settings.points_per_length is None:
            spread = inference.mean_spread(model, state, data, source, max_steps=_MAX_STEPS)
        if spread is not None:
            fitted = inference.fit_mean(model, state, data, source, spread)
            model, state = fitted.model, fitted.state
            elbo = inference.full_elbo(model, state, data, source)
        solve = solution.solve
        report, advice = rows_report(problem, model, plan, source)
        advice += [] if solve.converged else [solve.message()]
        report |= {
            "solve": {
                "status": solve.worst.name.lower(),
                "steps": int(solve.steps.max()),
                "residual": float(solve.residuals.max()),
                "error": solution.error,
            },
            "advice": advice + error_advice(solution.error, plan.dtype),
        }
        posterior = VariationalPosterior(model, state, spread)
        return self._fit(problem, posterior, plan, elbo, report)

    def _stochastic(
        self, problem: Problem, model: VariationalModel, plan: InducingPlan, watch: Watch
    ) -> EngineFit:
        """Natural-gradient steps on minibatches, in an order set by the seed."""
        data, settings = problem.data, self.settings
        source = inference.RowSource(model.features, data.functional, plan.max_memory // 2)
        last = inference.fit_svi(
            model,
            data,
            source,
            inference.SVISettings(batch_size=settings.batch, epochs=settings.epochs),
            torch.Generator().manual_seed(settings.seed),
            progress=_epochs(len(data), watch),
            checkpointer=watch.checkpointer,
        )
        elbo = inference.full_elbo(model, last.posterior, data, source)
        left = inference.unsettled(model, last.posterior, data, source)
        report, advice = rows_report(problem, model, plan, source)
        advice += steps_advice(left)
        report |= {"steps": last.step, "epochs": last.epoch, "gradient": left, "advice": advice}
        posterior = VariationalPosterior(model, last.posterior)
        return self._fit(problem, posterior, plan, elbo, report)

    def _fit(
        self,
        problem: Problem,
        posterior: VariationalPosterior,
        plan: InducingPlan,
        elbo: float | None,
        report: dict[str, Any],
    ) -> EngineFit:
        """The fit with its arrays, or on the map's box with its places.

        A posterior in closed form on a box is computed again; one of many epochs is kept.
        """
        learned = replace(problem.model, mean=posterior.model.mean)
        report = {**sizes(plan, posterior.model.features), **report}
        on_box = problem.box is not None and self.settings.points_per_length is not None
        arrays = {} if on_box and not self.settings.epochs else variational_arrays(posterior)
        fit = EngineFit(posterior, learned, report, evidence=elbo, arrays=arrays, plan=plan)
        if not on_box:
            return fit
        places = _inducing_grid.PlacesAndRays.of(posterior)
        nodes = PointValues(problem.nodes.points(device=posterior.state.mean.device))
        return replace(
            fit,
            posterior=places,
            plan=None,
            # Scores, maps and figures ask for the same nodes.
            at_nodes=cache(partial(places.predict, nodes)),
            on_grid=partial(_inducing_grid.draws_on_grid, posterior, plan.grid, self.settings.seed),
        )

    def _precise_enough(
        self, problem: Problem, plan: InducingPlan
    ) -> tuple[InducingPlan, list[str]]:
        """The plan, in float64 where rounding to float32 would drown point values; and advice."""
        if plan.dtype == torch.float64 or not isinstance(problem.data.functional, PointValues):
            return plan, []
        try:
            share = self._rounding_share(problem, plan)
        except ValueError:  # the features of a nearly singular prior explain more than there is
            share = math.inf
        if share <= _ROUNDING_SHARE:
            return plan, []
        plan = replace(plan, dtype=torch.float64)
        plan.check()
        advice = (
            f"fitted in float64: rounding in float32 would add {share:.2g} times the noise "
            f'variance; pass dtype="float64"'
        )
        return plan, [advice]

    @torch.no_grad()
    def _rounding_share(self, problem: Problem, plan: InducingPlan) -> float:
        """Variance that rounding to the plan's precision adds to f, over the noise variance.

        Var δφᵀε = ‖δφ‖² for the error δφ of a row: the median of some rows, beside float64.
        """
        data, kernel = problem.data, problem.model.kernel
        some = data[slice(0, len(data), max(1, len(data) // _ROUNDED))]
        exact, rounded = (
            self._features(kernel, replace(plan, dtype=dtype)).rows(some.functional).phi
            for dtype in (torch.float64, plan.dtype)
        )
        noise = problem.model.likelihood.noise_variance(some)
        return float(((rounded - exact).square().sum(-1) / noise).median())


def variational_arrays(posterior: VariationalPosterior) -> Arrays:
    """Arrays of q(ε) and of the spread of a fitted mean, for `variational_posterior`."""
    q = posterior.state
    return _engine.arrays_of({"mean": q.mean, "statistics": q.statistics}, posterior.spread)


def variational_posterior(
    model: VariationalModel, arrays: Arrays, device: torch.device | None = None
) -> VariationalPosterior:
    """The posterior of `variational_arrays`, on a device."""
    tensors = _engine.tensors_of(arrays, device)
    q = model.family.posterior(tensors["mean"], tensors["statistics"])
    spread = inference.CoefficientSpread.of_tensors(tensors)
    return VariationalPosterior(model, q, spread)


def make_family(plan: InducingPlan) -> families.AbstractFamily:
    """The family of the plan."""
    M_w, most = plan.n_features, plan.max_memory
    if plan.family == "mean-field":
        return families.MeanFieldFamily(M_w)
    if plan.family == "low-rank":
        return families.LowRankDiagonalFamily(M_w, plan.rank, max_bytes=most)
    if plan.family == "full":
        return families.FullRankFamily(M_w, max_bytes=most)
    assert plan.block is not None
    return families.BlockFamily(TilePartition(plan.torus_shape, plan.block), max_bytes=most)


def _within_the_box(model: GPModel, box: RegularGrid | None) -> tuple[GPModel, dict[str, float]]:
    """The model with a length scale no longer than the box, which a torus can hold and which is as
    good as a longer one, and the entry of the report."""
    if box is None:
        return model, {}
    length = first_length(model.kernel)
    longest = max(b - a for a, b in zip(box.lower, box.upper, strict=True))
    if length <= longest:
        return model, {}
    log.info("length scale %.4g, beyond the box: %.4g taken", length, longest)
    log_longest = torch.tensor(math.log(longest), dtype=torch.float64)
    kernel = model.kernel.with_value("length", log_longest)
    return replace(model, kernel=kernel), {"length_learned_beyond_the_box": length}


@torch.no_grad()
def refuse_negligible_noise(model: GPModel, data: Batch) -> None:
    """Refuse 1/σ² ≫ 10¹³ / k(0), beside which I + Φᵀ Σ⁻¹ Φ loses its identity to rounding."""
    least = float(model.likelihood.noise_variance(data).min() / model.kernel.variance())
    if least < _LEAST_NOISE:
        raise UserError(
            f"noise_std is as small as {least**0.5:.1e} of the prior standard deviation, too small "
            f'for inducing points in float64: use noise="jitter" to learn more noise on top, or '
            f'engine="exact"'
        )


def _epochs(n: int, watch: Watch) -> Callable[[inference.SVIState], None]:
    """Log every epoch, and pass its numbers to `watch`."""
    last = [0]

    def after(state: inference.SVIState) -> None:
        if state.epoch > last[0]:
            last[0] = state.epoch
            elbo = state.taken.elbo / n
            log.info("epoch %d: log-evidence per datum at least %.4g", state.epoch, elbo)
            watch.on_step({"part": "epochs", "epoch": state.epoch, "elbo_per_star": elbo})

    return after
