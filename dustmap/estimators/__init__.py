"""Regression and classification of any data, as scikit-learn estimators over `dustmap.engines`.

`HIPGPRegressor` is the exact Gaussian process for small data, inducing points on an automatic grid
for large ones, free ones where a grid has too many axes. `HIPGPClassifier` has free inducing points
and a Bernoulli likelihood. They are in `dustmap`, too.
"""

from dustmap.estimators._classifier import HIPGPClassifier as HIPGPClassifier
from dustmap.estimators._regressor import HIPGPRegressor as HIPGPRegressor
