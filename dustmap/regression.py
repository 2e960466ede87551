"""The estimators under the name that their package had before 0.2: see `dustmap.estimators`."""

from dustmap.estimators import HIPGPClassifier as HIPGPClassifier
from dustmap.estimators import HIPGPRegressor as HIPGPRegressor
