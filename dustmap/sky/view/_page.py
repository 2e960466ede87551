"""One HTML file of a map: what it says of the map, its volumes, and the files of `page/`."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import numpy as np
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap import __version__
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import positions_of
from dustmap.sky.maps import DustMap
from dustmap.sky.maps._quantities import DATA_DOMINATED
from dustmap.sky.view._volumes import MapVolumes, Volume
from dustmap.tables import replacing

#: Bytes of a page at most, unless another number is asked for.
MOST_BYTES = 15_000_000
#: Samples of a page, unless another number is asked for.
SAMPLES = 8
#: Points that browsers draw while the map turns.
MOST_POINTS = 5_000
#: Perceptually uniform, and told apart by colour-blind eyes.
COLOUR_MAPS = ("magma", "viridis", "cividis")
#: In the order in which they are joined.
_PAGE_SCRIPTS = (
    "data.js",
    "state.js",
    "camera.js",
    "volume.js",
    "marks.js",
    "slice.js",
    "words.js",
    "page.js",
)
_PLACE = re.compile(r"\[\[(\w+)\]\]")
#: Pixels of the frame in a notebook.
_HEIGHT = 720


@final
@dataclass(frozen=True, eq=False)
class MapView:
    """A page of a map: `html`, complete; volumes: its cubes, coarser than the map's where needed.

    Jupyter shows it where it is the value of a cell.
    """

    html: str
    volumes: tuple[Volume, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.html.encode())

    @property
    def coarsened(self) -> str:
        """Say which cubes are coarser than the map's, "" for none."""
        return coarsening(self.volumes)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the page, whole or not at all; the name ends in .html."""
        path = Path(path)
        check_page(path)
        with replacing(path, overwrite) as partial:
            partial.write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """Embed the page in a frame of its own, where its styles and scripts are alone."""
        frame = f"width:100%;height:{_HEIGHT}px;border:0"
        inside = html.escape(self.html, quote=True)
        return f'<iframe style="{frame}" sandbox="allow-scripts" srcdoc="{inside}"></iframe>'


def check_page(path: str | Path) -> None:
    """Refuse a name that `MapView.save` would refuse, before anything is computed."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{path}: expected a page that ends in .html")


def coarsening(volumes: Sequence[Volume]) -> str:
    """Say which volumes have voxels of how many pc."""
    named = {"mean": volumes[0]} | ({"the others": volumes[-1]} if len(volumes) > 1 else {})
    said = [
        f"{name}: blocks of {volume.factor}³ voxels, {_lengths(volume.spacing)} pc"
        for name, volume in named.items()
        if volume.factor > 1
    ]
    return "; ".join(said)


def view_of(
    density: DustMap,
    points: Mapping[str, SkyCoord] | None = None,
    samples: int = SAMPLES,
    most_bytes: int = MOST_BYTES,
    title: str = "Dust map",
) -> MapView:
    """Make the page of a map: density, uncertainty and samples to turn, to cut and to ask.

    Values are rounded to 254 steps of log10 ρ, or of ρ where it has any sign, and the page says by
    how much that changes them. Cubes that take more than `most_bytes` together, as text, are
    averaged over blocks of voxels, the samples before the mean; the page says so, too.

    points: coordinates with distances by their names; samples: how many of the map's.

    Examples
    --------
    >>> from astropy import units as u
    >>> from dustmap.gp import RegularGrid
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> density = DustMap.from_nodes(grid, np.linspace(0.001, 0.002, 125), None, "A_V")
    >>> taurus = SkyCoord(173 * u.deg, -15 * u.deg, 90 * u.pc, frame="galactic")
    >>> page = view_of(density, {"Taurus": taurus})
    >>> page.save("view.html")
    >>> page.size < 100_000, page.coarsened
    (True, '')
    """
    named = {} if points is None else {name: positions_of(at) for name, at in points.items()}
    names = [name for name, at in named.items() for _ in at]
    places = np.concatenate([*named.values(), np.empty((0, 3))])
    return page_of(density, names, places, samples, most_bytes, {"title": title, "history": []})


def page_of(
    density: DustMap,
    names: Sequence[str],
    places: NDArray[np.float64],
    samples: int,
    most_bytes: int,
    words: Mapping[str, Any],
) -> MapView:
    """Make the page of `view_of` from arrays.

    Parameters
    ----------
    density : the map
    names : of N points
    places : (N, 3)
        X, Y, Z of the points in pc.
    samples : how many of the map's, at most
    most_bytes : of the page
    words : its title and its history
    """
    if samples < 0:
        raise UserError(f"samples: expected 0 or more, got {samples}")
    if len(names) > MOST_POINTS:
        raise UserError(
            f"points: expected at most {MOST_POINTS:,}, which a browser draws while the map turns, "
            f"got {len(names):,}; select those that matter"
        )
    if not np.isfinite(places).all():
        bad = int(np.isfinite(places).all(-1).argmin())
        raise UserError(f"points: expected finite coordinates, got {places[bad]} pc in row {bad}")
    density = density.on_one_grid()
    cubes = MapVolumes(density, samples)
    marks = [
        [str(name), *(round(float(x), 2) for x in at)]
        for name, at in zip(names, places, strict=True)
    ]
    about = {**words, **_about(density, cubes), "points": marks}
    shell = _filled(about, ())
    # Beside the text of each volume its element, its description and notes on coarser voxels.
    spare = len(shell.encode()) + 600 * len(cubes.names) + 400
    volumes = cubes.within(most_bytes, beside=spare)
    notes = {"volumes": [volume.about() for volume in volumes], "coarsened": coarsening(volumes)}
    return MapView(_filled({**about, **notes}, volumes), volumes)


def _about(density: DustMap, cubes: MapVolumes) -> dict[str, Any]:
    """Say what the page needs to know of the map."""
    grid = density.grid
    return {
        "version": __version__,
        "system": density.system.name.removeprefix("custom:"),
        "unit": "e-folds" if density.system.name.startswith("e-folding") else "mag",
        "box": [face.tolist() for face in faces_of(grid)],
        "grid": {"shape": grid.shape, "spacing": grid.spacing, "samples": density.n_samples},
        "positive": cubes.positive,
        **cubes.shown(),
        "dominated": DATA_DOMINATED,
        "colours": {name: _hexadecimal(name) for name in COLOUR_MAPS},
    }


def faces_of(grid: RegularGrid) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and the upper corner (3,) of the voxels, half a voxel beyond the centres."""
    half = 0.5 * np.array(grid.spacing)
    return np.array(grid.lower) - half, np.array(grid.upper) + half


def _hexadecimal(name: str) -> str:
    """Return 256 colours of a map as 6 digits each."""
    from matplotlib import colormaps

    table = colormaps[name](np.arange(256), bytes=True)[:, :3]
    return np.asarray(table, np.uint8).tobytes().hex()


def _filled(about: Mapping[str, Any], volumes: Sequence[Volume]) -> str:
    """Fill the page: `[[name]]` in the template stands for what is named so."""
    here = files(__package__) / "page"
    read = {name: (here / name).read_text("utf-8") for name in ("view.css", *_PAGE_SCRIPTS)}
    data = (
        f'<script type="text/plain" id="volume-{i}">{volume.text}</script>'
        for i, volume in enumerate(volumes)
    )
    fills = {
        "title": html.escape(str(about["title"])),
        "version": __version__,
        "style": read["view.css"],
        # A name that holds "</script>" must not end the element.
        "about": json.dumps(about, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "volumes": "\n".join(data),
        "script": "\n".join(read[name] for name in _PAGE_SCRIPTS),
    }
    template = (here / "view.html").read_text("utf-8")
    return _PLACE.sub(lambda place: fills[place[1]], template)


def _lengths(spacing: Sequence[float]) -> str:
    """Write 10, or 10 × 10 × 20 where they differ."""
    return " × ".join(f"{step:g}" for step in (spacing if len(set(spacing)) > 1 else spacing[:1]))
