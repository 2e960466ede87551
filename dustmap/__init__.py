"""dustmap builds 3D dust maps; the dustmaps package queries published ones."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustmap.regression import HIPGPClassifier as HIPGPClassifier
    from dustmap.regression import HIPGPRegressor as HIPGPRegressor
    from dustmap.sky import DustMap as DustMap

__version__ = "0.1.0"
__all__ = ["DustMap", "HIPGPClassifier", "HIPGPRegressor", "__version__"]


def __getattr__(name: str) -> Any:
    # torch, astropy and scikit-learn take seconds to import: `import dustmap` need not wait.
    if name in ("HIPGPClassifier", "HIPGPRegressor"):
        from dustmap import regression

        return getattr(regression, name)
    if name == "DustMap":
        from dustmap.sky import DustMap

        return DustMap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
