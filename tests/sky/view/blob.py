"""A small map whose one cloud is known, and the page of it, read as a program would."""

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.view._volumes import STEPS, Scale

#: The Sun is inside, and the box is neither a cube nor centred.
GRID = RegularGrid(lower=(-100.0, -80.0, -50.0), spacing=(10.0, 10.0, 10.0), shape=(23, 18, 12))
CLOUD = (60.0, 40.0, -10.0)
#: Half width of the cloud in pc, its density and that around it in mag/pc.
WIDTH, PEAK, AROUND = 12.0, 0.02, 0.0004
#: The data reach so far, in pc.
REACH = 90.0


def blob_map(samples: int = 4) -> DustMap:
    """A cloud in thin dust, known to a third; samples in pairs about the mean."""
    x, y, z = np.meshgrid(*(GRID.lower[i] + 10.0 * np.arange(GRID.shape[i]) for i in range(3)))
    x, y, z = (np.asarray(axis.transpose(2, 0, 1), np.float64) for axis in (x, y, z))
    away = (x - CLOUD[0]) ** 2 + (y - CLOUD[1]) ** 2 + (z - CLOUD[2]) ** 2
    mean = AROUND * (1.0 + 0.001 * x) + PEAK * np.exp(-0.5 * away / WIDTH**2)
    noise = 0.3 * np.random.default_rng(2).standard_normal((samples // 2, *mean.shape))
    drawn = mean * np.exp(np.stack([noise, -noise], axis=1)).reshape(samples, *mean.shape)
    coverage = np.where(x**2 + y**2 + z**2 < REACH**2, 0.9, 0.1)
    arrays = {
        Quantity.MEAN: mean,
        Quantity.STD: mean * (0.3 + 0.001 * y),
        Quantity.COVERAGE: coverage,
        Quantity.SAMPLES: drawn,
    }
    single = {q: np.asarray(values, np.float32) for q, values in arrays.items()}
    return DustMap.from_arrays(GRID, single, "A_V", positive=True)


def decoded(scale: Scale, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The values (...) of codes (...); NaN of 0."""
    u = scale.low + (scale.high - scale.low) * (codes.astype(np.float64) - 1.0) / STEPS
    return np.where(codes > 0, 10.0**u if scale.logarithmic else u, np.nan)


def odd_maps() -> dict[str, DustMap]:
    """Maps at the edge of what there is."""
    here, away = RegularGrid((-5.0,) * 3, (5.0,) * 3, (3,) * 3), (300.0, 0.0, 0.0)
    one = np.ones((3, 3, 3), np.float32)
    dot, hole = 0.0 * one, 0.01 * one
    dot[1, 1, 1], hole[0] = 0.02, np.nan
    cubes = {
        "constant": {Quantity.MEAN: 0.01 * one, Quantity.STD: 0.0 * one},
        "empty": {Quantity.MEAN: 0.0 * one},
        "negative": {Quantity.MEAN: -0.01 * one, Quantity.STD: one},
        "a dot": {Quantity.MEAN: dot, Quantity.STD: dot},
        "a hole": {Quantity.MEAN: hole},
        "unknown": {Quantity.MEAN: np.nan * one},
    }
    maps = {name: DustMap.from_arrays(here, arrays, "A_V") for name, arrays in cubes.items()}
    far = RegularGrid(away, (5.0, 7.0, 11.0), (2, 3, 4))
    ramp = np.linspace(0.001, 0.002, 24, dtype=np.float32).reshape(4, 3, 2)
    return maps | {"far": DustMap.from_arrays(far, {Quantity.MEAN: ramp}, "E(B-V)")}


class Page(HTMLParser):
    """Elements of a page, with their attributes, and the text of its scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data

    @property
    def about(self) -> dict[str, Any]:
        """What the page says of the map."""
        said: dict[str, Any] = json.loads(self.texts["about"])
        return said

    def values(self, number: int) -> NDArray[np.float64]:
        """The values (z, y, x) of a volume: inflate, then sum the differences along x."""
        described = self.about["volumes"][number]
        x, y, z = described["shape"]
        raw = zlib.decompress(base64.b64decode(self.texts[f"volume-{number}"]))
        codes = np.frombuffer(raw, np.uint8).reshape(z, y, x).copy()
        for i in range(1, x):
            codes[..., i] += codes[..., i - 1]
        scale = Scale(described["logarithmic"], described["low"], described["high"])
        return decoded(scale, codes)
