"""Which numbers are of which precision, and why: the one place that says so.

    stars (coordinates, rays, extinctions, errors)   float64
        few, and positions are differences of large numbers
    spectra, lags and tables of the kernel           float64
        eigenvalues span more than float32 holds, and they are made once
    fields and draws                                 compute.dtype
        most of the memory and of the time; rounding is far below the tolerance of a solve
    rows of the data                                 compute.dtype
        like the fields that they meet
    sums over data and nodes, energies, evidence     float64
        millions of terms, and small differences of them
    the exact engine (covariance, factor, answers)   float64
        a dense factorisation loses digits that float32 does not have
    maps in files                                    float32
        the Monte Carlo error of a map is per cents

A finished run keeps the precision of its fit: see `reopened_config`.
"""

import enum
from collections.abc import Mapping
from typing import final

import torch

from dustmap.config import Config
from dustmap.runs.models._grid import dtype_of


@final
class Numbers(enum.Enum):
    """The lines of the table that a run can be held to."""

    STARS = "stars"
    SPECTRA = "spectra"
    FIELDS = "fields"
    ROWS = "rows"
    DENSE = "dense"
    MAPS = "maps"


def precision(config: Config) -> Mapping[Numbers, torch.dtype]:
    """The table for a configuration."""
    chosen = torch.float64 if config.fit.engine == "exact" else dtype_of(config.compute)
    return {
        Numbers.STARS: torch.float64,
        Numbers.SPECTRA: torch.float64,
        Numbers.FIELDS: chosen,
        Numbers.ROWS: chosen,
        Numbers.DENSE: torch.float64,
        Numbers.MAPS: torch.float32,
    }
