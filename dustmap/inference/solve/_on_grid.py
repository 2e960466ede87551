"""Features whose whitened variables live on the torus of a grid's prior."""

from typing import Protocol, runtime_checkable

from dustmap.gp import GridPrior
from dustmap.gp.features import AbstractFeatureMap


@runtime_checkable
class _OnGrid(Protocol):
    @property
    def prior(self) -> GridPrior: ...


def prior_of(features: AbstractFeatureMap, what: str, instead: str) -> GridPrior:
    """The prior of features that have one; `what` needs it, and `instead` says what to do."""
    if not isinstance(features, _OnGrid):
        raise TypeError(
            f"{what} needs features of a GridPrior, got {type(features).__name__}: {instead}"
        )
    return features.prior
