"""What is kept of the fit of stars, and the fit that it gives back: the same bits."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dustmap.inference import Kept
from dustmap.runs.models import Arrays, Hyperparameters, Learning, StarFit

_ARRAY = "fit/"


def kept_of(fit: StarFit) -> Kept:
    """Hyperparameters, report and arrays: all that an engine's `reopen` needs beside the data."""
    values = {
        "hyperparameters": fit.hyperparameters.as_dict(),
        "summary": dict(fit.summary),
        "learning": None if fit.learning is None else plain_learning(fit.learning),
    }
    arrays = {f"{_ARRAY}{name}": torch.from_numpy(array) for name, array in fit.arrays.items()}
    return Kept(values, arrays)


def hyperparameters_of(kept: Kept) -> Hyperparameters:
    """Those that `kept_of` has kept."""
    return Hyperparameters(**_mapping(kept, "hyperparameters"))


def summary_of(kept: Kept) -> dict[str, Any]:
    """What the engine has said of its solution."""
    return dict(_mapping(kept, "summary"))


def learning_of(kept: Kept) -> Learning | None:
    """How the hyperparameters were found."""
    found = kept.values["learning"]
    return None if found is None else learning_from(_mapping(kept, "learning"))


def arrays_of(kept: Kept) -> Arrays:
    """The arrays of the posterior."""
    return {
        name.removeprefix(_ARRAY): tensor.numpy()
        for name, tensor in kept.arrays.items()
        if name.startswith(_ARRAY)
    }


def plain_learning(learning: Learning) -> dict[str, Any]:
    """What JSON can hold of it."""
    return asdict(learning)


def learning_from(values: Mapping[str, Any]) -> Learning:
    """What `plain_learning` was made of."""
    return Learning(**{**values, "trace": tuple(values["trace"])})


def _mapping(kept: Kept, name: str) -> Mapping[str, Any]:
    found = kept.values[name]
    assert isinstance(found, Mapping)
    return found
