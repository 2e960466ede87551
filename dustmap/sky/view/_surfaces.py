"""Surfaces of constant density, by marching cubes (Lorensen & Cline 1987).

Between voxel centres ρ is their trilinear interpolant, which is linear on the edges of cells: there
the vertices are, with ρ = level exactly. Inside a cell they are joined by triangles. On the face of
a cell whose opposite corners are above the level, crossings are joined so that these corners stay
apart; both cells of a face do the same, so that a surface ends at the faces of the box alone.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import refuse_unknown

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
#: A loop of edges around a part of a surface in a cell.
Loop: TypeAlias = tuple[int, ...]

#: Corners of a cell are numbered by bits x, y, z; edges go from the corner without to that with the
#: bit of their axis.
EDGES = tuple((c, c | 1 << axis, axis) for axis in range(3) for c in range(8) if not c >> axis & 1)
_EDGE_OF = {frozenset(edge[:2]): k for k, edge in enumerate(EDGES)}


@final
@dataclass(frozen=True, eq=False)
class Surface:
    """A surface ρ = level in mag/pc: vertices (V, 3), X, Y, Z in pc, and triangles (T, 3) of them.

    Triangles run counter-clockwise as seen from where the density is lower.
    """

    level: float
    vertices: Array
    triangles: Indices

    @property
    def crosses(self) -> Array:
        """Cross products (T, 3): normals of the triangles, twice as long as their area in pc²."""
        first, second, third = (self.vertices[self.triangles[:, k]] for k in range(3))
        return np.asarray(np.cross(second - first, third - first))

    @property
    def area(self) -> float:
        """Area in pc²."""
        return float(0.5 * np.linalg.norm(self.crosses, axis=1).sum())

    @property
    def normals(self) -> Array:
        """Unit normals (V, 3), means of those of the triangles around, weighted by their area."""
        total = np.zeros_like(self.vertices)
        for k in range(3):
            np.add.at(total, self.triangles[:, k], self.crosses)
        length = np.linalg.norm(total, axis=1, keepdims=True)
        # Where triangles have no area, because a voxel is at the level, any direction will do.
        flat = length[:, 0] == 0.0
        total[flat], length[flat] = (0.0, 0.0, 1.0), 1.0
        return np.asarray(total / length)


def iso_surface(density: NDArray[np.float32], level: float, grid: RegularGrid) -> Surface:
    """Return the surface ρ = level of a density (z, y, x) at the nodes of a grid.

    Raises
    ------
    UserError
        Where voxels have no density, or none is on the other side of the level.

    Examples
    --------
    >>> grid = RegularGrid((-5.0,) * 3, (1.0,) * 3, (11,) * 3)
    >>> r = np.linalg.norm(grid.points().numpy(), axis=1).reshape(grid.shape).transpose(2, 1, 0)
    >>> ball = iso_surface(np.exp(-r).astype(np.float32), level=np.exp(-4.0), grid=grid)
    >>> round(ball.area / (4.0 * np.pi * 4.0**2), 2)
    1.01
    """
    refuse_unknown(density)
    above = density >= level
    if above.all() or not above.any():
        raise UserError(
            f"level {level:g}: expected one between the least and the largest density, "
            f"{density.min():.3g} and {density.max():.3g} mag/pc"
        )
    keys, triangles = np.unique(_crossed(above), return_inverse=True)
    return Surface(level, _places(density, level, keys, grid), triangles.reshape(-1, 3))


def _crossed(above: NDArray[np.bool_]) -> Indices:
    """Return the triangles (T, 3) by the edges of the grid on which they have their vertices.

    The edge from voxel k, of the flat (z, y, x), along axis a of (x, y, z) is 3 k + a.
    """
    nz, ny, nx = above.shape
    code = np.zeros((nz - 1, ny - 1, nx - 1), np.uint8)
    for c in range(8):
        x, y, z = c & 1, c >> 1 & 1, c >> 2
        corner = above[z : nz - 1 + z, y : ny - 1 + y, x : nx - 1 + x]
        code |= corner.astype(np.uint8) << np.uint8(c)
    cells = np.argwhere((code > 0) & (code < 255))
    table = _table()[code[tuple(cells.T)]]
    cell, which = np.nonzero(table[:, :, 0] >= 0)
    edges = table[cell, which]
    start = np.array([c for c, _, _ in EDGES])[edges]
    z, y, x = cells[cell].T[:, :, None]
    node = ((z + (start >> 2)) * ny + y + (start >> 1 & 1)) * nx + x + (start & 1)
    return np.asarray(3 * node + np.array([axis for _, _, axis in EDGES])[edges])


def _places(density: NDArray[np.float32], level: float, keys: Indices, grid: RegularGrid) -> Array:
    """Return X, Y, Z (V, 3) in pc where edges of the grid cross the level."""
    node, axis = np.divmod(keys, 3)
    shape = density.shape
    steps = np.array([1, shape[2], shape[2] * shape[1]])
    flat = density.ravel()
    low, high = (flat[k].astype(np.float64) for k in (node, node + steps[axis]))
    index = np.stack(np.unravel_index(node, shape)[::-1], axis=-1).astype(np.float64)
    index[np.arange(len(node)), axis] += (level - low) / (high - low)
    return np.asarray(np.array(grid.lower) + index * np.array(grid.spacing))


@functools.cache
def _table() -> NDArray[np.int8]:
    """Return the triangles (256, T, 3) of each set of corners above the level, by edges; −1: none.

    Bit c of the first index says whether corner c is above.
    """
    cases = [[t for loop in _loops(code) for t in _fan(loop)] for code in range(256)]
    table = np.full((256, max(map(len, cases)), 3), -1, np.int8)
    for code, triangles in enumerate(cases):
        if triangles:
            table[code, : len(triangles)] = triangles
    return table


@functools.cache
def _faces() -> tuple[tuple[int, ...], ...]:
    """Return the corners of each face, counter-clockwise as seen from outside the cell."""
    faces = []
    for axis in range(3):
        b, d = 1 << (axis + 1) % 3, 1 << (axis + 2) % 3
        around = (0, b, b | d, d)
        faces += [around[::-1], tuple(corner | 1 << axis for corner in around)]
    return tuple(faces)


def _loops(code: int) -> list[Loop]:
    """Return the closed loops of crossed edges of a cell."""
    following = {}
    for corners in _faces():
        pairs = list(zip(corners, (*corners[1:], corners[0]), strict=True))
        enters = [k for k, (a, b) in enumerate(pairs) if not code >> a & 1 and code >> b & 1]
        for k in enters:
            leaves = next(
                j % 4
                for j in range(k + 1, k + 4)
                if code >> pairs[j % 4][0] & 1 and not code >> pairs[j % 4][1] & 1
            )
            start, end = (_EDGE_OF[frozenset(pairs[j])] for j in (k, leaves))
            following[start] = end
    loops = []
    while following:
        edge, after = following.popitem()
        loop = [edge]
        while after != loop[0]:
            loop.append(after)
            after = following.pop(after)
        loops.append(tuple(loop))
    return loops


def _fan(loop: Loop) -> list[tuple[int, int, int]]:
    """Cut a loop into triangles from the edge whose diagonals lie least in faces of the cell.

    A triangle within a face would be there twice, once for each of the cells that share it.
    """
    turns = [loop[k:] + loop[:k] for k in range(len(loop))]
    first, *others = min(turns, key=lambda turn: sum(_share_face(turn[0], e) for e in turn[2:-1]))
    return [(first, a, b) for a, b in itertools.pairwise(others)]


def _share_face(one: int, other: int) -> bool:
    corners = {*EDGES[one][:2], *EDGES[other][:2]}
    return any(corners <= set(face) for face in _faces())
