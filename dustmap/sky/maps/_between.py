"""The variance of ln ρ between the nodes of a run, which the samples of a map do not have.

ln ρ is an interpolant, of which a map holds samples, and a rest. The variance of the rest is that
of the kernel less what the nodes around a place have of it: 0 at nodes, and the same in every cell.
Voxels need not be nodes. It goes by the place in the cells of the run, whatever the voxels are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid

Floats: TypeAlias = NDArray[np.float64]
#: Parts of a cell, from a node towards the next, where the variance is tabulated; cells are
#: symmetric.
OFFSETS = (0.0, 1 / 16, 1 / 4, 1 / 2)
#: Numbers of a table, and of its nodes: their lower corner, spacing and shape.
_TABLE, _NODES = len(OFFSETS) ** 3, 9


@final
@dataclass(frozen=True)
class CellVariance:
    """Variance of the rest in the box of one grid of a run.

    nodes: that grid. table (64,): at OFFSETS t of a cell along z, y and x, the fastest; between
    them it is a cubic of t (1 − t) along each, which has no negative variance. That of a Brownian
    bridge is linear, those of smoother fields are nearly quadratic near nodes.

    Examples
    --------
    >>> nodes = RegularGrid((0.0,) * 3, (10.0,) * 3, (3,) * 3)
    >>> z, y, x = np.meshgrid(OFFSETS, OFFSETS, OFFSETS, indexing="ij")
    >>> rest = CellVariance(nodes, tuple((x + y + z).ravel().tolist()))
    >>> rest.at(np.array([[10.0, 0.0, 20.0], [2.5, 10.0, 15.0]]))
    array([0.  , 0.75])
    """

    nodes: RegularGrid
    table: tuple[float, ...]

    def at(self, places: Floats) -> Floats:
        """Return the variance (N,) at places X, Y, Z (N, 3)."""
        cells = (places - np.array(self.nodes.lower)) / np.array(self.nodes.spacing)
        towards = np.abs(cells - np.round(cells))
        x, y, z = (_weights(along) for along in towards.T)
        table = np.array(self.table).reshape((len(OFFSETS),) * 3)
        along_x = np.tensordot(x, table, (1, 2))  # (N, z, y)
        return np.asarray(np.maximum(np.einsum("nzy,ny,nz->n", along_x, y, z), 0.0))

    @property
    def placed(self) -> tuple[float, ...]:
        """Numbers by which files have the nodes."""
        return (*self.nodes.lower, *self.nodes.spacing, *map(float, self.nodes.shape))


def _weights(towards: Floats) -> Floats:
    """Return the weights (N, 4) of OFFSETS for places (N,) that far from the nearest node."""
    place, knots = towards * (1.0 - towards), np.array(OFFSETS) * (1.0 - np.array(OFFSETS))
    each = [
        np.prod([(place - other) / (knot - other) for other in knots if other != knot], axis=0)
        for knot in knots
    ]
    return np.stack(each, axis=-1)


def read_between(
    path: object, tables: object, placed: object, voxels: RegularGrid
) -> tuple[CellVariance, ...]:
    """Read what a file has of it, lists or the words of cards; files of before have one table, of
    the voxels' own cells, and do not say so.

    UserError where they are not those.
    """
    values, nodes = _numbers(path, tables, _TABLE), _numbers(path, placed, _NODES)
    if len(nodes) != len(values) and (len(nodes) > 0 or len(values) > 1):
        raise _damaged(path, placed)
    grids = [voxels] if len(values) and not len(nodes) else [_grid(path, each) for each in nodes]
    if (values < 0.0).any():
        raise _damaged(path, tables)
    return tuple(
        CellVariance(grid, tuple(table)) for grid, table in zip(grids, values.tolist(), strict=True)
    )


def _numbers(path: object, given: object, width: int) -> Floats:
    """Read rows (R, width)."""
    try:
        values = np.array(given.split() if isinstance(given, str) else given, np.float64)
    except (TypeError, ValueError):
        raise _damaged(path, given) from None
    if values.ndim != 1 or len(values) % width or not np.isfinite(values).all():
        raise _damaged(path, given)
    return values.reshape(-1, width)


def _grid(path: object, placed: Floats) -> RegularGrid:
    lower, spacing, shape = placed.reshape(3, 3)
    if not (spacing > 0).all() or not (shape >= 2).all():
        raise _damaged(path, placed.tolist())
    return RegularGrid(tuple(lower.tolist()), tuple(spacing.tolist()), tuple(map(int, shape)))


def _damaged(path: object, given: object) -> UserError:
    return UserError(f"{path} is damaged, make it again: variances between voxels {given!r}")


def mean_between(
    nodes: RegularGrid, those: Sequence[Sequence[CellVariance]]
) -> tuple[CellVariance, ...]:
    """Return means of the tables of several maps, whose voxels are some of `nodes`, on these."""
    tables = [[rest.table for rest in between] for between in those]
    means = (np.mean(same, axis=0).tolist() for same in zip(*tables, strict=False))
    return tuple(CellVariance(nodes, tuple(mean)) for mean in means)
