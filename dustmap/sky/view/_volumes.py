"""The cubes that a page shows, taken from a map as finely as a number of bytes allows.

    mean        posterior mean ρ, the mean of the samples where the map has no other
    spread      its standard deviation, relative to ρ where the density is positive
    coverage    the share of the prior's variance that the data removed
    sample k    posterior samples

Coarser voxels are averages over blocks of the map's; every one but the mean may be coarser.
A page has them as text, in 254 steps of a scale.
"""

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.maps._cubes import Cube
from dustmap.sky.maps._quantities import standard_deviation

#: Voxels of a cube that browsers hold, and along one axis.
MOST_VOXELS, MOST_SIDE = 2**25, 1024
#: Planes of a chunk of a file, which is unpacked whole; voxels that are read at a time.
_CHUNK, _TOGETHER = 64, 2**25
#: A mean this coarse says nothing.
_COARSEST = 64
#: Percentile of the density above which dust is drawn, unless the user chooses.
_FAINT = 92.0
#: A logarithmic scale of colours spans no more than this factor.
_SPAN = 100.0
Codes: TypeAlias = NDArray[np.uint8]
#: Steps of a linear or logarithmic scale between the codes 1 and 255; 0 is a voxel without a value.
STEPS = 254
#: A logarithmic scale spans at most so many decades: what is below counts as its lower end.
MOST_DECADES = 4.0


@final
@dataclass(frozen=True)
class Scale:
    """The values of the codes c = 1..255.

        v(c) = 10^u or u,  u = low + (high − low) (c − 1) / 254

    low, high: decadic logarithms where `logarithmic`, else values. Rounding to a code changes
    log10 v, or v, by at most half a step.
    """

    logarithmic: bool
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float32], logarithmic: bool) -> "Scale":
        """Span the finite values; a logarithmic scale, those within `MOST_DECADES` of the top."""
        known = values[np.isfinite(values)]
        if logarithmic:
            known = known[known > 0]
        if known.size == 0:
            return cls(True, -MOST_DECADES, 0.0) if logarithmic else cls(False, 0.0, 1.0)
        low, high = float(known.min()), float(known.max())
        if logarithmic:
            high = float(np.log10(high))
            low = max(float(np.log10(low)), high - MOST_DECADES)
        if high <= low:  # one value: its code is 1
            high = low + (1.0 if logarithmic else abs(low) or 1.0)
        return cls(logarithmic, low, high)

    @property
    def half_step(self) -> float:
        """Largest change of log10 v, or of v, by rounding."""
        return 0.5 * (self.high - self.low) / STEPS

    @property
    def error(self) -> float:
        """Largest change by rounding: relative where logarithmic, else absolute."""
        return float(10.0**self.half_step - 1.0) if self.logarithmic else self.half_step

    def encode(self, values: NDArray[np.float32]) -> Codes:
        """Round values (...) to codes (...); 0 where there is none, 1 and 255 beyond the ends."""
        known = np.isfinite(values)
        filled = np.where(known, values, 1.0).astype(np.float64)
        if self.logarithmic:
            filled = np.log10(np.maximum(filled, 10.0**self.low))
        share = np.clip((filled - self.low) / (self.high - self.low), 0.0, 1.0)
        return np.where(known, 1 + np.rint(STEPS * share), 0).astype(np.uint8)


def packed(codes: Codes) -> str:
    """Pack codes (z, y, x) as text: differences along x modulo 256, deflated, in base64."""
    # A smooth field has small differences, which deflate packs to some 80 % of the field itself.
    differences = np.diff(codes, axis=-1, prepend=np.uint8(0))
    return base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode("ascii")


@final
@dataclass(frozen=True, eq=False)
class Volume:
    """A packed cube.

    name: as in the page; shape (x, y, z) of voxels `spacing` pc wide, the first of which begins at
    the map's lower faces; factor: voxels of the map along an axis of one of these; text: the codes.
    """

    name: str
    scale: Scale
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    factor: int
    text: str

    def about(self) -> dict[str, object]:
        """Describe it for the page."""
        return {
            "name": self.name,
            "logarithmic": self.scale.logarithmic,
            "low": self.scale.low,
            "high": self.scale.high,
            "shape": self.shape,
            "spacing": self.spacing,
            "factor": self.factor,
            "error": self.scale.error,
        }


@final
class MapVolumes:
    """The cubes of a map, averaged over blocks, and their packed volumes."""

    def __init__(self, density: DustMap, samples: int) -> None:
        """samples: how many of the map's, at most."""
        self._map = density
        self._drawn = min(samples, density.n_samples)
        self._packed: dict[tuple[str, int], Volume] = {}
        self._finest: dict[str, NDArray[np.float32]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The volumes that the map has, the mean first."""
        has_spread = Quantity.STD in self._map.available or self._map.n_samples > 1
        plain = ["mean", *(["spread"] if has_spread else [])]
        plain += ["coverage"] if Quantity.COVERAGE in self._map.available else []
        return (*plain, *(f"sample {k + 1}" for k in range(self._drawn)))

    def within(self, most_bytes: int, beside: int = 0) -> tuple[Volume, ...]:
        """Pack all volumes in at most so many bytes: the mean as fine as it can be, then the rest.

        beside: bytes that the page has beside them. UserError where blocks of 64 voxels a side take
        more.
        """
        factor = of_rest = _COARSEST
        for factor, of_rest in self._factors():
            volumes, room = [], most_bytes - beside
            for name in self.names:
                volumes.append(self._volume(name, factor if name == "mean" else of_rest))
                room -= len(volumes[-1].text)
                if room < 0:
                    break
            else:
                return tuple(volumes)
        coarsest = (self._volume(n, factor if n == "mean" else of_rest) for n in self.names)
        least = beside + sum(len(volume.text) for volume in coarsest)
        raise UserError(
            f"the page: expected room for {len(self.names)} cubes, at least {least:,} bytes, got "
            f"{most_bytes:,} bytes; allow more (--max-size), or fewer samples (--samples)"
        )

    def _factors(self) -> Iterator[tuple[int, int]]:
        """Yield side lengths of blocks, of the mean and of the rest, from fine to coarse."""
        shape = np.array(self._map.grid.shape)
        for factor in range(1, min(_COARSEST, max(shape)) + 1):
            blocks = -(-shape // factor)
            if blocks.max() <= MOST_SIDE and blocks.prod() <= MOST_VOXELS:
                yield from ((factor, rest) for rest in range(factor, 2 * factor + 2))

    def _volume(self, name: str, factor: int) -> Volume:
        if (name, factor) not in self._packed:
            values = self.values(name, factor)
            logarithmic = self.positive and name != "coverage"
            scale = Scale(False, 0.0, 1.0) if name == "coverage" else Scale.of(values, logarithmic)
            z, y, x = values.shape
            a, b, c = (factor * step for step in self._map.grid.spacing)
            text = packed(scale.encode(values))
            self._packed[name, factor] = Volume(name, scale, (x, y, z), (a, b, c), factor, text)
        return self._packed[name, factor]

    @cached_property
    def positive(self) -> bool:
        """Whether the density is nowhere negative, nor are its samples, and scales are
        logarithmic."""
        if self._map.n_samples and not self._map.layout.positive:
            return False
        mean = self.values("mean", self.finest)
        known = mean[np.isfinite(mean)]
        return bool(known.size and known.min() >= 0.0 and known.max() > 0.0)

    @cached_property
    def finest(self) -> int:
        """Side of the smallest blocks that browsers hold."""
        return next(self._factors())[0]

    def shown(self) -> dict[str, object]:
        """Choose ends of colour scales from percentiles of the mean and the uncertainty, and the
        density above which dust is drawn."""
        mean = self.values("mean", self.finest)
        density = ends_of(mean, 99.9, self.positive)
        known = mean[np.isfinite(mean)]
        threshold = float(np.percentile(known, _FAINT)) if known.size else 0.0
        spread = (0.01, 1.0)
        if "spread" in self.names:
            spread = ends_of(self.values("spread", self.finest), 99.5, self.positive)
        threshold = min(max(threshold, density[0]), density[1])
        return {"density": density, "spread": spread, "threshold": threshold}

    def values(self, name: str, factor: int) -> NDArray[np.float32]:
        """Average a cube over blocks of `factor` voxels a side: (z, y, x), NaN where none is; the
        finest mean and spread, which scales are of, are read once."""
        if factor > self.finest or name not in ("mean", "spread"):
            return self._values(name, factor)
        if name not in self._finest:
            self._finest[name] = self._values(name, factor)
        return self._finest[name]

    def _values(self, name: str, factor: int) -> NDArray[np.float32]:
        if name == "spread":
            std = self._std(factor)
            mean = self.values("mean", factor)
            if not self.positive:
                return std
            return np.divide(std, mean, out=np.full_like(std, np.nan), where=mean > 0)
        if name == "mean":
            return self._mean(factor)
        if name == "coverage":
            return self._averaged(Cube(Quantity.COVERAGE), factor)
        return self._averaged(Cube(Quantity.SAMPLES, int(name.split()[1]) - 1), factor)

    def _mean(self, factor: int) -> NDArray[np.float32]:
        if Quantity.MEAN in self._map.available:
            return self._averaged(Cube(Quantity.MEAN), factor)
        total = sum(self._averaged(cube, factor).astype(np.float64) for cube in self._samples)
        return np.asarray(total / self._map.n_samples, np.float32)

    def _std(self, factor: int) -> NDArray[np.float32]:
        """Average the map's std, or that of the samples where the map has none."""
        if Quantity.STD in self._map.available:
            return self._averaged(Cube(Quantity.STD), factor)
        positive, parts = self._map.layout.positive, []
        for box in self._slabs(factor, self._map.n_samples):
            drawn = np.stack([self._map.cubes.read(cube, box) for cube in self._samples])
            std = standard_deviation(drawn.astype(np.float64), positive)
            parts.append(block_means(std.astype(np.float32), factor))
        return np.concatenate(parts)

    @property
    def _samples(self) -> list[Cube]:
        return [Cube(Quantity.SAMPLES, k) for k in range(self._map.n_samples)]

    def _averaged(self, cube: Cube, factor: int) -> NDArray[np.float32]:
        """Read some planes at a time; at the upper faces blocks have fewer voxels."""
        slabs = self._slabs(factor, 1)
        return np.concatenate([block_means(self._map.cubes.read(cube, b), factor) for b in slabs])

    def _slabs(self, factor: int, cubes: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield slabs of whole blocks, as deep as a chunk of a file if so many cubes of it are not
        too many voxels at a time."""
        planes, rows, columns = self._map.layout.shape
        most = max(1, _TOGETHER // (cubes * rows * columns))
        depth = factor * max(1, min(_CHUNK, most) // factor)
        every = slice(None)
        yield from ((slice(k, k + depth), every, every) for k in range(0, planes, depth))


def ends_of(values: NDArray[np.float32], most: float, positive: bool) -> tuple[float, float]:
    """Choose the ends of a scale: the percentile `most`, and 0 or the least of those that matter.

    A logarithmic scale, of positive values, spans a factor of 100 at most.
    """
    known = values[np.isfinite(values) & ((values > 0) | (not positive))]
    if known.size == 0:
        return 0.01, 1.0
    low, high = (float(end) for end in np.percentile(known, (0.5, most)))
    low = max(low, high / _SPAN) if positive else min(low, 0.0)
    if high > low:
        return low, high
    return (high / 3.0, 3.0 * high) if positive else (low, low + (abs(low) or 1.0))


def block_means(values: NDArray[np.float32], factor: int) -> NDArray[np.float32]:
    """Average finite values (z, y, x) over blocks of `factor` a side, NaN where there are none."""
    if factor == 1:
        return values
    known = np.isfinite(values)
    total, count = np.where(known, values, 0.0).astype(np.float64), known.astype(np.float64)
    for axis in range(3):
        starts = np.arange(0, values.shape[axis], factor)
        total, count = (np.add.reduceat(part, starts, axis=axis) for part in (total, count))
    means = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return means.astype(np.float32)
