"""Scenes in binary glTF 2.0 (GLB): surfaces of constant density, the Sun and named places.

The file is a header of 12 bytes, a chunk of JSON and a chunk of numbers, little-endian, both as
long as a multiple of four bytes (Khronos glTF 2.0, section 4.4). Vertices are heliocentric Galactic
X, Y, Z in pc. glTF is y-up and right-handed, so the node `dustmap` above all others turns them by
−90° about X: x = X, y = Z, z = −Y. A viewer with metres has one for each pc.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap import __version__
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import galactic, positions_of
from dustmap.sky.maps import DustMap
from dustmap.sky.maps._cubes import refuse_unknown
from dustmap.sky.view._surfaces import EDGES, Surface, iso_surface
from dustmap.tables import replacing

Array: TypeAlias = NDArray[np.float64]
_Json: TypeAlias = dict[str, Any]

#: Levels over the mean density of the map, unless others are asked for.
LEVELS = (3.0, 6.0, 12.0)
#: Types of numbers, targets of buffers and modes of primitives, as glTF counts them.
_FLOAT, _UNSIGNED = 5126, 5125
_VERTICES, _INDICES = 34962, 34963
_LINES, _TRIANGLES = 1, 4
_JSON_CHUNK, _BINARY_CHUNK = b"JSON", b"BIN\0"
#: A file says its own length in 32 bits.
_MOST_BYTES = 2**32 - 1
#: sRGB of the thinnest and of the densest surface, and of those between; opacity of these two.
_SHADES = ((0.99, 0.69, 0.35), (0.80, 0.28, 0.34), (0.36, 0.07, 0.43))
_OPACITY = (0.15, 0.85)
_SUN, _PLACE, _LINE = (1.0, 0.84, 0.1), (0.0, 0.62, 0.45), (0.45, 0.45, 0.45)
#: Radius of marks in parts of the longest side of the box.
_MARK = 0.006
#: −90° about X, as a quaternion x, y, z, w.
_UPRIGHT = (-float(np.sqrt(0.5)), 0.0, 0.0, float(np.sqrt(0.5)))
_AXES = (
    "vertices: heliocentric Galactic X (to l = 0), Y (to l = 90 deg), Z (to b = 90 deg); "
    "the node dustmap turns them to x = X, y = Z, z = -Y"
)


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """A scene of a map: `binary`, complete; its surfaces, from the thinnest to the densest."""

    binary: bytes
    surfaces: tuple[Surface, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.binary)

    @property
    def triangles(self) -> int:
        """Triangles of all surfaces."""
        return sum(len(surface.triangles) for surface in self.surfaces)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the scene, whole or not at all; the name ends in .glb."""
        path = Path(path)
        check_scene(path)
        with replacing(path, overwrite) as partial:
            partial.write_bytes(self.binary)


def check_scene(path: str | Path) -> None:
    """Refuse a name that `Scene.save` would refuse, before anything is computed."""
    if Path(path).suffix.lower() != ".glb":
        raise UserError(f"{path}: expected a scene that ends in .glb")


def scene_of(
    density: DustMap,
    levels: Sequence[float] = (),
    points: Mapping[str, SkyCoord] | None = None,
    history: Sequence[str] = (),
) -> Scene:
    """Make a scene of a map: surfaces of constant mean density, the box, the Sun and points.

    Parameters
    ----------
    density : the map, whose whole mean is read
    levels : of the surfaces in mag/pc; 3, 6 and 12 times the mean density if there are none
    points : coordinates with distances by their names, each place a node of the scene
    history : lines on where the map comes from

    Raises
    ------
    UserError
        Where a level is not among the densities of the map, or a voxel has no density.

    Examples
    --------
    >>> grid = RegularGrid((-100.0,) * 3, (10.0,) * 3, (21,) * 3)
    >>> r2 = ((grid.points() - grid.points()[6000]) ** 2).sum(1).numpy()
    >>> ball = 1e-3 + 0.02 * np.exp(-0.5 * r2 / 20.0**2)
    >>> scene = scene_of(DustMap.from_nodes(grid, ball, None, "A_V"), levels=[0.005, 0.01])
    >>> scene.binary[:4], [round(surface.area, -2) for surface in scene.surfaces]
    (b'glTF', [16100.0, 7700.0])
    """
    each = {name: positions_of(at.reshape(-1)) for name, at in (points or {}).items()}
    names = [name for name, places in each.items() for _ in places]
    places = np.concatenate([np.empty((0, 3)), *each.values()])
    if not np.isfinite(places).all():
        raise UserError("points: expected finite places, got some that are no numbers")
    return scene_at(density, levels, names, places, history)


def scene_at(
    density: DustMap,
    levels: Sequence[float],
    names: Sequence[str],
    places: Array,
    history: Sequence[str],
) -> Scene:
    """Make the scene of `scene_of` with points at X, Y, Z (N, 3) in pc."""
    density = density.on_one_grid()
    mean = density.mean
    chosen = sorted(set(levels)) or _usual_levels(mean)
    surfaces = tuple(iso_surface(mean, level, density.grid) for level in chosen)
    document = _Document()
    for k, surface in enumerate(surfaces):
        document.add_surface(surface, k / max(1, len(surfaces) - 1), density.system.name)
    document.add_frame(density.grid)
    radius = _MARK * float(np.max(np.subtract(density.grid.upper, density.grid.lower)))
    ball = _ball()
    document.add_marks(ball, ["Sun"], np.zeros((1, 3)), 1.5 * radius, _SUN)
    document.add_marks(ball, names, places, radius, _PLACE)
    extras = {
        "unit": "pc",
        "axes": _AXES,
        "density_unit": "mag/pc",
        "extinction_system": density.system.name,
        "levels": [surface.level for surface in surfaces],
        "history": list(history),
    }
    return Scene(document.binary(extras), surfaces)


def _usual_levels(mean: NDArray[np.float32]) -> list[float]:
    refuse_unknown(mean)
    middle = float(np.mean(mean, dtype=np.float64))
    levels = [factor * middle for factor in LEVELS if factor * middle < float(mean.max())]
    if not middle > 0.0 or not levels:
        raise UserError(
            f"levels: no density is {LEVELS[0]:g} times the mean of the map, {middle:.3g} mag/pc; "
            f"state levels below {float(mean.max()):.3g}"
        )
    return levels


def _ball() -> Surface:
    """Return a ball of radius 1."""
    grid = RegularGrid((-1.5,) * 3, (0.5,) * 3, (7,) * 3)
    r = np.linalg.norm(grid.points().numpy(), axis=1).reshape(grid.shape)
    rough = iso_surface((-r).astype(np.float32), -1.1, grid)
    length = np.linalg.norm(rough.vertices, axis=1, keepdims=True)
    return Surface(0.0, rough.vertices / length, rough.triangles)


@final
class _Document:
    """The parts of a glTF file, as they are added."""

    def __init__(self) -> None:
        self.numbers = bytearray()
        self.views: list[_Json] = []
        self.accessors: list[_Json] = []
        self.meshes: list[_Json] = []
        self.materials: list[_Json] = []
        self.nodes: list[_Json] = []

    def add_surface(self, surface: Surface, place: float, system: str) -> None:
        """Add a surface; place: 0 of the thinnest to 1 of the densest."""
        colour = [np.interp(place, (0.0, 0.5, 1.0), channel) for channel in np.transpose(_SHADES)]
        opacity = float(np.interp(place, (0.0, 1.0), _OPACITY))
        name = f"{surface.level:.3g} mag/pc ({system})"
        mesh = self._surface(name, surface, self._material(name, colour, opacity))
        extras = {"density": surface.level, "unit": "mag/pc"}
        self.nodes.append({"name": name, "mesh": mesh, "extras": extras})

    def add_frame(self, grid: RegularGrid) -> None:
        """Add the edges of the box of voxel centres, and a line from the Sun to l = 0."""
        corners = np.array(
            [[(grid.lower, grid.upper)[c >> k & 1][k] for k in range(3)] for c in range(8)]
        )
        self._add_lines("box", corners, np.array(EDGES)[:, :2])
        if grid.upper[0] > 0.0:
            ahead = np.array([(0.0, 0.0, 0.0), (grid.upper[0], 0.0, 0.0)])
            self._add_lines("towards the Galactic centre", ahead, np.array([(0, 1)]))

    def add_marks(
        self,
        ball: Surface,
        names: Sequence[str],
        places: Array,
        radius: float,
        colour: tuple[float, float, float],
    ) -> None:
        """Add balls at places (N, 3), which share one mesh."""
        if not len(places):
            return
        mesh = self._surface("mark", ball, self._material("mark", colour, 1.0))
        for name, place in zip(names, places, strict=True):
            node: _Json = {"name": name, "mesh": mesh, "scale": 3 * [radius]}
            if np.any(place):
                l, b, distance = (round(float(value), 4) for value in galactic(place))
                node["translation"] = place.tolist()
                node["extras"] = {"l_deg": l, "b_deg": b, "distance_pc": distance}
            self.nodes.append(node)

    def binary(self, extras: _Json) -> bytes:
        """Join header, JSON and numbers."""
        children = list(range(1, 1 + len(self.nodes)))
        root = {"name": "dustmap", "rotation": _UPRIGHT, "children": children, "extras": extras}
        text = json.dumps(
            {
                "asset": {"version": "2.0", "generator": f"dustmap {__version__}"},
                "scene": 0,
                "scenes": [{"name": "dust", "nodes": [0]}],
                "nodes": [root, *self.nodes],
                "meshes": self.meshes,
                "materials": self.materials,
                "accessors": self.accessors,
                "bufferViews": self.views,
                "buffers": [{"byteLength": len(self.numbers)}],
            },
            ensure_ascii=False,
            allow_nan=False,
        ).encode()
        chunks = (
            (_JSON_CHUNK, text + b" " * (-len(text) % 4)),
            (_BINARY_CHUNK, bytes(self.numbers)),
        )
        length = 12 + sum(8 + len(content) for _, content in chunks)
        if length > _MOST_BYTES:
            raise UserError(f"the scene would take {length:,} bytes: state fewer, higher levels")
        parts = [struct.pack("<4sII", b"glTF", 2, length)]
        for kind, content in chunks:
            parts += [struct.pack("<I4s", len(content), kind), content]
        return b"".join(parts)

    def _add_lines(self, name: str, vertices: Array, pairs: NDArray[np.int64]) -> None:
        material = self._material(name, _LINE, 1.0)
        mesh = self._mesh(name, {"POSITION": vertices}, pairs, material, _LINES)
        self.nodes.append({"name": name, "mesh": mesh})

    def _surface(self, name: str, surface: Surface, material: int) -> int:
        vertices = {"POSITION": surface.vertices, "NORMAL": surface.normals}
        return self._mesh(name, vertices, surface.triangles, material, _TRIANGLES)

    def _mesh(
        self,
        name: str,
        vertices: Mapping[str, Array],
        indices: NDArray[np.int64],
        material: int,
        mode: int,
    ) -> int:
        primitive = {
            "attributes": {k: self._accessor(v, _VERTICES) for k, v in vertices.items()},
            "indices": self._accessor(indices.ravel(), _INDICES),
            "material": material,
            "mode": mode,
        }
        self.meshes.append({"name": name, "primitives": [primitive]})
        return len(self.meshes) - 1

    def _material(self, name: str, srgb: Sequence[float], opacity: float) -> int:
        """Add a matt material; factors of glTF are linear."""
        c = np.asarray(srgb, np.float64)
        linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        look = {
            "baseColorFactor": [*np.round(linear, 4).tolist(), opacity],
            "metallicFactor": 0.0,
            "roughnessFactor": 1.0,
        }
        material: _Json = {"name": name, "pbrMetallicRoughness": look, "doubleSided": True}
        if opacity < 1.0:
            material["alphaMode"] = "BLEND"
        self.materials.append(material)
        return len(self.materials) - 1

    def _accessor(self, values: NDArray[Any], target: int) -> int:
        """Append numbers, (V, 3) in float32 or indices (I,), and say where and what they are."""
        stored = values.astype("<f4" if target == _VERTICES else "<u4")
        content = np.ascontiguousarray(stored).tobytes()
        view = {"buffer": 0, "byteOffset": len(self.numbers), "byteLength": len(content)}
        self.views.append({**view, "target": target})
        self.numbers += content
        self.accessors.append(
            {
                "bufferView": len(self.views) - 1,
                "componentType": _FLOAT if target == _VERTICES else _UNSIGNED,
                "count": len(stored),
                "type": "VEC3" if stored.ndim == 2 else "SCALAR",
                "min": np.atleast_1d(stored.min(0)).tolist(),
                "max": np.atleast_1d(stored.max(0)).tolist(),
            }
        )
        return len(self.accessors) - 1
