"""Coarser copies of a map's mean for viewers, in the style of OME-NGFF 0.5."""

from typing import Any, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.metadata import ArrayV3Metadata

from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld
from dustmap.sky._ranks import together

Array: TypeAlias = "zarr.Array[ArrayV3Metadata]"

GROUP = "multiscale"
#: Levels end where no axis has more voxels.
SMALLEST = 64
#: Planes of the coarser level that are made at once: one layer of chunks.
_DEPTH = 64


def add_multiscale(group: zarr.Group, mean: Array, grid: RegularGrid, world: AbstractWorld) -> None:
    """Writes multiscale/1, /2, ...: means of the density over 2×2×2, 4×4×4, ... voxels.

    Where an axis has an odd number of voxels the last is averaged with those beside it only. The
    attribute `ome` of `multiscale` names these levels, that of the root the map itself, too. world:
    ranks that share the layers of chunks of every level.
    """
    shapes = _shapes(mean.shape)
    with together(world):
        if world.rank == 0:
            _lay_out(group, mean.basename, shapes, grid)
    finer = mean
    for name in shapes:
        with together(world):
            coarser = array_of(group, f"{GROUP}/{name}")
            _average(finer, coarser, world)
        finer = coarser


def array_of(group: zarr.Group, path: str) -> Array:
    """An array that was made before."""
    array = group[path]
    assert isinstance(array, zarr.Array)
    return array


def _shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Of the levels by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    while max(shape) > SMALLEST:
        shape = tuple(-(-n // 2) for n in shape)
        shapes[str(len(shapes) + 1)] = shape
    return shapes


def _lay_out(
    group: zarr.Group, mean: str, shapes: dict[str, tuple[int, ...]], grid: RegularGrid
) -> None:
    """All but the numbers."""
    levels = group.create_group(GROUP)
    for name, shape in shapes.items():
        levels.create_array(
            name,
            shape=shape,
            dtype="float32",
            chunks=tuple(min(_DEPTH, n) for n in shape),
            fill_value=float("nan"),
            dimension_names=("z", "y", "x"),
        )
    levels.attrs["ome"] = _metadata({name: int(name) for name in shapes}, grid)
    named = {mean: 0} | {f"{GROUP}/{name}": int(name) for name in shapes}
    group.attrs["ome"] = _metadata(named, grid)


def _average(finer: Array, coarser: Array, world: AbstractWorld) -> None:
    """This rank's layers of chunks of a level."""
    planes = coarser.shape[0]
    layers = world.share(-(-planes // _DEPTH))
    for start in range(layers.start * _DEPTH, min(layers.stop * _DEPTH, planes), _DEPTH):
        stop = min(start + _DEPTH, planes)
        coarser[start:stop] = halved(np.asarray(finer[2 * start : 2 * stop], np.float32))


def halved(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means over 2×2×2 voxels; the last of an odd axis counts twice, with itself."""
    for axis in range(3):
        if values.shape[axis] % 2:
            last = np.take(values, [-1], axis)
            values = np.concatenate([values, last], axis)
        even, odd = (values[(*(slice(None),) * axis, slice(i, None, 2))] for i in (0, 1))
        values = 0.5 * (even + odd)
    return values


def _metadata(levels: dict[str, int], grid: RegularGrid) -> dict[str, Any]:
    """levels: path to the number of halvings."""
    datasets = []
    for path, level in levels.items():
        step = 2**level
        # The centre of a coarse voxel is that of the fine ones it covers.
        scale = [step * h for h in grid.spacing[::-1]]
        shifted = zip(grid.lower[::-1], grid.spacing[::-1], strict=True)
        translation = [low + 0.5 * (step - 1) * h for low, h in shifted]
        transformations = [
            {"type": "scale", "scale": scale},
            {"type": "translation", "translation": translation},
        ]
        datasets.append({"path": path, "coordinateTransformations": transformations})
    axes = [{"name": name, "type": "space", "unit": "parsec"} for name in "zyx"]
    described = {"name": "density_mean", "type": "mean", "axes": axes, "datasets": datasets}
    return {"version": "0.5", "multiscales": [described]}
