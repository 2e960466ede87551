"""Scenes in binary glTF, parsed again: chunks, numbers, nodes, axes and units."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky import Provenance
from dustmap.sky.maps import DustMap, write_map
from dustmap.sky.view import scene_of

GRID = RegularGrid((-40.0, -60.0, -20.0), (5.0, 6.0, 4.0), (17, 21, 11))
LEVELS = [0.004, 0.01]
PLACE = SkyCoord(90 * u.deg, 0 * u.deg, 30 * u.pc, frame="galactic")


def density() -> DustMap:
    r2 = ((GRID.points().numpy() - (1.0, 30.0, 0.0)) ** 2).sum(1)
    return DustMap.from_nodes(GRID, 1e-4 + 0.02 * np.exp(-0.5 * r2 / 64.0), None, "A_V")


def parsed(binary: bytes) -> tuple[dict[str, Any], bytes]:
    """Read a GLB as its specification has it."""
    magic, version, length = struct.unpack_from("<4sII", binary)
    assert (magic, version, length) == (b"glTF", 2, len(binary))
    chunks, at = [], 12
    while at < length:
        size, kind = struct.unpack_from("<I4s", binary, at)
        assert at % 4 == size % 4 == 0
        chunks.append((kind, binary[at + 8 : at + 8 + size]))
        at += 8 + size
    (first, text), (second, numbers) = chunks
    assert (first, second) == (b"JSON", b"BIN\0")
    document = json.loads(text)
    assert document["asset"]["version"] == "2.0"
    assert document["buffers"] == [{"byteLength": len(numbers)}]
    return document, numbers


def values(document: dict[str, Any], numbers: bytes, k: int) -> NDArray[Any]:
    """Read an accessor, and check what it says of itself."""
    accessor = document["accessors"][k]
    view = document["bufferViews"][accessor["bufferView"]]
    assert view["byteOffset"] % 4 == 0
    content = numbers[view["byteOffset"] :][: view["byteLength"]]
    wide = 3 if accessor["type"] == "VEC3" else 1
    found = np.frombuffer(content, {5126: "<f4", 5125: "<u4"}[accessor["componentType"]])
    found = found.reshape(-1, wide)
    assert len(found) == accessor["count"]
    assert found.min(0).tolist() == accessor["min"]
    assert found.max(0).tolist() == accessor["max"]
    return found


def test_all_that_the_file_says_of_itself_is_right() -> None:
    document, numbers = parsed(scene_of(density(), LEVELS, {"a cloud": PLACE}).binary)
    for mesh in document["meshes"]:
        (primitive,) = mesh["primitives"]
        vertices = values(document, numbers, primitive["attributes"]["POSITION"])
        indices = values(document, numbers, primitive["indices"])
        assert indices.max() == len(vertices) - 1
        assert len(indices) % (3 if primitive["mode"] == 4 else 2) == 0
        assert primitive["material"] < len(document["materials"])
        if "NORMAL" in primitive["attributes"]:
            normals = values(document, numbers, primitive["attributes"]["NORMAL"])
            np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1.0, atol=1e-6)
    used = [node["mesh"] for node in document["nodes"] if "mesh" in node]
    assert sorted(set(used)) == list(range(len(document["meshes"])))


def test_vertices_are_on_the_levels_that_nodes_state() -> None:
    ours = density()
    document, numbers = parsed(scene_of(ours, LEVELS).binary)
    surfaces = [node for node in document["nodes"] if "density" in node.get("extras", {})]
    assert [node["extras"]["density"] for node in surfaces] == LEVELS
    opacities = []
    for node in surfaces:
        (primitive,) = document["meshes"][node["mesh"]]["primitives"]
        vertices = values(document, numbers, primitive["attributes"]["POSITION"])
        found = ours.mean_at(vertices.astype(np.float64))
        np.testing.assert_allclose(found, node["extras"]["density"], rtol=1e-5)
        material = document["materials"][primitive["material"]]
        opacities.append(material["pbrMetallicRoughness"]["baseColorFactor"][3])
        assert material["alphaMode"] == "BLEND"
    assert opacities == sorted(opacities)


def test_several_places_of_a_name_are_as_many_nodes() -> None:
    two = SkyCoord(
        [PLACE.l.deg, 10.0] * u.deg, [PLACE.b.deg, 0.0] * u.deg, [50, 60] * u.pc, frame="galactic"
    )
    document, _ = parsed(scene_of(density(), LEVELS, {"pair": two}).binary)
    assert sum("pair" in node["name"] for node in document["nodes"]) == 2
    unknown = SkyCoord(np.nan * u.deg, 0.0 * u.deg, 50.0 * u.pc, frame="galactic")
    with pytest.raises(UserError, match="expected finite places"):
        scene_of(density(), LEVELS, {"nowhere": unknown})


def test_up_is_galactic_north_and_names_are_nodes() -> None:
    document, _ = parsed(scene_of(density(), LEVELS, {"Orakel": PLACE}).binary)
    root, nodes = document["nodes"][0], {node["name"]: node for node in document["nodes"]}
    assert document["scenes"][0]["nodes"] == [0]
    assert root["children"] == list(range(1, len(nodes)))
    x, y, z, w = root["rotation"]
    np.testing.assert_allclose([x, y, z, w], [-np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
    # A quaternion turns v into v + 2 q × (q × v + w v).
    axis = np.array([x, y, z])
    turned = [v + 2 * np.cross(axis, np.cross(axis, v) + w * v) for v in np.eye(3)]
    np.testing.assert_allclose(turned, [(1, 0, 0), (0, 0, -1), (0, 1, 0)], atol=1e-12)
    assert root["extras"]["unit"] == "pc"
    assert root["extras"]["extinction_system"] == "A_V"
    assert "translation" not in nodes["Sun"]
    np.testing.assert_allclose(nodes["Orakel"]["translation"], (0.0, 30.0, 0.0), atol=1e-9)
    assert nodes["Orakel"]["extras"] == {"l_deg": 90.0, "b_deg": 0.0, "distance_pc": 30.0}
    assert {"box", "towards the Galactic centre"} <= set(nodes)


def test_usual_levels_are_multiples_of_the_mean() -> None:
    ours = density()
    levels = [surface.level for surface in scene_of(ours).surfaces]
    np.testing.assert_allclose(levels, np.array([3.0, 6.0, 12.0]) * ours.mean.mean(), rtol=1e-5)
    flat = DustMap.from_nodes(GRID, np.full(GRID.size, 0.001), None, "A_V")
    with pytest.raises(UserError, match="no density is 3 times the mean"):
        scene_of(flat)
    unknown = np.full(GRID.size, np.nan)
    with pytest.raises(UserError, match="voxels have no density; merge the tiles"):
        scene_of(DustMap.from_nodes(GRID, unknown, None, "A_V"))


def test_the_command_takes_maps_and_tables_of_clouds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_map(tmp_path / "map.fits", density(), Provenance(""))
    (tmp_path / "clouds.csv").write_text("name,l,b,distance,radius\n,90,0,30,5\n")
    output = tmp_path / "dust.glb"
    command = ["export", str(tmp_path / "map.fits"), "--format", "glb", "--output", str(output)]
    marked = ["--iso", "0.004", "0.01", "--clouds", str(tmp_path / "clouds.csv"), "--json"]
    assert main([*command, *marked]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["levels"] == LEVELS
    assert said["bytes"] == output.stat().st_size
    document, _ = parsed(output.read_bytes())
    assert "cloud 1" in [node["name"] for node in document["nodes"]]
    assert document["nodes"][0]["extras"]["history"][-1].startswith("dustmap export")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "fits", "--iso", "0.1"], "--iso: --format fits has none; glb do"),
        (["--format", "glb", "--nside", "4"], "--nside: --format glb has none"),
        (["--format", "glb", "--quantity", "std"], "always surfaces of the mean"),
        (["--format", "glb", "--step", "5pc"], "--step: for runs"),
        (["--format", "glb", "--iso", "7"], "level 7: expected one between"),
    ],
)
def test_what_a_scene_has_no_place_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_map(tmp_path / "map.fits", density(), Provenance(""))
    output = ["--output", str(tmp_path / "dust.glb")]
    assert main(["export", str(tmp_path / "map.fits"), *options, *output]) == BAD_INPUT
    assert words in capsys.readouterr().err
    assert not (tmp_path / "dust.glb").exists()


def test_scenes_end_in_glb(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends in \.glb"):
        scene_of(density(), LEVELS).save(tmp_path / "dust.gltf")
