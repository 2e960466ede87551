"""Regression on any data in one to four dimensions, as a scikit-learn estimator.

`HIPGPRegressor` is all there is to it: the exact Gaussian process for small data, inducing points
on an automatic grid for large ones. It is `dustmap.HIPGPRegressor`, too.
"""

from dustmap.regression._estimator import HIPGPRegressor as HIPGPRegressor
