"""Regression and classification of any data, as scikit-learn estimators.

`HIPGPRegressor` is the exact Gaussian process for small data, inducing points on an automatic grid
for large ones, free ones where a grid has too many axes. `HIPGPClassifier` has free inducing points
and a Bernoulli likelihood. They are in `dustmap`, too. What the regressor decides about a
grid (`plan_fit`) and how it solves there (`fit_posterior`) serves star maps as well.
"""

from dustmap.regression._classifier import HIPGPClassifier as HIPGPClassifier
from dustmap.regression._estimator import HIPGPRegressor as HIPGPRegressor
from dustmap.regression._global import WholeSettings as WholeSettings
from dustmap.regression._global import plan_global as plan_global
from dustmap.regression._hip import fit_posterior as fit_posterior
from dustmap.regression._hip import make_family as make_family
from dustmap.regression._plan import HipPlan as HipPlan
from dustmap.regression._plan import HipSettings as HipSettings
from dustmap.regression._plan import plan_fit as plan_fit
