"""Small densities whose every value is known."""

import functools
import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.kernels import Matern12
from dustmap.inference import LogNormalPosterior
from dustmap.inference.lognormal._unresolved import Unresolved
from dustmap.sky.maps import NodeField, PosteriorField
from dustmap.sky.systems import system_named

A_V = system_named("A_V")
#: Off-centre, three different lengths and spacings; the Sun is inside.
NODES = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(10.0, 20.0, 5.0), shape=(9, 7, 5))
#: Finer in x and y, coarser in z, its voxels off the nodes.
FINE = RegularGrid(lower=(-37.0, -55.0, -9.0), spacing=(3.1, 7.3, 4.4), shape=(11, 13, 4))
PRIOR_STD = 1.5


def posterior(samples: int = 6) -> LogNormalPosterior:
    """Random samples of ln ρ around −5, whose variance is known to be another."""
    generator = torch.Generator().manual_seed(3)
    logs = -5.0 + torch.randn(samples, NODES.size, dtype=torch.float64, generator=generator)
    rows = functools.partial(interpolation, grid=NODES, dtype=torch.float64)
    factor = 0.5 + torch.rand(NODES.size, dtype=torch.float64, generator=generator)
    known = factor * logs.var(0, correction=0)
    return LogNormalPosterior(rows, logs.mean(0), logs, log_variance=known)


def node_field(samples: int = 6) -> NodeField:
    return NodeField(posterior(samples), NODES, A_V, PRIOR_STD)


def rough_field(samples: int = 6) -> NodeField:
    """The same density, with dust between the nodes."""
    rest = Unresolved.of(Matern12(30.0, dim=3), NODES)
    return NodeField(replace(posterior(samples), unresolved=rest), NODES, A_V, PRIOR_STD)


def posterior_field(samples: int = 6) -> PosteriorField:
    """The same density through its predictions alone."""
    x, y, z = NODES.lower
    a, b, c = NODES.upper
    return PosteriorField(posterior(samples), A_V, (x, y, z), (a, b, c), PRIOR_STD, samples)


def cube(values: Tensor, grid: RegularGrid) -> NDArray[np.float64]:
    """(..., M) in the order of (x, y, z) to (..., z, y, x)."""
    found = values.double().numpy().reshape(*values.shape[:-1], *grid.shape)
    return np.moveaxis(found, (-3, -2, -1), (-1, -2, -3))


def positions(count: int, seed: int = 0, grid: RegularGrid = NODES) -> NDArray[np.float64]:
    """Random places within the box, (N, 3)."""
    return np.random.default_rng(seed).uniform(grid.lower, grid.upper, (count, 3))


def relative_error(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> float:
    return float(np.abs(found / wanted - 1.0).max()) if found.size else math.nan
