"""The scikit-learn estimator."""

import logging
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from dustmap.engines import EvidenceSettings, MemoryPlan, Watch, most_exact, plain_rows
from dustmap.errors import UserError
from dustmap.estimators import _arguments, _saving
from dustmap.estimators._advice import advice_of, share_of_copies
from dustmap.estimators._arguments import (
    Array,
    Standardisation,
    kernel_numbers,
    noise_numbers,
    spread,
)
from dustmap.estimators._engines import (
    EngineArguments,
    FittedRegression,
    condition_regression,
    engine_name,
    fit_regression,
    plan_regression,
    student_t_engine_name,
)
from dustmap.gp import Batch, GPModel, RegularGrid
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import NO_CHECKPOINTS, AbstractCheckpointer
from dustmap.linalg import Progress, unwatched

log = logging.getLogger(__name__)

Prediction = Array | tuple[Array, Array]


@final
@dataclass(eq=False, repr=False)
class HIPGPRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Gaussian process regression, for hundreds to millions of rows.

    y_n = f(x_n) + noise with f ~ GP(mean, kernel). Small data are fitted exactly; large ones
    through inducing points: in one to four dimensions on a regular grid (Wu et al. 2021), whose
    covariances need only FFTs; in more wherever the data are (Hensman et al. 2013).
    Inputs and targets are standardised inside; everything here is in the units of X and y.

    Parameters
    ----------
    kernel : "auto", "matern12", "matern32", "matern52", "squared-exponential", or a kernel
        "auto" is the one of the three Matérn kernels that predicts held-out patches of neighbours
        best, or a rougher one within one standard error of it: see `kernel_choice_`. Of more than
        1,000 rows in up to four columns sums of two scales are candidates, too, except with engine
        "hip", whose grids are too coarse for the shorter one. A name stands
        for that kernel with one length scale per column of X; there are "matern13" and, for any
        smoothness, names such as "matern-0.8", too; "matern32+matern12" and other sums of two have
        two scales, which start four apart. A `dustmap.gp.kernels` object starts at its own
        parameters; it is copied, not changed.
    grid : "auto", tuple of points per axis, or RegularGrid
        "auto" covers the data with a spacing tied to the learned length scale and the noise; data
        on a lattice have its nodes where these are no more.
    engine : "auto", "exact", "hip", "global", "svgp" or "sgpr"
        "auto" is what predicts best: the dense exact GP for as many rows as `max_memory` holds two
        of its matrices, 20,000 at most, except that beyond 2,000 rows in up to four columns "hip"
        replaces it where a grid with its full posterior is fine enough for what was learned, being
        as good and quicker, and beyond 10,000 "global", too. For more rows it is "hip" or
        "global", whose grid leaves less of the posterior variance unexplained, and "svgp" with more
        than four columns. On a grid that is given it is "hip"
        where the full posterior has room, else "global". `report_["engine_choice"]` says which and
        why, `report_["advice"]` where no grid is fine enough. "hip" has
        inducing points on a grid and a structured posterior. "global" has no such structure: one
        solve on a finer grid for the mean and for `samples` draws from the posterior, which
        standard deviations are made of. "svgp" has free inducing points and learns from
        minibatches, in any dimension.
        "sgpr" learns the same points, with kernel and noise, from all rows at once by at most
        `max_steps` steps of L-BFGS along the collapsed bound (Titsias 2009): no rate to choose,
        N M² operations a step. See `engine_`.
    family : "auto", "full", "block", "low-rank" or "mean-field"
        Structure of the posterior covariance on the grid. Only "full" has the right standard
        deviations: the others ignore correlations and are mostly too wide, and with whitening
        "cholesky" in places too small, by half. The mean is the same in all.
        "low-rank" keeps the correlations of the `rank` directions that the data say most of.
        "auto" is "full" where 3,000 variables make a fine enough grid, else "block".
    block : tuple of nodes per axis
        Tiles of family="block"; some 256 nodes by default. Larger ones are closer to "full".
    rank : int
        Directions of family="low-rank": 0 is "mean-field", as many as variables is "full".
    whitening : "auto", "torus", "hip", "cholesky" or "ciq"
        Feature map of the grid (`dustmap.gp.features`). With family="full" they agree where
        padding is ample; "auto" is "cholesky" for the full family and "torus", the fastest,
        otherwise.
    mean : "constant" or "linear"
        Learned coefficients add their own uncertainty to predictions and draws (universal
        kriging).
    noise : "auto", "learn", "given", "scale", "jitter", "student-t" or a number
        "learn" is one standard deviation for all data; "given" the noise_std of `fit`, "scale" a
        learned factor on it, "jitter" learned noise on top of it. "auto" is "given" where there
        is noise_std, "learn" otherwise. A number is the standard deviation of all data.
        "student-t" is s t_ν of learned width s and degrees of freedom ν, for data with outliers;
        where there is noise_std, s is a learned factor on it. Engines "exact" and "global" have it.
    learn : bool or names out of "length", "variance", "noise", "mean", "inducing"
        What is learned, by maximising the exact evidence of `n_learn` random rows in at most
        `max_steps` steps of L-BFGS. In up to four columns "exact", "hip" and "global" then learn
        from all rows (of a random 100,000 at most), by their evidence given near neighbours
        (Vecchia 1988), "svgp" and "sgpr" from all rows by the ELBO, and the places of their
        inducing points, too.
    n_learn, max_steps : int
    samples : int
        Draws of the global engine; the relative error of its standard deviations is 1/√(2 samples).
    inducing : "auto" or int
        Points of the svgp and sgpr engines, at first the centres of clusters of X; "auto" is 500,
        or as many as rows differ. The cost of a step grows with their cube.
    batch_size, learning_rate : int, float
        Rows per step of the svgp engine, at most, and the rate of Adam; 0 keeps all but q as it
        starts.
    epochs : "auto" or int
        Passes of the svgp engine; "auto" is 20, or what makes 200 steps.
    patience : int or None
        Epochs without a better score of a tenth of the rows, held out, that end the svgp engine's
        learning; None for no such end. The posterior is that of all rows in any case.
    padding : float
        Length scales of empty space around the grid (see `report_["prior"]["wrap_error"]`).
    dtype : "float64" or "float32"
        Of the engines with inducing points; the exact and the sgpr engine are float64.
    max_memory : int
        Bytes the fit may take: automatic engines, grids and numbers of inducing points stay within
        it (`report_["advice"]` says where it takes points away), and what was asked for beyond it
        is refused before it starts.
    random_state : int, RandomState instance or None

    Attributes
    ----------
    engine_ : "exact", "hip", "global", "svgp" or "sgpr"
    kernel_ : the kernel, learned
    kernel_choice_ : its name, the scores of all candidates with their standard errors, and a remark
        where there were too few rows to compare them; None where `kernel` was not "auto"
    grid_ : RegularGrid, or None for engines without one
    inducing_points_ : (M, D) of the svgp and sgpr engines
    noise_std_ : learned (or given) standard deviation of the noise, of Student-t noise the half
        width that holds as much as ±1σ; None where it comes per datum
    noise_dof_ : ν of Student-t noise, None for Gaussian
    mean_ : coefficients (1,) of the constant or (1 + D,) of the linear mean
    log_evidence_ : ln p(y) of the exact engine, at the learned hyperparameters; Gaussian noise only
    elbo_ : its lower bound of the hip, svgp and sgpr engines
    hyperparameter_errors_ : dict
        Standard deviations of what was learned, given the data, in the form of
        `report_["hyperparameters"]`: of kernel and noise by the information of the evidence that
        they were learned by, of the mean by the posterior at these. None stands for what has no
        error, of which `held` names what ended at a bound. None for svgp and sgpr, for whose bound
        there are none, where nothing was learned, and for models that earlier versions saved.
    report_ : dict of plain values: sizes, statuses of the solvers, Var r / σ², seconds, advice

    Examples
    --------
    >>> import numpy as np
    >>> X = np.linspace(0.0, 6.0, 40)[:, None]
    >>> model = HIPGPRegressor("matern52", noise=0.1).fit(X, np.sin(X[:, 0]))
    >>> mean, std = model.predict(np.array([[1.5]]), return_std=True)
    >>> bool(abs(mean[0] - np.sin(1.5)) < 2 * std[0] < 0.2), model.engine_
    (True, 'exact')
    """

    kernel: Any = "auto"
    _: KW_ONLY
    grid: Any = "auto"
    engine: str = "auto"
    family: str = "auto"
    block: tuple[int, ...] | None = None
    rank: int = 50
    whitening: str = "auto"
    mean: str = "constant"
    noise: Any = "auto"
    learn: Any = True
    n_learn: int = 2000
    max_steps: int = 100
    samples: int = 64
    inducing: Any = "auto"
    batch_size: int = 256
    epochs: Any = "auto"
    learning_rate: float = 0.05
    patience: int | None = None
    padding: float = 4.0
    dtype: str = "float64"
    max_memory: int = 4 * 2**30
    random_state: Any = 0

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        noise_std: ArrayLike | None = None,
        *,
        progress: Progress = unwatched,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> Self:
        """Learn hyperparameters and posterior from X (N, D), y (N,) and noise_std (N,).

        progress: is called with what is done, how many parts of it are, and of how many.
        checkpointer: keeps the kernel that was chosen, and of normal noise by the engines exact,
        hip and global what was learned, for a fit of the same rows and arguments that goes on.
        """
        watch = Watch(checkpointer, progress=progress)
        fitted = fit_regression(*self._task(X, y, noise_std), watch)
        self._keep(fitted)
        for text in self.report_.get("advice", ()):
            log.warning("%s", text)
        return self

    def plan(self, X: ArrayLike, y: ArrayLike, noise_std: ArrayLike | None = None) -> MemoryPlan:
        """Plan the bytes that `fit` takes, for the kernel that a few hundred rows tell.

        The estimator stays as it is: X (N, D), y (N,) and noise_std (N,) may be others than those
        of a fit.

        Examples
        --------
        >>> X = np.linspace(0.0, 1.0, 50)[:, None]
        >>> plan = HIPGPRegressor("matern32").plan(X, np.sin(9.0 * X[:, 0]))
        >>> plan.peak < 2**28
        True
        """
        other = type(self)(**self.get_params(deep=False))
        model, data, _, arguments = other._task(X, y, noise_std)
        return plan_regression(model, data, arguments)

    def _task(
        self, X: ArrayLike, y: ArrayLike, noise_std: ArrayLike | None
    ) -> tuple[GPModel, Batch, Standardisation, EngineArguments]:
        """Check the arguments and scale the rows: what `fit_regression` takes."""
        _arguments.refuse_units(X=X, y=y)
        inputs, targets = validate_data(
            self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        inputs, targets = _arguments.forwards(inputs), _arguments.forwards(targets)
        std = _arguments.noise_std_of(noise_std, len(targets))
        named = not isinstance(self.kernel, AbstractKernel)
        plain = plain_rows(inputs, targets) if self._is_student_t else slice(None)
        scaling = Standardisation.of(inputs, targets[plain], unit_scales=not named)
        arguments = self._engine_arguments(inputs, scaling)
        model = self._model(targets[plain], std is not None, scaling)
        return model, scaling.batch(inputs, targets, std), scaling, arguments

    def refit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        noise_std: ArrayLike | None = None,
        *,
        progress: Progress = unwatched,
    ) -> Self:
        """Return the regression of other rows at the kernel and noise that `fit` learned.

        Rows held out to judge a fit can so join those that predictions are made from. X (N, D),
        y (N,), and noise_std (N,) where `fit` had one. The coefficients of the mean, linear in y,
        are those of these rows, as are the inducing points of "svgp" and "sgpr", and what these
        say. For Gaussian noise. progress: as of `fit`.
        """
        fitted, inputs = self._query(X)
        _arguments.refuse_units(y=y)
        targets = _arguments.forwards(column_or_1d(y, warn=True))
        if targets.shape != inputs.shape[:1]:
            raise UserError(f"y: expected shape ({len(inputs)},), got {targets.shape}")
        if not np.isfinite(targets).all():
            raise UserError("y: expected finite numbers; drop NaN and infinity first")
        std = fitted.noise_std_like_fit(noise_std, len(targets), "these")
        data, model = fitted.scaling.batch(inputs, targets, std), fitted.model
        held = replace(model, kernel=model.kernel.fixed(), likelihood=model.likelihood.fixed())
        engine = fitted.engine
        if self.engine == "auto" and len(inputs) > most_exact(self.max_memory):
            engine = "auto" if engine == "exact" else engine  # these may be more than it takes
        arguments = self._engine_arguments(inputs, fitted.scaling, engine)
        other = type(self)(**self.get_params(deep=False))
        _saving.name_columns(other, _saving.columns_of(self))
        watch = Watch(progress=progress)
        other._keep(condition_regression(held, data, fitted.scaling, arguments, watch))
        return other

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
        return_cov: bool = False,
        *,
        include_noise: bool = False,
        noise_std: ArrayLike | None = None,
    ) -> Prediction:
        """Posterior mean of f at X (N, D), with its standard deviation (N,) or covariance (N, N).

        include_noise: of new measurements y rather than of f; where `fit` had a noise_std, these
        need theirs, too. Standard deviations of the exact engine have what few rows leave open of
        the hyperparameters.
        """
        if return_std and return_cov:
            raise UserError("return_std and return_cov cannot both be True: ask for one of them")
        if noise_std is not None and not include_noise:
            raise UserError("noise_std is of new measurements: pass include_noise=True with it")
        fitted, inputs = self._query(X)
        points, scale = fitted.scaling.points(inputs), fitted.scaling.y_scale
        noise = fitted.noise_variance(inputs, noise_std) if include_noise else np.zeros(len(inputs))
        prediction = fitted.fit.posterior.predict(points)
        mean = self._mean(prediction.mean)
        if return_cov:
            covariance = fitted.fit.posterior.covariance(points).double().numpy() * scale**2
            return mean, covariance + np.diag(noise)
        if not return_std:
            return mean
        return mean, np.sqrt(prediction.variance.double().numpy() * scale**2 + noise)

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Joint draws of f at X from the posterior, (N, n_samples); "global": ≤ `samples`.

        What inducing points or a grid leave of f is joint for up to 2,048 different rows, and fewer
        on grids of more than 30,000 nodes of the torus, here and in the covariance of `predict`;
        for more of them it is independent between places.
        """
        fitted, inputs = self._query(X)
        count = _arguments.at_least(1, "n_samples", {"n_samples": n_samples})
        points = fitted.scaling.points(inputs)
        drawn = fitted.sample(points, count, _arguments.seed_of(random_state))
        return self._mean(drawn.mT)

    def save(self, path: str | Path) -> None:
        """Write the fitted regression to a new directory of JSON and npy files (no pickle)."""
        check_is_fitted(self)
        _saving.write_regression(Path(path), self._regression, self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the fitted regression that `save` wrote."""
        estimator, regression = _saving.read_regression(Path(path), cls)
        estimator._keep(regression)
        return estimator

    def _engine_arguments(
        self, inputs: Array, scaling: Standardisation, engine: str | None = None
    ) -> EngineArguments:
        """Check the arguments; engine: the one that is known, where it is."""
        asked, (n, dim) = self.get_params(deep=False), inputs.shape
        grid = _arguments.grid_of(self.grid, torch.tensor(inputs))
        if isinstance(grid, RegularGrid):
            grid = scaling.grid(grid)
        seed = _arguments.seed_of(self.random_state)
        rows = _arguments.at_least(2, "n_learn", asked)
        steps = _arguments.at_least(1, "max_steps", asked)
        named = not isinstance(self.kernel, AbstractKernel)
        learning = EvidenceSettings(rows, steps, seed=seed, search_start=named)
        inducing = _arguments.inducing_settings(asked, learning, grid)
        name_of = student_t_engine_name if self._is_student_t else engine_name
        return EngineArguments(
            name_of(engine or self.engine, self.grid, n, dim),
            dim,
            inducing,
            _arguments.point_settings(asked, inducing),
            _arguments.free_point_settings(asked, seed, learning.max_steps),
            self._is_student_t,
            isinstance(self.kernel, str) and self.kernel == _arguments.AUTO,
        )

    @property
    def _is_student_t(self) -> bool:
        return isinstance(self.noise, str) and self.noise == _arguments.STUDENT_T

    def _model(self, targets: Array, given: bool, scaling: Standardisation) -> GPModel:
        learned, dim = _arguments.learned_names(self.learn), len(scaling.x_scale)
        width = float(spread(targets)) / scaling.y_scale
        return GPModel(
            _arguments.make_kernel(self.kernel, dim, learned),
            _arguments.make_mean(self.mean, dim, learned),
            _arguments.make_likelihood(self.noise, given, scaling.y_scale, width, learned),
        )

    def _keep(self, fitted: FittedRegression) -> None:
        """Set the attributes of a fitted estimator."""
        self._regression = fitted
        scaling = fitted.scaling
        self.engine_ = fitted.engine
        self.kernel_ = scaling.user_kernel(fitted.model.kernel)
        self.kernel_choice_ = fitted.kernel_choice
        self.grid_ = fitted.grid
        coefficients = fitted.model.mean.coefficients().detach().numpy()
        self.mean_ = scaling.user_mean(coefficients)
        noise = noise_numbers(fitted.model, fitted.dof, scaling)
        self.noise_std_ = None if fitted.noise_is_given else noise["noise_std"]
        self.noise_dof_ = fitted.dof
        self.hyperparameter_errors_ = fitted.report.get("hyperparameter_errors")
        learned = {"kernel": kernel_numbers(self.kernel_), **noise, "mean": self.mean_.tolist()}
        self.report_ = fitted.report | {"hyperparameters": learned}
        if (share := share_of_copies(fitted)) > 0.0:
            self.report_["share_of_copies"] = share
        if advice := advice_of(fitted):
            self.report_["advice"] = [*fitted.report.get("advice", ()), *advice]
        for name in ("log_evidence_", "elbo_", "inducing_points_"):
            self.__dict__.pop(name, None)
        if fitted.inducing_points is not None:
            self.inducing_points_ = fitted.inducing_points
        if fitted.evidence is not None:
            name = "log_evidence_" if fitted.engine == "exact" else "elbo_"
            setattr(self, name, fitted.evidence)

    def _query(self, X: ArrayLike) -> tuple[FittedRegression, Array]:
        check_is_fitted(self)
        _arguments.refuse_units(X=X)
        inputs = _arguments.forwards(validate_data(self, X, dtype=np.float64, reset=False))
        fitted: FittedRegression = self._regression
        return fitted, inputs

    def _mean(self, mean: Tensor) -> Array:
        scaling = self._regression.scaling
        return scaling.y_center + scaling.y_scale * mean.double().numpy()
