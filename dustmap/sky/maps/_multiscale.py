"""Coarser copies of a map's mean for viewers, in the style of OME-NGFF 0.5."""

from typing import Any, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.metadata import ArrayV3Metadata

from dustmap.gp import RegularGrid

Array: TypeAlias = zarr.Array[ArrayV3Metadata]

GROUP = "multiscale"
#: Levels end where no axis has more voxels.
SMALLEST = 64
#: Planes of the coarser level that are made at once: one layer of chunks.
_DEPTH = 64


def add_multiscale(group: zarr.Group, mean: Array, grid: RegularGrid) -> None:
    """Writes multiscale/1, /2, ...: means of the density over 2×2×2, 4×4×4, ... voxels.

    Where an axis has an odd number of voxels the last is averaged with those beside it only. The
    attribute `ome` of `multiscale` names these levels, that of the root the map itself, too.
    """
    levels = group.create_group(GROUP)
    finer, paths = mean, list[str]()
    while max(finer.shape) > SMALLEST:
        paths.append(str(len(paths) + 1))
        finer = _coarser(levels, paths[-1], finer)
    levels.attrs["ome"] = _metadata({path: int(path) for path in paths}, grid)
    named = {mean.basename: 0} | {f"{GROUP}/{path}": int(path) for path in paths}
    group.attrs["ome"] = _metadata(named, grid)


def _coarser(levels: zarr.Group, name: str, finer: Array) -> Array:
    shape = tuple(-(-n // 2) for n in finer.shape)
    array = levels.create_array(
        name,
        shape=shape,
        dtype="float32",
        chunks=tuple(min(_DEPTH, n) for n in shape),
        fill_value=float("nan"),
        dimension_names=("z", "y", "x"),
    )
    for start in range(0, shape[0], _DEPTH):
        stop = min(start + _DEPTH, shape[0])
        array[start:stop] = halved(np.asarray(finer[2 * start : 2 * stop], np.float32))
    return array


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
