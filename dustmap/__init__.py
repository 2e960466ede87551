"""dustmap builds 3D dust maps; the dustmaps package queries published ones."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustmap.regression import HIPGPRegressor as HIPGPRegressor

__version__ = "0.1.0"
__all__ = ["HIPGPRegressor", "__version__"]


def __getattr__(name: str) -> Any:
    # torch and scikit-learn take seconds to import, which `import dustmap` need not wait for.
    if name == "HIPGPRegressor":
        from dustmap.regression import HIPGPRegressor

        return HIPGPRegressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
