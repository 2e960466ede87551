"""Answers of a map for places and rays, and how far its data reach."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np
from astropy.coordinates import SkyCoord
from numpy.typing import ArrayLike

from dustmap.errors import UserError
from dustmap.sky.maps import _quantities, _trilinear
from dustmap.sky.maps._cubes import AbstractCubes, Cube
from dustmap.sky.maps._quantities import Mode, Outside, Quantity
from dustmap.sky.maps._trilinear import (
    Cells,
    CubeReader,
    Flags,
    Floats,
    Rays,
)

if TYPE_CHECKING:
    from dustmap.sky.maps._dust_map import DustMap

log = logging.getLogger(__name__)
_log_of_maps = logging.getLogger("dustmap.sky.maps")

#: Places whose cells and weights are held at once.
_PLACES = 2**21
#: Numbers of the samples around places that are held at once.
_NUMBERS = 2**23
#: Digits by which directions that round-off tells apart are one.
_DIGITS = 12
#: What one sample says nothing of.
_SPREADS = (Mode.STD, Mode.MEDIAN, Mode.PERCENTILE)
#: Percentiles between which 68 % lie.
_BAND = (16.0, 84.0)


@final
class Answers:
    """Answers from the cubes of a map, at heliocentric Galactic X, Y, Z in pc."""

    def __init__(
        self,
        cubes: AbstractCubes,
        seed: int | None,
        memory: int,
        finer: tuple[AbstractCubes, ...] = (),
    ) -> None:
        """finer: levels in the box of the cubes, each in that of the one before."""
        self.reader, self.layout = CubeReader(cubes, memory), cubes.layout
        self._random = np.random.default_rng(seed)
        self._finer = Answers(finer[0], seed, memory, finer[1:]) if finer else None

    def reliable_range(self, directions: Floats, least: float) -> Floats:
        """Find [from, to] in pc (N, 2) along unit vectors (N, 3); NaN where coverage, that of the
        finest level at a place, never is `least`."""
        cubes = (Cube(Quantity.COVERAGE),)

        def covered(places: Floats) -> Floats:
            return np.asarray(self.interpolated(cubes, places, Outside.NAN)[0])

        step = 0.5 * self.finest_spacing
        return _trilinear.range_of(covered, self.layout.grid, step, directions, least)

    @property
    def finest_spacing(self) -> float:
        """Least distance of voxels in pc, of all levels."""
        own = min(self.layout.grid.spacing)
        return own if self._finer is None else min(own, self._finer.finest_spacing)

    def densities(
        self, positions: Floats, mode: Mode, levels: tuple[float, ...], outside: Outside
    ) -> Floats:
        """Return densities or integrals (1, S or Q, N), float64."""
        stored = self._stored(mode, levels)
        if not stored and mode in (Mode.MEDIAN, Mode.PERCENTILE) and self._has_widths:
            return self._quantiles(positions, levels, outside)
        if mode in _SPREADS and self.layout.positive and self.layout.samples > 1:
            return self._spreads(positions, mode, levels, outside)
        if not stored:
            values = self.interpolated(self._sample_cubes(mode), positions, outside)
            return _summary(values, mode, levels, self.layout.positive)
        return self.interpolated(stored, positions, outside)

    def of_cube(self, cube: Cube, positions: Floats) -> Floats:
        """Return what a cube says at places (1, N) of any level, float64; NaN outside."""
        level = _quantities.PERCENTILES.get(cube.quantity)
        if level is not None:
            return self.densities(positions, Mode.PERCENTILE, (level,), Outside.NAN)
        if cube.quantity is Quantity.STD:
            return self.densities(positions, Mode.STD, (), Outside.NAN)
        return self.interpolated((cube,), positions, Outside.NAN)

    @property
    def _has_widths(self) -> bool:
        """Whether cubes have a centre and a width, by which all quantiles follow."""
        return set(self._widths) <= set(self.layout.quantities)

    @property
    def _widths(self) -> tuple[Quantity, ...]:
        positive = Quantity.P16, Quantity.MEDIAN, Quantity.P84
        return positive if self.layout.positive else (Quantity.MEAN, Quantity.STD)

    def _quantiles(self, positions: Floats, levels: tuple[float, ...], outside: Outside) -> Floats:
        """Return quantiles (Q, N): log-normal by the median and P16 to P84, or normal ones."""
        z = [_quantities.normal_quantile(level) for level in levels]
        if not self.layout.positive:
            mean, std = self.interpolated(tuple(map(Cube, self._widths)), positions, outside)
            return np.stack([mean + each * std for each in z])
        own = below, _, above = [_quantities.PERCENTILES[quantity] for quantity in self._widths]
        values = self.densities(positions, Mode.PERCENTILE, tuple(own), outside)
        low, median, high = values
        width = _log_width(low, high, below, above)
        # Those that have a cube are what it says.
        known = dict(zip(own, values, strict=True))
        pairs = zip(levels, z, strict=True)
        return np.stack([known.get(q, median * np.exp(each * width)) for q, each in pairs])

    def _spreads(
        self, positions: Floats, mode: Mode, levels: tuple[float, ...], outside: Outside
    ) -> Floats:
        """Return statistics of a positive density (1 or Q, N) by its cubes and its samples.

        It is the interpolant of these, whose neighbours vary against each other: between voxels it
        varies less than at either. What no voxel has of it comes on top. At voxels it is as stored.
        """
        stored = self._stored(mode, levels)
        values = self.interpolated(stored or (Cube(Quantity.SAMPLES),), positions, outside)
        values = np.broadcast_to(values, (max(1, len(levels)), len(positions))).copy()
        step = max(1, _NUMBERS // (8 * self.layout.samples))
        for start in range(0, len(positions), step):
            part = slice(start, start + step)
            here, around = self._between(positions[part], mode, levels)
            if stored:
                ratio = np.divide(here, around, out=np.ones_like(here), where=around > 0)
                here = values[:, part] * ratio
            values[:, part] = np.where(np.isfinite(here), here, values[:, part])
        return values

    def _between(
        self, positions: Floats, mode: Mode, levels: tuple[float, ...]
    ) -> tuple[Floats, Floats]:
        """Return these statistics between voxels, and interpolated ones; NaN outside."""
        both = np.full((2, max(1, len(levels)), len(positions)), np.nan)
        inside = _trilinear.within_box(self.layout.grid, positions)
        cells = Cells.of(self.layout.grid, positions[inside])
        both[:, :, inside] = self._by_variances(positions[inside], cells, mode, levels)
        if self._finer is not None:
            near = _trilinear.within_box(self._finer.layout.grid, positions)
            both[:, :, near] = self._finer._between(positions[near], mode, levels)
        return both[0], both[1]

    def _by_variances(
        self, positions: Floats, cells: Cells, mode: Mode, levels: tuple[float, ...]
    ) -> tuple[Floats, Floats]:
        """Return statistics (1 or Q, N) between voxels, and interpolated ones, by

            var ln ρ = Σ_c w_c (v_c − r_c) / Σ_c w_c t_c · t(x) + r(x),

        v_c of the voxels around, t_c and t(x) of their samples (S, N, 8) and of the interpolants of
        these, and r what samples have nothing of, by the place in the cells of the run."""
        weights = cells.weights.astype(np.float64)
        summed: dict[str, Any] = {"axis": -1, "where": weights > 0}  # others may be unknown
        cubes = self._sample_cubes(mode)
        corners = np.empty((len(cubes), len(cells), 8))
        for k in self.reader.order(cubes):
            corners[k] = self.reader.corners(cubes[k], cells)
        centres, widths = _quantities.log_moments(corners)
        centre, width = _quantities.log_moments((corners * weights).sum(**summed))
        held, rest = self._log_variances(corners, cells), self._rest_of_corners(cells)
        # Rounding of files apart, no voxel has less than its rest.
        sampled = np.maximum(held - rest, 0.0)
        known, drawn = ((v * weights).sum(**summed) for v in (sampled, widths**2))
        left = np.divide(known, drawn, out=np.zeros_like(known), where=drawn > 0)
        more = _trilinear.variance_between(self.layout.between, positions)
        width = np.sqrt(width**2 * left + more)
        if mode is Mode.STD:
            mean = self._means(corners, cells)
            here = (mean * weights).sum(**summed) * np.sqrt(np.expm1(width**2))
            return here[None], (mean * np.sqrt(np.expm1(held)) * weights).sum(**summed)[None]
        z = [_quantities.normal_quantile(level) for level in levels or (0.5,)]
        here = np.stack([np.exp(centre + each * width) for each in z])
        around = [(np.exp(centres + each * np.sqrt(held)) * weights).sum(**summed) for each in z]
        return here, np.stack(around)

    def _rest_of_corners(self, cells: Cells) -> Floats:
        """Return the variance of ln ρ (N, 8) that samples of the voxels around have not."""
        places = cells.corners(self.layout.grid).reshape(-1, 3)
        return _trilinear.variance_between(self.layout.between, places).reshape(-1, 8)

    def _means(self, corners: Floats, cells: Cells) -> Floats:
        """Return the mean (N, 8) of the voxels around, of their samples (S, N, 8) if need be."""
        if Quantity.MEAN not in self.layout.quantities:
            return np.asarray(corners.mean(0))
        return self.reader.corners(Cube(Quantity.MEAN), cells).astype(np.float64)

    def _log_variances(self, corners: Floats, cells: Cells) -> Floats:
        """Return the variance of ln ρ (N, 8) by the cubes of the voxels around."""
        if {Quantity.P16, Quantity.P84} <= set(self.layout.quantities):
            ends = Quantity.P16, Quantity.P84
            low, high = (self.reader.corners(Cube(q), cells).astype(np.float64) for q in ends)
            return _log_width(low, high, *(_quantities.PERCENTILES[q] for q in ends)) ** 2
        if Quantity.STD not in self.layout.quantities:
            return np.asarray(_quantities.log_moments(corners)[1] ** 2)
        std, mean = self.reader.corners(Cube(Quantity.STD), cells), self._means(corners, cells)
        return _quantities.log_variance(mean, std.astype(np.float64))

    def _stored(self, mode: Mode, levels: tuple[float, ...]) -> tuple[Cube, ...]:
        """Return the cubes that are the answer, if the map has them."""
        plain = {Mode.MEAN: Quantity.MEAN, Mode.STD: Quantity.STD}
        by_level = {level: quantity for quantity, level in _quantities.PERCENTILES.items()}
        wanted = [plain[mode]] if mode in plain else [by_level.get(level) for level in levels]
        held = [Cube(q) for q in wanted if q is not None and q in self.layout.quantities]
        return tuple(held) if len(held) == len(wanted) else ()

    def _sample_cubes(self, mode: Mode) -> tuple[Cube, ...]:
        if self.layout.samples < (2 if mode in _SPREADS else 1):
            held = ", ".join(quantity.value for quantity in self.layout.quantities)
            raise UserError(
                f"mode {mode.value!r} needs stored samples here, of integrals always, and this map "
                f"holds {held}: export it with the quantity samples"
            )
        if mode is Mode.RANDOM_SAMPLE:
            return (Cube(Quantity.SAMPLES, int(self._random.integers(self.layout.samples))),)
        return tuple(Cube(Quantity.SAMPLES, k) for k in range(self.layout.samples))

    def interpolated(self, cubes: tuple[Cube, ...], positions: Floats, outside: Outside) -> Floats:
        """Interpolate in cubes: (C, N) float64."""
        inside = _trilinear.within_box(self.layout.grid, positions)
        self._report(~inside, outside, "places lie")
        fill = 0.0 if outside is Outside.TRUNCATE else np.nan
        values = np.full((len(cubes), len(positions)), fill)
        for start in range(0, len(positions), _PLACES):
            part = slice(start, start + _PLACES)
            here = inside[part]
            cells = Cells.of(self.layout.grid, positions[part][here])
            for row, cube in zip(values, cubes, strict=True):
                row[part][here] = self.reader.at(cube, cells)
        if self._finer is not None:
            near = _trilinear.within_box(self._finer.layout.grid, positions)
            values[:, near] = self._finer.interpolated(cubes, positions[near], outside)
        return np.where(_finite(positions), values, np.nan)  # a NaN place is unknown always

    def integrals(
        self, positions: Floats, mode: Mode, levels: tuple[float, ...], outside: Outside
    ) -> Floats:
        """Return densities or integrals (1, S or Q, N), float64."""
        mean = mode is Mode.MEAN and Quantity.MEAN in self.layout.quantities
        cubes = (Cube(Quantity.MEAN),) if mean else self._sample_cubes(mode)
        finite = _finite(positions)
        distance = np.linalg.norm(np.where(finite[:, None], positions, 0.0), axis=-1)
        away = distance > 0
        ahead = np.tile([1.0, 0.0, 0.0], (len(positions), 1))
        ahead[away] = positions[away] / distance[away, None]
        rays, complete = _trilinear.within(self.layout.grid, ahead, distance)
        self._report(~(complete & finite), outside, "rays run")
        known = complete | (outside is Outside.TRUNCATE)
        values = np.full((len(cubes), len(rays)), np.nan)
        values[:, known] = self._accumulated(cubes, rays.part(known))
        if mode is Mode.STD:
            values = _quantities.integrals_std(values, self.layout.positive)[None]
        elif not mean:
            values = _summary(values, mode, levels, self.layout.positive)
        return np.where(finite, values, np.nan)  # a NaN place is unknown always

    def _accumulated(self, cubes: tuple[Cube, ...], rays: Rays) -> Floats:
        """Integrate along rays in the box (C, N), each from the end of the next shorter one of its
        direction: shells and profiles pass every voxel once."""
        order = np.lexsort((rays.far, *np.round(rays.direction, _DIGITS).T))
        rays, number = rays.part(order), np.arange(len(rays))
        aside = np.abs(np.diff(rays.direction, axis=0)).max(-1) > 0.1**_DIGITS
        first = np.concatenate([np.ones(min(1, len(rays)), np.bool_), aside])
        shorter = np.where(first, 0.0, np.roll(rays.far, 1))
        near = np.maximum(rays.near, shorter)
        columns = self._integrated(cubes, Rays(rays.direction, near, rays.far))
        place = number - np.maximum.accumulate(np.where(first, number, 0))
        step = 1
        while (place >= step).any():  # sums of 2, 4, 8, ... along a direction
            later = np.flatnonzero(place >= step)
            columns[:, later] += columns[:, later - step]
            step *= 2
        values = np.empty_like(columns)
        values[:, order] = columns
        return values

    def _integrated(self, cubes: tuple[Cube, ...], rays: Rays) -> Floats:
        """Integrate along rays in the box (C, N), through finer levels where there are any."""
        if self._finer is None:
            return _trilinear.integrate(self.reader, cubes, rays)
        met, _ = _trilinear.within(self._finer.layout.grid, rays.direction, rays.far)
        ends = (np.clip(end, rays.near, rays.far) for end in (met.near, met.far))
        inner = Rays(rays.direction, *ends)
        before = Rays(rays.direction, rays.near, inner.near)
        behind = Rays(rays.direction, inner.far, rays.far)
        meets = inner.far > inner.near
        whole = Rays(rays.direction, rays.near, np.where(meets, before.far, rays.far))
        total = _trilinear.integrate(self.reader, cubes, whole)
        total[:, meets] += _trilinear.integrate(self.reader, cubes, behind.part(meets))
        total[:, meets] += self._finer._integrated(cubes, inner.part(meets))
        return total

    def _report(self, beyond: Flags, outside: Outside, what: str) -> None:
        count = int(beyond.sum())
        if count == 0:
            return
        (a, b, c), (d, e, f) = self.layout.grid.lower, self.layout.grid.upper
        box = f"X {a:g} to {d:g}, Y {b:g} to {e:g}, Z {c:g} to {f:g} pc"
        report = f"{count} of {len(beyond)} {what} outside {self.reader.cubes.name} ({box})"
        if outside is Outside.ERROR:
            first = int(beyond.argmax())
            raise UserError(
                f"{report}, the first is number {first} (counted from 0); leave them out, or "
                "choose outside='nan'"
            )
        log.info("%s: %s", report, outside.value)

    def require(self, quantity: Quantity) -> None:
        if quantity not in self.layout.quantities:
            held = ", ".join(q.value for q in self.layout.quantities)
            raise UserError(f"this map has no {quantity.value}, only {held}: export it with that")


def probabilities(mode: Mode, pct: ArrayLike | None) -> tuple[float, ...]:
    """Return the probabilities of the requested percentiles."""
    if (mode is Mode.PERCENTILE) != (pct is not None):
        raise UserError(
            f"pct: expected percents exactly if the mode is percentile, got {pct!r} with "
            f"{mode.value!r}"
        )
    if mode is Mode.MEDIAN:
        return (0.5,)
    if pct is None:
        return ()
    try:
        percents = np.atleast_1d(np.asarray(pct, np.float64))
    except (TypeError, ValueError):
        percents = np.empty(0)
    if percents.ndim != 1 or len(percents) == 0 or not ((percents > 0) & (percents < 100)).all():
        raise UserError(f"pct: expected percents between 0 and 100, got {pct!r}")
    return tuple(float(p) / 100.0 for p in percents)


def _log_width(low: Floats, high: Floats, below: float, above: float) -> Floats:
    """Return τ of a log-normal distribution by two quantiles, at these probabilities; 0 of none."""
    ratio = np.divide(high, low, out=np.ones_like(low), where=low > 0)
    z_low, z_high = map(_quantities.normal_quantile, (below, above))
    return np.asarray(np.log(ratio) / (z_high - z_low))


def _summary(values: Floats, mode: Mode, levels: tuple[float, ...], positive: bool) -> Floats:
    """Reduce samples (S, N) to what is asked, (1, S or Q, N)."""
    if mode is Mode.MEAN:
        return np.asarray(values.mean(0, keepdims=True))
    if mode is Mode.STD:
        return np.asarray(_quantities.standard_deviation(values, positive)[None])
    if mode in (Mode.MEDIAN, Mode.PERCENTILE):
        return _quantities.percentiles(values, levels, positive)
    return values


def _finite(positions: Floats) -> Flags:
    """Return which places (N,) have coordinates at all."""
    return np.asarray(np.isfinite(positions).all(-1))


@contextmanager
def muted_reports() -> Iterator[None]:
    """Let maps keep to warnings: they have reported on these places before."""
    level = _log_of_maps.level
    _log_of_maps.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _log_of_maps.setLevel(level)


def central_band(
    density: "DustMap", places: SkyCoord, integrated: bool
) -> tuple[Floats, Floats] | None:
    """Return the percentiles (N,) between which 68 % lie; None of a map that has none."""
    held = {Quantity.P16, Quantity.P84} <= set(density.available) and not integrated
    if not held and density.n_samples < 2:
        return None
    low, high = density.query(places, "percentile", list(_BAND), integrated).T
    return low, high


def spread_of(density: "DustMap", places: SkyCoord, integrated: bool) -> Floats | None:
    """Return the standard deviation (N,); None of a map that has none."""
    held = Quantity.STD in density.available and not integrated
    known = held or density.n_samples > 1
    return density.query(places, "std", integrated=integrated) if known else None
