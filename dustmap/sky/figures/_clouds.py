"""Clouds on pictures: their outlines, and the names of those that have one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from matplotlib.axes import Axes

from dustmap.sky._coordinates import cartesian
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._style import Array

#: Names on one panel, at most, those of the largest clouds.
_NAMES = 20
#: Pale green stands out from the colours of densities, of spreads and of differences alike.
_COLOUR = "#7CFFB2"


class Outlined(Protocol):
    """An image on which balls have outlines."""

    def outline(self, place: Array, radius: float) -> Array | None: ...


@final
@dataclass(frozen=True, eq=False)
class CloudMarks:
    """Clouds to be drawn: places (K, 3) in pc, radii (K,) in pc, names (K,), "" for none."""

    places: Array
    radii: Array
    names: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "CloudMarks":
        """Read a table of `dustmap clouds`, or another with l, b, distance, radius and name."""
        # Pictures without clouds wait for no reader of tables.
        from dustmap.tables import number_column, read_tables, text_column

        table = read_tables(path)
        l, b, distance, radii = (
            number_column(table, name) for name in ("l", "b", "distance", "radius")
        )
        named = "name" in table.colnames
        names = text_column(table, "name") if named else ("",) * len(l)
        return cls(cartesian(l, b, distance), radii, names)

    def draw(self, axis: Axes, image: Outlined, named: bool) -> None:
        """Outline the clouds that an image shows; named: with the names of the largest."""
        left = _NAMES if named else 0
        for k in np.argsort(-self.radii, kind="stable"):
            outline = image.outline(self.places[k], float(self.radii[k]))
            if outline is None:
                continue
            line: dict[str, Any] = {"color": _COLOUR, "linewidth": 0.7, "scalex": False}
            axis.plot(outline[:, 0], outline[:, 1], scaley=False, **line)
            # The first of several, as the others are lines through the same cloud.
            name = self.names[k].partition(";")[0]
            if name and left:
                left -= 1
                x, y = (0.5 * (outline.max(0) + outline.min(0))).tolist()
                words: dict[str, Any] = {"ha": "center", "va": "center"}
                axis.text(x, y, name, **words, **style.outlined(style.SMALL - 1.0))
