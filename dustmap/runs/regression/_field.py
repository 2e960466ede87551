"""A regression's posterior on a regular grid: as zarr and FITS files, and as pictures."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.estimators import HIPGPRegressor
from dustmap.gp import RegularGrid
from dustmap.runs.regression._model import Array, Rows
from dustmap.sky import Provenance
from dustmap.sky._streamed_fits import UnitPlan, axis_cards, streamed_fits
from dustmap.sky._zarr import consolidate, create_array, create_group
from dustmap.tables import replacing

log = logging.getLogger(__name__)

_CHUNK = 64  # nodes per axis
_POINTS_AT_ONCE = 4096
_MOST_DOTS = 2000  # beyond, dots hide each other and the curve
_SLICES = (0.25, 0.5, 0.75)  # parts of the third axis


@final
@dataclass(frozen=True, eq=False)
class GriddedField:
    """Posterior mean and standard deviation of f at the nodes of a grid.

    mean, std: of the grid's shape; inputs: names of its axes; target: what f predicts.
    """

    grid: RegularGrid
    mean: Array
    std: Array
    inputs: tuple[str, ...]
    target: str

    def axes(self) -> tuple[Array, ...]:
        """Return the coordinates of the nodes along each input."""
        return tuple(axis.numpy() for axis in self.grid.axes())

    def quantities(self) -> Iterator[tuple[str, Array, str]]:
        """Yield the name, the values and the meaning of each array in files."""
        yield "target_mean", self.mean, "posterior mean"
        yield "target_std", self.std, "posterior standard deviation"


def predict_field(model: HIPGPRegressor, config: Config, grid: RegularGrid) -> GriddedField:
    """Predict mean and standard deviation of f at the nodes."""
    parts = []
    for start, points in enumerate(torch.split(grid.points(), _POINTS_AT_ONCE)):
        log.debug("map: %d of %d nodes", start * _POINTS_AT_ONCE, grid.size)
        parts.append(model.predict(points.numpy(), return_std=True))
    mean, std = (np.concatenate(values).reshape(grid.shape) for values in zip(*parts, strict=True))
    return GriddedField(grid, mean, std, config.data.inputs, config.data.target)


def write_field(
    path: Path, form: str, field: GriddedField, provenance: Provenance, overwrite: bool
) -> None:
    """Write target_mean and target_std, as "zarr" or "fits".

    zarr: with the inputs as dimensions, in their order. FITS: one image a quantity with a linear
    WCS; the first input is the first FITS axis.
    """
    write = _write_zarr if form == "zarr" else _write_fits
    with replacing(path, overwrite) as partial:
        write(partial, field, provenance)


def _write_zarr(path: Path, field: GriddedField, provenance: Provenance) -> None:
    attributes = provenance.attributes(f"Gaussian process regression of {field.target}")
    axes = dict(zip(field.inputs, field.axes(), strict=True))
    group = create_group(path, attributes, {name: (axis, {}) for name, axis in axes.items()})
    chunks = tuple(min(_CHUNK, n) for n in field.grid.shape)
    for name, values, meaning in field.quantities():
        described = {"long_name": f"{meaning} of {field.target}"}
        array = create_array(
            group, name, values.shape, field.inputs, "f8", chunks=chunks, attributes=described
        )
        array[...] = values
    consolidate(group)


def _write_fits(path: Path, field: GriddedField, provenance: Provenance) -> None:
    plans = []
    for name, _, meaning in field.quantities():
        cards = axis_cards(field.grid, field.inputs)
        cards["OBJECT"] = (field.target, f"{meaning} of OBJECT")
        provenance.stamp(cards)
        plans.append(UnitPlan.image(name.upper(), field.grid.shape[::-1], cards, ">f8"))
    with streamed_fits(path, plans) as images:
        for name, values, _ in field.quantities():
            images[name.upper()].write((0,), values.transpose())


def plot_field(field: GriddedField, rows: Rows, height: float | None = None) -> Figure:
    """One input: mean with bands and data. Two: mean and deviation. Three: slices of both.

    height: where to slice the third axis, instead of at its quarters.
    """
    if field.grid.dim == 3:
        return _slices(field, height)
    label, shown = "data", rows
    if len(rows) > _MOST_DOTS:
        # The same ones every time.
        shown = rows[np.random.default_rng(0).choice(len(rows), _MOST_DOTS, replace=False)]
        label = f"{_MOST_DOTS:,} of {len(rows):,} data"
    return (_curve if field.grid.dim == 1 else _pair)(field, shown, label)


def _curve(field: GriddedField, shown: Rows, data: str) -> Figure:
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axis = figure.subplots()
    (x,) = field.axes()
    axis.plot(shown.X[:, 0], shown.y, ".", color="0.45", markersize=3, label=data)
    for width, shade in ((2.0, 0.18), (1.0, 0.3)):
        low, high = field.mean - width * field.std, field.mean + width * field.std
        label = f"±{width:g} standard deviations"
        axis.fill_between(x, low, high, color="C0", alpha=shade, linewidth=0, label=label)
    axis.plot(x, field.mean, color="C0", linewidth=1.6, label="posterior mean")
    axis.set_xlabel(field.inputs[0])
    axis.set_ylabel(field.target)
    axis.set_xlim(x[0], x[-1])
    axis.legend(frameon=False, fontsize="small")
    return figure


def _pair(field: GriddedField, shown: Rows, data: str) -> Figure:
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, values, colours) in zip(axes, _coloured(field), strict=True):
        image = _draw(axis, field, values, colours, None)
        axis.set_title(title)
        figure.colorbar(image, ax=axis, label=field.target)
    axes[1].plot(*shown.X.T, ".", color="white", markersize=1.2, alpha=0.5)
    axes[1].set_title(f"standard deviation, {data} as dots")
    axes[0].set_ylabel(field.inputs[1])
    return figure


def _slices(field: GriddedField, height: float | None) -> Figure:
    levels, name = field.axes()[2], field.inputs[2]
    chosen = [round(part * (len(levels) - 1)) for part in _SLICES]
    if height is not None:
        nearest = int(np.abs(levels - height).argmin())
        if not abs(levels[nearest] - height) <= field.grid.spacing[2] / 2:
            raise UserError(
                f"--slice {name}={height:g}: expected {levels[0]:.6g} to {levels[-1]:.6g}"
            )
        chosen = [nearest]
    figure = Figure(figsize=(3.6 * len(chosen) + 1.4, 6.8), layout="constrained")
    rows = figure.subplots(2, len(chosen), sharex=True, sharey=True, squeeze=False)
    for axes, (title, values, colours) in zip(rows, _coloured(field), strict=True):
        planes = values[:, :, chosen]
        scale = Normalize(planes.min(), planes.max())
        for axis, k in zip(axes, chosen, strict=True):
            image = _draw(axis, field, values[:, :, k], colours, scale)
            axis.set_title(f"{title}, {name} = {levels[k]:.4g}", fontsize="medium")
        axes[0].set_ylabel(field.inputs[1])
        figure.colorbar(image, ax=list(axes), label=field.target)
    for axis in rows[0]:
        axis.set_xlabel("")
    return figure


def _coloured(field: GriddedField) -> Iterator[tuple[str, Array, str]]:
    yield "posterior mean", field.mean, "viridis"
    yield "standard deviation", field.std, "magma"


def _draw(
    axis: Axes, field: GriddedField, plane: Array, colours: str, scale: Normalize | None
) -> AxesImage:
    half = [h / 2 for h in field.grid.spacing]
    x, y = field.axes()[:2]
    axis.set_xlabel(field.inputs[0])
    return axis.imshow(
        plane.transpose(),
        origin="lower",
        extent=(x[0] - half[0], x[-1] + half[0], y[0] - half[1], y[-1] + half[1]),
        aspect="auto",
        cmap=colours,
        norm=scale,
        interpolation="nearest",
    )
