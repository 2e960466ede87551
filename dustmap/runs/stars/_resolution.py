"""Nodes for the stars and stars for the nodes: spacings that stars ask for (grid.spacing = "auto",
grid.levels = "auto"), whether they hold the length that a fit has learned, and stars that the nodes
cannot tell apart (data.combine).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import Config, ModelConfig
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.inference import Unresolved
from dustmap.runs._interface import split_rows
from dustmap.runs._machine import device_of
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.reports import Check
from dustmap.runs.stars import _grids, _kernel, _model
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._input import StarInput
from dustmap.runs.stars._parts import SAMPLE, StarShare
from dustmap.runs.stars._plan import may_fit, spacing_at
from dustmap.sky import Observations, StarTable, cartesian
from dustmap.sky.observations import observe
from dustmap.sky.stars import combined, concatenate, thinned

log = logging.getLogger(__name__)

#: Parts of a pc that sides of the box are whole multiples of; the fewest cells along the shortest
#: side, and the most along the longest.
_PARTS, _FEWEST, _MOST = 1000, 4, 2_000
#: Spacings to a length that is learned: wider ones hold noise from node to node, of a length of
#: their own.
SPACINGS_OF_LENGTH = 3.0
#: Spacings of the grid below which a log-normal density is noise from node to node, whose length no
#: grid so coarse can tell; those that suffice if it is two but for its error, and those at which
#: the grid has stopped it; part of the box beyond which it holds no two such lengths.
_LEAST_SPACINGS, _LEAST_WITH_ERROR, _AT_THE_GRID, _MOST_OF_BOX = 2.0, 1.5, 1.05, 0.5
#: Factor on the errors above which dust that the grid cannot hold may be among them.
_MAY_BE_DUST = 1.25
#: Stars that have a length of their own at least, and those that are asked for it.
_LEAST_STARS, _STARS = 200, 500
#: Spacing of a level to that of the next finer one; cells of the coarsest along the shortest side
#: of the box, at least; and levels, at most.
_RATIO, _LEAST_CELLS, _MOST_LEVELS = 4, 8, 3
#: Spacings of a level that lines of sight are apart where it ends.
_REACH = 2.0


def resolved(config: Config, stars: StarTable, earlier: Path | None = None) -> Config:
    """The configuration with spacing and levels in place of "auto"; stars: some or all; earlier:
    the directory of a run that is resumed, whose grid has been chosen."""
    if earlier is not None:
        config = _grids.grid_of_run(RunDirectory(earlier), config)
    return _grids.with_around(with_spacing(with_levels(config, stars), stars), stars)


def with_spacing(config: Config, stars: StarTable) -> Config:
    """The configuration with a spacing in place of "auto": the coarsest that divides the sides of
    the box, leaves out less than the errors, and is at most a third of `model.length` where
    that is learned, or of a shorter length that the stars have; or the finest that the memory
    holds.

    What it leaves out of the median star's extinction A over the distance d has the variance
    Λ ∫ E[ρ²] ds = Λ exp(std²) A² / d of a log-normal density, Λ d of a Gaussian one.

    Parameters
    ----------
    stars
        Some or all, whose errors and extinctions count.
    """
    if config.grid.spacing > 0.0:
        return config
    at, kernel = _model.start_of(config), _model.start_kernel(config)
    distance = float(np.median(stars.distances.median))
    error = float(np.median(stars.extinction_error))
    weight = distance
    if _model.is_lognormal(config):
        extinction = max(float(np.median(stars.extinction)), error)
        weight = math.exp(at.std**2) * extinction**2 / distance
    learned = "length" in config.model.learn
    widest = config.model.length / SPACINGS_OF_LENGTH if learned else math.inf
    taken: Config | None = None
    for spacing in spacings_of(config.grid.size):
        trial = replace(config, grid=replace(config.grid, spacing=spacing))
        if not may_fit(trial):
            break
        taken = trial
        lacking = Unresolved.of(kernel, _grids.grid_of(trial.grid)).length * weight
        if spacing <= widest and lacking < error**2:
            log.info(
                "grid.spacing = %g pc: extinctions lack %.2g mag of std, the median error is %.2g",
                spacing,
                lacking**0.5,
                error,
            )
            return _for_own_length(trial, stars)
    if taken is None:
        raise UserError(
            'grid.spacing = "auto": compute.memory holds no grid of this box; allow more, or take '
            "a smaller grid.size"
        )
    log.warning(
        "grid.spacing = %g pc, the finest within compute.memory or 2,000 cells: extinctions lack "
        "%.2g mag of std, the median error is %.2g%s",
        taken.grid.spacing,
        lacking**0.5,
        error,
        f"; a third of model.length is {widest:.2g} pc" if learned else "",
    )
    return taken


def _for_own_length(config: Config, stars: StarTable) -> Config:
    """The configuration with a finer grid where the stars have a length of their own, below three
    spacings: the coarsest that has three of it, or the finest of so few nodes that it costs little.

    Such a length ends at the spacing, and dust that is finer is taken for noise.
    """
    if not (_model.is_lognormal(config) and "length" in config.model.learn):
        return config
    finer = [trial for trial in _trials(config) if trial.grid.spacing < config.grid.spacing]
    places = cartesian(stars.l, stars.b, stars.distances.median)
    inside = stars[_grids.grid_of(config.grid).contains(torch.from_numpy(places)).numpy()]
    if not finer:
        words = "a finer grid.spacing has more than %s nodes, or than memory holds: yours to set"
        log.info(words, f"{_kernel.MOST_NODES:,}")
    if not finer or len(inside) < _LEAST_STARS:
        return config
    grid = _grids.grid_of(finer[-1].grid)
    observed = observe(thinned(inside, _STARS), grid, OutsidePolicy.PRIOR)
    length = _kernel.length_of_stars(finer[-1], observed)
    widest = length / SPACINGS_OF_LENGTH
    if config.grid.spacing <= widest:
        return config
    asked = [trial for trial in finer if trial.grid.spacing <= widest]
    taken = (asked or finer[-1:])[0]
    log.info(
        "grid.spacing = %g pc: the length that %d stars have is %.3g pc%s",
        taken.grid.spacing,
        len(observed),
        length,
        "" if asked else f", a third of which asks for more than {_kernel.MOST_NODES:,} nodes",
    )
    return taken


def _trials(config: Config) -> list[Config]:
    """The configuration with each of the spacings of few nodes that the memory holds, from the
    coarsest on."""
    trials = []
    for spacing in spacings_of(config.grid.size):
        trial = replace(config, grid=replace(config.grid, spacing=spacing))
        if _grids.grid_of(trial.grid).size > _kernel.MOST_NODES or not may_fit(trial):
            break
        trials.append(trial)
    return trials


def spacings_of(size: tuple[float, ...]) -> list[float]:
    """Divisors of the sides of a box, from the coarsest on, that are short to write."""
    widest = math.gcd(*(round(side * _PARTS) for side in size)) / _PARTS
    cells = (math.ceil(_FEWEST * widest / min(size)), int(_MOST * widest / max(size)))
    spacings = (widest / n for n in range(max(1, cells[0]), cells[1] + 1))
    return [h for h in spacings if math.isclose(float(f"{h:g}"), h, rel_tol=1e-9)]


def check_of_length(
    config: Config, fit: StarFit, is_smooth: bool = False, is_sharp_nearby: bool = False
) -> Check:
    """Check that a learned length is two spacings, less its error, and at most half of the box;
    is_smooth: whether the dust hardly differs from its mean, and has no length; is_sharp_nearby:
    whether the map blurs dust near the Sun, which is sharper than the rest."""
    grid, at, error = config.grid, fit.hyperparameters, fit.errors.get("length", 0.0)
    longest = _MOST_OF_BOX * max(grid.fitted[0][0])
    length, most = at.length / grid.finest, longest / grid.finest
    is_at_bound = "length" in fit.errors and error is None and length > _LEAST_SPACINGS
    if is_at_bound:  # of what the torus of the box may have
        most = min(most, length / _AT_THE_GRID)
    hold = "hold one that is known (model.length, without length in model.learn)"
    where = "the finest spacing of grid.levels" if len(grid.boxes) > 1 else "grid.spacing"
    finer = f"set {where} = {_finer(config, at.length):.4g} pc, at most a third of the length"
    advice = f"held by the grid, not by the data: {finer}, or {hold}"
    if length > most and is_sharp_nearby:
        advice = (
            "held by the box, not by the data: the dust nearby is sharper than one so long leaves "
            "it, and no larger box mends that; see the residuals of near stars"
        )
    elif length > most:
        spacing = grid.boxes[0][1]
        edge = math.ceil(1.2 * at.length / _MOST_OF_BOX / spacing) * spacing
        larger = "" if is_at_bound else f"take one of {edge:,g} pc (grid.size), or "
        advice = f"held by the box, not by the data: {larger}{hold}"
    elif is_smooth:
        advice = f"dust that hardly differs from its mean has no length: {hold}"
    elif error is not None and length > _AT_THE_GRID:
        advice = (
            f"so few spacings that the grid has a part in it: {finer}, or hold it (model.length = "
            f"{at.length:.3g} pc, without length in model.learn)"
        )
    if length < _LEAST_SPACINGS and at.noise > _MAY_BE_DUST:
        advice += (
            f"; of noise that is {at.noise:.2g} times what is stated some may be dust, which "
            "errors of extinctions then lack"
        )
    least = max(_LEAST_SPACINGS - (error or 0.0) / grid.finest, _LEAST_WITH_ERROR)
    return Check("learned length in spacings", length, least, most, advice)


def _finer(config: Config, length: float) -> float:
    """The coarsest spacing that divides the finest box and has three of it in a length; a third of
    the length where none is half as wide."""
    widest, boxes = length / SPACINGS_OF_LENGTH, config.grid.boxes
    fitting = [h for h in spacings_of(boxes[-1][0]) if 0.5 * widest <= h <= widest]
    if len(boxes) > 1:  # levels have whole multiples of it
        fitting = [h for h in fitting if math.isclose(boxes[-2][1] / h, round(boxes[-2][1] / h))]
    return next(iter(fitting), widest)


def with_levels(config: Config, stars: StarTable) -> Config:
    """The configuration with levels in place of "auto".

    Levels have `grid.spacing` times 1, 4, 16. Where N(> d) stars lie beyond d, lines of sight are

        a(d) = d √(4π / N(> d))

    apart there; each level but the coarsest ends where a(d) is two of its spacings, and dust
    between lines of sight needs no nodes. The coarsest has the box, which grows to whole cells.
    """
    grid = config.grid
    if grid.levels != "auto":
        return config
    reaches = _reaches(np.sort(stars.distances.median), grid.spacing)
    count = 1
    while count < _MOST_LEVELS and (
        min(grid.size) >= _LEAST_CELLS * _RATIO**count * grid.spacing
        and reaches[count - 1] < 0.5 * max(grid.size)
    ):
        count += 1
    spacings = [_RATIO**number * grid.spacing for number in reversed(range(count))]
    size = tuple(math.ceil(side / spacings[0] - 1e-9) * spacings[0] for side in grid.size)
    levels = [(size, spacings[0])]
    for spacing, reach in zip(spacings[1:], reversed(reaches[: count - 1]), strict=True):
        size, around = levels[-1]
        inner = tuple(
            side - 2 * around * max(0, math.floor((0.5 * side - reach) / around)) for side in size
        )
        levels.append((inner, spacing))
    for size, spacing in levels:
        log.info("level of %g pc: %s pc", spacing, _grids.sides(size))
    return _grids.with_boxes(config, tuple(levels))


def of_means(model: ModelConfig) -> ModelConfig:
    """The model of means of stars, which tell no relative scatter of single ones."""
    plain = _model.without_relative_scatter(model)
    if plain != model:
        log.info("the catalog holds means of stars: model.relative_scatter is not learned")
    return plain


def with_cells(config: Config, catalog: StarInput) -> tuple[Config, StarInput]:
    """Take the means of stars in one cell of the grid's (data.combine), if they are not yet.

    Stars that are held out, a random part of all, stay single and come last: what lies between
    the nodes is judged by them, and means have less of it. The grid, which all stars have asked
    for, is kept with the means.
    """
    width, stars = config.data.combine, catalog.stars
    if width == 0.0:
        return config, catalog
    before = catalog.provenance.get("combined")
    if isinstance(before, Mapping):
        levels = tuple((tuple(size), spacing) for size, spacing in before["levels"])
        return _grids.with_boxes(config, levels), catalog
    config = resolved(config, thinned(stars, SAMPLE))
    if not config.data.groups:
        stars = replace(stars, groups=None)
    rest, held = split_rows(config, len(stars))
    fitted = stars[rest]
    means = combined(fitted, spacing_at(config.grid, fitted), width)
    log.info("%d stars in %d cells, each of which is one datum", len(fitted), len(means))
    made = {"stars": len(fitted), "cells": len(means), "levels": config.grid.boxes}
    provenance = {**catalog.provenance, "combined": made}
    if len(held) > 0:
        single = replace(stars[held], magnitude=None, multiplicity=np.ones(len(held)))
        means = concatenate([means, single])
    return config, replace(catalog, stars=means, provenance=provenance)


@final
@dataclass(frozen=True, eq=False)
class Sight:
    """What the stars of a run say of the density, and their split, made when first asked for.

    Attributes
    ----------
    observe : of the observations
    config, catalog : which split them, the same one for the same stars
    """

    observe: Callable[[], Observations]
    config: Config
    catalog: StarInput

    @cached_property
    def observed(self) -> Observations:
        return self.observe()

    @cached_property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the data to fit, and of those held out."""
        return split(self.config, self.catalog, self.observed.rows)

    def changed(self, change: Callable[[Observations], Observations]) -> "Sight":
        """Return the same with what `change` makes of the observations."""
        return replace(self, observe=lambda: change(self.observed))


def sight_of(config: Config, share: StarShare) -> Sight:
    """What the stars of a share say of the density in the whole box."""
    whole, policy = _grids.whole_of(config.grid), OutsidePolicy(config.grid.outside)
    device = device_of(config.compute)
    return Sight(lambda: share.observed(whole, policy, device), config, share.own)


def split(
    config: Config, catalog: StarInput, rows: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the data to fit and of those held out; rows (N,): of the stars they come from.

    The same configuration and stars give the same split.
    """
    before = catalog.provenance.get("combined")
    if config.data.combine > 0.0 and isinstance(before, Mapping):
        single = torch.from_numpy(rows >= before["cells"])
        return (~single).nonzero().squeeze(-1), single.nonzero().squeeze(-1)
    rest, held = split_rows(config, len(rows))
    return torch.from_numpy(rest), torch.from_numpy(held)


def voxels(mine: RegularGrid, box: Sequence[float] | None, step: float) -> RegularGrid:
    """Lay voxel centres, `step` apart, from X0 to X1, Y0 to Y1, Z0 to Z1 in the box of a run."""
    if not step > 0.0:
        raise UserError(f"--step {step:g}: expected more than 0 pc")
    faces = list(zip(mine.lower, mine.upper, strict=True))
    if box is not None:
        faces = [(box[0], box[1]), (box[2], box[3]), (box[4], box[5])]
    shape = []
    for axis, (low, high), mine_low, mine_high in zip(
        "XYZ", faces, mine.lower, mine.upper, strict=True
    ):
        if not mine_low - 1e-6 <= low < high <= mine_high + 1e-6:
            raise UserError(
                f"--box along {axis}: expected {mine_low:g} <= {axis}0 < {axis}1 <= "
                f"{mine_high:g} pc, the box of the run, got {low:g} and {high:g}"
            )
        cells = (high - low) / step
        if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
            raise UserError(f"--step {step:g}: expected a part of {high - low:g} pc on {axis}")
        shape.append(round(cells) + 1)
    return RegularGrid(tuple(low for low, _ in faces), (step,) * 3, tuple(shape))


def _reaches(distances: NDArray[np.float64], finest: float) -> list[float]:
    """Distances at which the levels but the coarsest end, from the finest on; ascending."""
    beyond = np.arange(len(distances), 0, -1)
    apart = distances * np.sqrt(4.0 * math.pi / beyond)
    ends = []
    for number in range(_MOST_LEVELS - 1):
        wide = apart > _REACH * finest * _RATIO**number
        ends.append(float(distances[np.argmax(wide)]) if wide.any() else math.inf)
    return ends
