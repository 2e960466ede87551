"""dustmap builds 3D dust maps; the dustmaps package queries published ones."""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

__version__ = "0.2.0"
__all__ = ["DustMap", "HIPGPClassifier", "HIPGPRegressor", "UserError", "__version__"]

if TYPE_CHECKING:
    from dustmap.errors import UserError as UserError
    from dustmap.estimators import HIPGPClassifier as HIPGPClassifier
    from dustmap.estimators import HIPGPRegressor as HIPGPRegressor
    from dustmap.sky import DustMap as DustMap
else:
    __getattr__, __dir__ = on_use(__name__)
