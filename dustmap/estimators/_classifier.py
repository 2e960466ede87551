"""Gaussian process classification as a scikit-learn estimator."""

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dustmap.engines import FALLBACK, KernelChoice
from dustmap.errors import UserError
from dustmap.estimators import _arguments, _saving
from dustmap.estimators._arguments import Array, Standardisation
from dustmap.estimators._engines import LINKS, Classification, fit_latent
from dustmap.gp import GPModel
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import BernoulliLikelihood

_NO_CHOICE = KernelChoice(FALLBACK, remark="no choice: labels say too little of smoothness")


@final
@dataclass(eq=False, repr=False)
class HIPGPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Gaussian process classification in any dimension, for hundreds to millions of rows.

    P(y_n = 1 | f) = σ(f(x_n)) with f ~ GP(mean, kernel), by variational inference with free
    inducing points on minibatches (Hensman et al. 2015). More than two classes: one such f for each
    against the rest, their probabilities normalised. Inputs are standardised inside.

    Parameters
    ----------
    kernel : "matern12", "matern32", "matern52", "squared-exponential", "auto", or a kernel
        As in `HIPGPRegressor`; its variance is that of the latent f. "auto" is "matern32": labels
        say too little of smoothness to choose by, as the report's `kernel_choice` states.
    inducing : "auto" or int
        Inducing points, at first the centres of clusters of X; "auto" is one for five rows, from
        100 to 500, or as many as rows differ. The cost of a step grows with their cube.
    mean : "constant" or "linear"
        The constant starts where P(y = 1) without f is the frequency of the class. "linear" has a
        slope for every column, without a prior: for classes that planes tell apart, where rows are
        many times the columns.
    link : "logit" or "probit"
        σ: the logistic function, or the distribution function of the normal distribution.
    learn : bool or names out of "length", "variance", "mean", "inducing"
        What is learned from minibatches, by steps of Adam between natural ones of the posterior.
    batch_size, learning_rate : int, float
        Rows per step, at most, and the rate of Adam; 0 keeps all but the posterior as it starts.
    epochs : "auto" or int
        Passes over the data; "auto" is 20, or what makes 200 steps.
    patience : int or None
        Epochs without a better score of a tenth of the rows, held out, that end the learning.
    dtype : "float64" or "float32"
    max_memory : int
        Bytes the fit may take: "auto" takes no more inducing points than it has room for
        (`report_` says where these are fewer), and more that were asked for are refused.
    random_state : int, RandomState instance or None

    Attributes
    ----------
    classes_ : labels, sorted
    kernels_ : the learned kernel of each latent function: one of two classes, else one per class
    elbos_ : lower bounds of ln P(y) of the same
    report_ : list of dicts of plain values, one per latent function: sizes, passes, advice

    Examples
    --------
    >>> import numpy as np
    >>> X = np.linspace(0.0, 1.0, 30)[:, None]
    >>> model = HIPGPClassifier(epochs=5).fit(X, np.where(X[:, 0] > 0.5, "above", "below"))
    >>> model.predict(np.array([[0.1], [0.9]])).tolist()
    ['below', 'above']
    """

    kernel: Any = "matern32"
    _: KW_ONLY
    inducing: Any = "auto"
    mean: str = "constant"
    link: str = "logit"
    learn: Any = True
    batch_size: int = 256
    epochs: Any = "auto"
    learning_rate: float = 0.05
    patience: int | None = None
    dtype: str = "float64"
    max_memory: int = 4 * 2**30
    random_state: Any = 0

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn latent functions from X (N, D) and labels y (N,) of any type."""
        _arguments.refuse_units(X=X, y=y)
        _refuse_missing(y)
        inputs, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        inputs = _arguments.forwards(inputs)
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise UserError(
                f"y has one class only, {classes.tolist()[0]!r}: a classifier needs rows of two or "
                f"more"
            )
        learned, dim = _arguments.learned_names(self.learn), inputs.shape[1]
        named = not isinstance(self.kernel, AbstractKernel)
        scaling = Standardisation.of(inputs, np.zeros(len(inputs)), unit_scales=not named)
        settings = _arguments.free_point_settings(
            self.get_params(deep=False), _arguments.seed_of(self.random_state)
        )
        link = LINKS[_arguments.one_of("link", self.link, tuple(LINKS))]
        model = GPModel(
            _arguments.make_kernel(self.kernel, dim, learned),
            _arguments.make_mean(self.mean, dim, learned),
            BernoulliLikelihood(link),
        )
        points, latents = scaling.points(inputs), []
        for one in [1] if len(classes) == 2 else range(len(classes)):
            targets = torch.from_numpy((codes == one).astype(np.float64))
            fit = fit_latent(model, points, targets, settings, named)
            if isinstance(self.kernel, str) and self.kernel == _arguments.AUTO:
                fit = replace(fit, report={**fit.report, "kernel_choice": _NO_CHOICE.as_plain()})
            latents.append(fit)
        self._keep(Classification(scaling, tuple(latents)), classes)
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Log-odds of the second class, (N,); of each against the rest, (N, K), where K > 2."""
        log_odds = self._log_odds(X)
        return log_odds[:, 0] if len(self.classes_) == 2 else log_odds

    def predict_proba(self, X: ArrayLike) -> Array:
        """P(y = class) (N, K), averaged over the posterior of f."""
        log_odds = self._log_odds(X)
        if len(self.classes_) == 2:
            log_odds = np.concatenate([-log_odds, log_odds], axis=1)
        # Divided by their largest first: all may be small where no class has rows.
        log_share = -np.logaddexp(0.0, -log_odds)
        share = np.exp(log_share - log_share.max(axis=1, keepdims=True))
        normalised: Array = share / share.sum(axis=1, keepdims=True)
        return normalised

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class, (N,)."""
        decision = self.decision_function(X)
        chosen = (decision > 0).astype(int) if decision.ndim == 1 else decision.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def save(self, path: str | Path) -> None:
        """Write the fitted classifier to a new directory of JSON and npy files (no pickle)."""
        check_is_fitted(self)
        _saving.write_classification(Path(path), self._classification, self.classes_, self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the fitted classifier that `save` wrote."""
        estimator, classification, classes = _saving.read_classification(Path(path), cls)
        estimator._keep(classification, classes)
        return estimator

    def _keep(self, fitted: Classification, classes: NDArray[Any]) -> None:
        """Set the attributes of a fitted estimator."""
        self._classification, self.classes_ = fitted, classes
        latents = fitted.latents
        self.kernels_ = [fitted.scaling.user_kernel(latent.model.kernel) for latent in latents]
        self.elbos_ = np.array([latent.evidence for latent in latents])
        self.report_ = [dict(latent.report) for latent in latents]

    def _log_odds(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        _arguments.refuse_units(X=X)
        inputs = _arguments.forwards(validate_data(self, X, dtype=np.float64, reset=False))
        return self._classification.log_odds(inputs)


def _refuse_missing(y: ArrayLike) -> None:
    """Refuse None, NaN and NA among labels, which neither sort nor make a class."""
    if y is None:
        raise UserError("HIPGPClassifier requires y to be passed, but the target y is None")
    labels = np.asarray(y, object).ravel()
    if missing := [row for row, label in enumerate(labels) if _is_missing(label)]:
        raise UserError(
            f"y is missing (None, NaN or NA) in {len(missing)} of {len(labels)} rows (first in row "
            f"{missing[0]}, counted from 0): leave those rows out"
        )


def _is_missing(label: object) -> bool:
    """Whether this is None, or NA, which is neither equal to itself nor not."""
    try:
        return label is None or not bool(label == label)
    except TypeError:
        return True
