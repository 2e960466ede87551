"""The hip engine: inducing points on a grid, any whitening and family (Wu et al. 2021).

The feature map is a value of the plan: "hip" (PCG on the box), "torus" (points on all of the padded
torus), "cholesky" or "ciq". Gaussian noise has its closed form, one pass for S and CG for the mean;
epochs of natural-gradient steps on minibatches lead there, too.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, final

import torch

from dustmap.engines._engine import (
    AbstractEngine,
    Arrays,
    EngineFit,
    Problem,
    Watch,
)
from dustmap.engines._exact import learning_component
from dustmap.engines._extrapolation import ExtrapolatingFeatures
from dustmap.engines._grids import coarse_advice
from dustmap.engines._inducing_plan import InducingPlan, InducingSettings, planned
from dustmap.engines._inducing_posterior import PlacesAndRays, draws_on_grid
from dustmap.engines._learning import (
    Learned,
    learn_from_start,
    refine_noise,
    refined_learning,
)
from dustmap.engines._memory_plan import WORKING, Component, During, MemoryPlan
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, GridPrior, RegularGrid
from dustmap.gp.families import (
    AbstractFamily,
    AbstractGaussian,
    BlockFamily,
    FullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.gp.features import (
    AbstractFeatureMap,
    CholeskyFeatures,
    CIQFeatures,
    HIPFeatures,
    TorusFeatures,
)
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import (
    CoefficientSpread,
    RowSource,
    SVISettings,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    fit_mean,
    fit_svi,
    full_elbo,
    mean_spread,
    nugget_for,
    solve_direct,
)
from dustmap.linalg import TilePartition

log = logging.getLogger(__name__)

MOST_ROWS = 10_000_000
#: Data whose residual variance stands for that of all, and whose rounding does.
_SAMPLE, _ROUNDED = 2000, 64
#: Of the solve for the mean: tens to hundreds are the rule.
_MAX_STEPS = 3000
#: Least nugget of a Cholesky factor of K_uu.
_LEAST_NUGGET = 1e-10
#: Largest part of the noise variance that rounding to float32 may add, and least noise variance
#: over the prior variance.
_ROUNDING_SHARE, _LEAST_NOISE = 0.1, 1e-13
#: Of dense rows of rays and of points, with the parts that are joined and products with them; of
#: rows made anew.
_ROW_COPIES, _POINT_COPIES, _STREAMED = 2.75, 1.25, 2**28


@final
@dataclass(frozen=True)
class InducingEngine(AbstractEngine):
    """q(ε) = N(m, S) in a structured family, ε whitened inducing points on a grid."""

    settings: InducingSettings

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    def plan(self, problem: Problem) -> MemoryPlan:
        """Of inducing points at the length scale where learning starts."""
        plan, n = planned(problem, self.settings).plan, len(problem.data)
        is_stored = plan.bytes_rows <= plan.max_memory // 2
        is_points = isinstance(problem.data.functional, PointValues)
        copies = _POINT_COPIES if is_points else _ROW_COPIES
        rows = round(copies * plan.bytes_rows) if is_stored else _STREAMED
        parts = [
            Component(
                "inducing points", plan.bytes_prior, During.FIT, f"spectra of {plan.grid.size:,}"
            ),
            Component(
                "family",
                plan.bytes_family,
                During.FIT,
                f"{plan.family}, statistics of {plan.n_features:,} variables",
            ),
            Component(
                "rows",
                rows,
                During.FIT,
                f"{n:,} of {plan.n_features:,} features, and what they are made of",
            ),
            *learning_component(problem, self.settings.learning),
            Component("working space", WORKING, During.WHOLE, "chunks of rows and of transforms"),
        ]
        if plan.whitening == "hip" and plan.grid.size <= HIPFeatures.dense_below:
            what = f"of the covariance of {plan.grid.size:,} inducing points, float64"
            parts.insert(1, Component("factor", 16 * plan.grid.size**2, During.FIT, what))
        how = "stored" if is_stored else "computed anew in every pass"
        return MemoryPlan(tuple(parts), {"rows of the data": how})

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn by the exact evidence of a random part; then the posterior of all data."""
        settings = self.settings
        how = settings.learning, settings.max_memory, watch.within("learn")
        return self.finish(problem, learn_from_start(problem, *how), watch)

    def finish(self, problem: Problem, learned: Learned, watch: Watch) -> EngineFit:
        """The posterior at the kernel that was learned; the noise of point values is refined."""
        model, report = _within_the_box(learned.model, problem.box)
        learning = learned.learning
        if isinstance(problem.data.functional, PointValues):
            settings = self.settings.learning
            with watch.stage("learning"):
                refined = refine_noise(model, problem.data, settings.rows, settings.seed)
            model, learning = refined.model, refined_learning(learning, None, refined)
            refuse_negligible_noise(model, problem.data)
        with watch.stage("posterior"):
            fit = self.condition(replace(problem, model=model), watch)
        return replace(fit, report={**fit.report, **report}, learning=learning)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """The posterior at the present hyperparameters."""
        found = planned(problem, self.settings)
        found.plan.check()
        plan, advice = self._precise_enough(problem, found.plan)
        variational = self._model(problem.model, plan)
        if self.settings.epochs:
            variational = self._model(problem.model.fixed(), plan)
            fit = self._stochastic(problem, variational, plan, watch.within("condition"))
        else:
            fit = self._direct(problem, variational, plan, watch)
        expected = {} if found.choice is None else found.choice.expected
        report = {**fit.report, "expected": expected}
        report["advice"] = [*advice, *report["advice"]]
        return replace(fit, report=report)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """q from its statistics where they were kept, else computed again."""
        if plan is None:
            return self.condition(problem, Watch())
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        model = self._model(problem.model, plan)
        q = model.family.posterior(tensors["mean"], tensors["statistics"])
        posterior = VariationalPosterior(model, q, CoefficientSpread.of_tensors(tensors))
        return EngineFit(posterior, problem.model, plan=plan)

    @torch.no_grad()
    def _model(self, model: GPModel, plan: InducingPlan) -> VariationalModel:
        features = self._features(model.kernel, plan)
        return VariationalModel(features, model.mean, model.likelihood, make_family(plan))

    def _features(self, kernel: AbstractKernel, plan: InducingPlan) -> AbstractFeatureMap:
        """Rows of Φ; for point values on a grid of their own, of places beyond it as well."""
        settings, grid, dtype = self.settings, plan.grid, plan.dtype
        nugget = nugget_for(kernel, dtype) if settings.nugget is None else settings.nugget
        estimator, steps = settings.estimator, settings.pcg_steps
        if plan.whitening == "cholesky":
            nugget = max(nugget, _LEAST_NUGGET) if settings.nugget is None else nugget
            return CholeskyFeatures(kernel, grid, estimator, nugget=nugget, rows_dtype=dtype)
        if plan.whitening == "ciq":
            how = {"nugget": nugget, "rows_dtype": dtype, "rtol": plan.rtol}
            return CIQFeatures(kernel, grid, estimator, **how)  # type: ignore[arg-type]
        prior = GridPrior.padded(
            kernel, grid, nugget=nugget, dtype=dtype, torus_shape=plan.torus_shape
        )
        inner: HIPFeatures | TorusFeatures = TorusFeatures(prior, estimator)
        if plan.whitening == "hip":
            inner = HIPFeatures(prior, estimator, rtol=plan.rtol, max_steps=steps)
        if settings.points_per_length is not None:
            return inner
        # Beyond the box the images of the wrapped kernel would repeat the opposite face: there the
        # plain kernel says how a point depends on the nodes.
        plain = HIPFeatures(replace(prior, wrapping=None), rtol=plan.rtol, max_steps=steps)
        return ExtrapolatingFeatures(inner, plain, grid)

    def _direct(
        self, problem: Problem, model: VariationalModel, plan: InducingPlan, watch: Watch
    ) -> EngineFit:
        """S by one pass and the mean by CG; rows are kept where half of the memory holds them.

        On a grid over the data a learned mean gets the coefficients that fit these best, in place,
        and their spread enters the posterior. On the map's box it stays as the evidence had it: the
        inducing points leave more of a ray unexplained than a fit of the mean could overlook.
        """
        data = problem.data
        source = RowSource(model.features, data.functional, plan.max_memory // 2)
        solution = solve_direct(
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
            spread = mean_spread(model, state, data, source, max_steps=_MAX_STEPS)
        if spread is not None:
            fitted = fit_mean(model, state, data, source, spread)
            model, state = fitted.model, fitted.state
            elbo = full_elbo(model, state, data, source)
        with torch.no_grad():
            # Of the median datum: a part of the data is enough.
            some = slice(0, len(data), max(1, len(data) // _SAMPLE))
            rows, noise = source.select(some), model.likelihood.noise_variance(data)[some]
            ratio = float((rows.residual_variance / noise).median())
        solve = solution.solve
        advice = [*coarse_advice(ratio), *_row_advice(rows.solves)]
        advice += [] if solve.converged else [solve.message()]
        report = {
            **_sizes(plan, model.features),
            "rows": asdict(rows.solves),
            "solve": {
                "status": solve.worst.name.lower(),
                "steps": int(solve.steps.max()),
                "residual": float(solve.residuals.max()),
            },
            "residual_ratio": ratio,
            "advice": advice,
        }
        return self._fit(problem, model, plan, state, spread, elbo, report)

    def _stochastic(
        self, problem: Problem, model: VariationalModel, plan: InducingPlan, watch: Watch
    ) -> EngineFit:
        """Natural-gradient steps on minibatches, in an order that the seed gives."""
        data, settings = problem.data, self.settings
        source = RowSource(model.features, data.functional, plan.max_memory // 2)
        last = fit_svi(
            model,
            data,
            source,
            SVISettings(batch_size=settings.batch, epochs=settings.epochs),
            torch.Generator().manual_seed(settings.seed),
            progress=_epochs(len(data), watch),
            checkpointer=watch.checkpointer,
        )
        elbo = full_elbo(model, last.posterior, data, source)
        sizes = _sizes(plan, model.features)
        report = {**sizes, "steps": last.step, "epochs": last.epoch, "advice": []}
        return self._fit(problem, model, plan, last.posterior, None, elbo, report)

    def _fit(
        self,
        problem: Problem,
        model: VariationalModel,
        plan: InducingPlan,
        state: AbstractGaussian,
        spread: CoefficientSpread | None,
        elbo: float,
        report: dict[str, Any],
    ) -> EngineFit:
        posterior = VariationalPosterior(model, state, spread)
        learned = replace(problem.model, mean=model.mean)
        if problem.box is None or self.settings.points_per_length is None:
            tensors = {"mean": state.mean, "statistics": state.statistics}
            tensors |= {} if spread is None else spread.tensors()
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            return EngineFit(posterior, learned, report, evidence=elbo, arrays=arrays, plan=plan)
        places = PlacesAndRays.of(posterior)
        nodes = PointValues(problem.box.points(device=state.mean.device))
        return EngineFit(
            places,
            learned,
            report,
            evidence=elbo,
            # Scores, maps and figures ask for the same nodes.
            at_nodes=cache(partial(places.predict, nodes)),
            on_grid=partial(draws_on_grid, posterior, plan.grid, self.settings.seed),
        )

    def _precise_enough(
        self, problem: Problem, plan: InducingPlan
    ) -> tuple[InducingPlan, list[str]]:
        """The plan, in float64 where rounding to float32 would drown point values; and why."""
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
        log.warning("%s", advice)
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


def make_family(plan: InducingPlan) -> AbstractFamily:
    """The family of the plan."""
    if plan.family == "mean-field":
        return MeanFieldFamily(plan.n_features)
    if plan.family == "low-rank":
        return LowRankDiagonalFamily(plan.n_features, plan.rank, max_bytes=plan.max_memory)
    if plan.family == "full":
        return FullRankFamily(plan.n_features, max_bytes=plan.max_memory)
    assert plan.block is not None
    partition = TilePartition(plan.torus_shape, plan.block)
    return BlockFamily(partition, max_bytes=plan.max_memory)


def _row_advice(solves: Any) -> list[str]:
    if not solves.unconverged:
        return []
    return [
        f"{solves.unconverged} of {solves.columns} rows of features stopped at a relative residual "
        f'of up to {solves.residual:.1e}: use dtype="float64", more padding, or whitening="torus"'
    ]


def _sizes(plan: InducingPlan, features: AbstractFeatureMap) -> dict[str, Any]:
    """Plain values of the plan, and what the construction of the prior did."""
    return {
        "grid_shape": list(plan.grid.shape),
        "torus_shape": list(plan.torus_shape),
        "n_features": plan.n_features,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "whitening": plan.whitening,
        "family": plan.family,
        "block": None if plan.block is None else list(plan.block),
        "rank": plan.rank,
        "bytes_needed": plan.bytes_needed,
        "bytes_rows": plan.bytes_rows,
        "prior": _prior_report(features),
    }


def _prior_report(features: AbstractFeatureMap) -> dict[str, float | int]:
    if isinstance(features, ExtrapolatingFeatures):
        features = features.outer
    if isinstance(features, CholeskyFeatures | CIQFeatures):
        return {"nugget": features.nugget * float(features.kernel.variance().detach())}
    assert isinstance(features, HIPFeatures | TorusFeatures)
    report = features.prior.report
    return {
        "wrap_error": report.wrap_error,
        "wrap_inflation": report.wrap_inflation,
        "smallest_eigenvalue": report.smallest_eigenvalue,
        "clamped": report.clamped,
        "nugget": report.nugget,
    }


def _within_the_box(model: GPModel, box: RegularGrid | None) -> tuple[GPModel, dict[str, float]]:
    """A length scale beyond the longest side of the box is as good as that side, which a torus can
    hold: the model with it, and what the report says."""
    length = float(model.kernel.terms()[0].lengthscale[0].detach())
    longest = math.inf
    if box is not None:
        longest = max(b - a for a, b in zip(box.lower, box.upper, strict=True))
    if length <= longest:
        return model, {}
    log.info("length scale %.4g, beyond the box: %.4g taken", length, longest)
    kernel = model.kernel.with_parameters(
        [
            p.at(torch.full_like(p.value, math.log(longest))) if p.is_one_of(("length",)) else p
            for p in model.kernel.parameters()
        ]
    )
    return replace(model, kernel=kernel), {"length_learned_beyond_the_box": length}


@torch.no_grad()
def refuse_negligible_noise(model: GPModel, data: Batch) -> None:
    """The precision I + Φᵀ Σ⁻¹ Φ loses its identity beside 1/σ² ≫ 10¹³ / k(0)."""
    least = float(model.likelihood.noise_variance(data).min() / model.kernel.variance())
    if least < _LEAST_NOISE:
        raise UserError(
            f"noise_std is as small as {least**0.5:.1e} of the prior standard deviation, too small "
            f'for inducing points in float64: use noise="jitter" to learn more noise on top, or '
            f'engine="exact"'
        )


def _epochs(n: int, watch: Watch) -> Callable[[SVIState], None]:
    """Log an epoch, and pass its numbers on."""
    last = [0]

    def after(state: SVIState) -> None:
        if state.epoch > last[0]:
            last[0] = state.epoch
            elbo = state.taken.elbo / n
            log.info("epoch %d: log-evidence per datum at least %.4g", state.epoch, elbo)
            watch.on_step({"part": "epochs", "epoch": state.epoch, "elbo_per_star": elbo})

    return after
