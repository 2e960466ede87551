"""The rotation to Galactic coordinates is astropy's; what is in another frame is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import FK4, FK5, SkyCoord
from astropy.io.votable import from_table, writeto
from astropy.io.votable.tree import CooSys
from astropy.table import QTable, Table

from dustmap.errors import UserError
from dustmap.sky.catalogs import card_named, galactic_from_icrs, read_catalog, read_places
from dustmap.sky.systems import system_named
from tests.sky.catalogs.files import star_columns, write

A_V = system_named("A_V")
OLD = "an equinox before 1984"


def equatorial(ra: str = "ra", dec: str = "dec", **keywords: Any) -> Table:
    """Stars with directions of such names, and a header."""
    table = Table(star_columns(), meta=keywords)
    table.rename_columns(["l", "b"], [ra, dec])
    return table


def check(path: Path, is_read: bool, **columns: str) -> None:
    """Stars and places are read as ICRS, or refused for their equinox."""
    card = card_named("generic", columns)
    for read in (
        lambda: read_catalog(path, card, system=A_V).stars,
        lambda: read_places(path, card),
    ):
        if is_read:
            found, plain = read(), star_columns()
            l, b = galactic_from_icrs(plain["l"].value, plain["b"].value)
            np.testing.assert_allclose([found.l, found.b], [l, b], rtol=1e-12)
        else:
            with pytest.raises(UserError, match=f"{OLD}.* SkyCoord.*FK4.*, or correct the header"):
                read()


@pytest.mark.parametrize("format_name", ["fits", "ecsv", "hdf5 of astropy", "parquet"])
@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"RADESYS": "FK4"}, False),
        ({"RADECSYS": "FK4-NO-E", "EQUINOX": 1950.0}, False),
        ({"RADESYS": "FK5", "EQUINOX": 1975.0}, False),
        ({"EQUINOX": "B1950"}, False),
        ({"EPOCH": 1950.0}, False),
        ({"EPOCH": 1950.0, "EQUINOX": 2000.0}, True),
        ({"EPOCH": 1950.0, "RADESYS": "ICRS"}, True),
        ({"EPOCH": 2016.0}, True),
        ({"EPOCH": 1991.25, "RADESYS": "FK5"}, True),
    ],
)
def test_a_header_of_an_old_equinox(
    tmp_path: Path, format_name: str, keywords: dict[str, Any], expected: bool
) -> None:
    check(write(tmp_path, format_name, equatorial(**keywords)), expected)


@pytest.mark.parametrize("of_fields", [True, False])
@pytest.mark.parametrize(
    ("system", "equinox", "expected"),
    [("eq_FK4", "B1950", False), ("eq_FK5", "J2000", True), ("ICRS", None, True)],
)
def test_a_system_of_a_votable(
    tmp_path: Path, system: str, equinox: str | None, of_fields: bool, expected: bool
) -> None:
    document = from_table(equatorial())
    document.resources[0].coordinate_systems.append(CooSys(ID="a", system=system, equinox=equinox))
    if of_fields:
        other = CooSys(ID="b", system="eq_FK4" if expected else "ICRS")
        document.resources[0].coordinate_systems.append(other)
        for field in document.get_first_table().fields:
            field.ref = "a" if field.name in ("ra", "dec") else "b"
    writeto(document, str(tmp_path / "stars.vot"))
    check(tmp_path / "stars.vot", expected)


@pytest.mark.parametrize("format_name", ["fits", "ecsv"])
@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"RADESYS": "FK5", "EQUINOX": 2015.5}, "another equinox .*frame=FK5.equinox=.J2015.5"),
        ({"EQUINOX": "J2050"}, "another equinox .*frame=FK5.equinox=.J2050"),
        ({"RADESYS": "GALACTIC"}, "another frame"),
        ({"RADESYS": "ECLIPTIC", "EQUINOX": 2000.0}, "another frame"),
    ],
)
def test_a_header_of_another_frame(
    tmp_path: Path, format_name: str, keywords: dict[str, Any], said: str
) -> None:
    path = write(tmp_path, format_name, equatorial(**keywords))
    with pytest.raises(UserError, match=rf"columns ra, dec .*{said}"):
        read_catalog(path, system=A_V)


@pytest.mark.parametrize(
    ("system", "equinox"), [("ecl_FK5", "J2000"), ("galactic", None), ("eq_FK5", "J1991.25")]
)
def test_another_system_of_a_votable(tmp_path: Path, system: str, equinox: str | None) -> None:
    document = from_table(equatorial())
    document.resources[0].coordinate_systems.append(CooSys(ID="a", system=system, equinox=equinox))
    for field in document.get_first_table().fields:
        field.ref = "a" if field.name in ("ra", "dec") else None
    writeto(document, str(tmp_path / "stars.vot"))
    with pytest.raises(UserError, match=r"columns ra, dec .*another (frame|equinox)"):
        read_catalog(tmp_path / "stars.vot", system=A_V)


def test_a_galactic_system_of_other_fields(tmp_path: Path) -> None:
    document = from_table(equatorial())
    document.resources[0].coordinate_systems.append(CooSys(ID="a", system="galactic"))
    writeto(document, str(tmp_path / "stars.vot"))
    check(tmp_path / "stars.vot", True)


def test_names_of_an_old_equinox(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", equatorial("RAB1950", "DEB1950"))
    check(path, False, ra="RAB1950", dec="DEB1950")
    path = write(tmp_path, "ecsv", equatorial("RAB1950", "DEB1950", RADESYS="ICRS"))
    check(path, False, ra="RAB1950", dec="DEB1950")
    # The names are of one column, the header is of the file.
    check(write(tmp_path, "fits", equatorial("RAJ2000", "DEJ2000", EQUINOX=1950.0)), True)


@pytest.mark.parametrize("format_name", ["ecsv", "parquet"])
def test_coordinates_of_astropy(tmp_path: Path, format_name: str) -> None:
    columns = {"ra": "sky.ra", "dec": "sky.dec"}
    frames = (FK4(), False), (FK5(equinox="J1975"), False), (FK5(), True)
    for number, (frame, is_read) in enumerate(frames):
        table, folder = QTable(equatorial()), tmp_path / f"{number}"
        table["sky"] = SkyCoord(table["ra"], table["dec"], unit="deg", frame=frame)
        folder.mkdir()
        check(write(folder, format_name, table), is_read, **columns)


def test_galactic_places_have_no_equinox(tmp_path: Path) -> None:
    table = Table(star_columns(), meta={"EQUINOX": 1950.0})
    assert len(read_places(write(tmp_path, "fits", table))) == len(table)


def test_names_of_galactocentric_places(tmp_path: Path) -> None:
    table = equatorial("X_gc", "Y_gc")
    table["Z_gc"] = 0.0
    card = card_named("generic", {"x": "X_gc", "y": "Y_gc", "z": "Z_gc"})
    path = write(tmp_path, "csv", table)
    with pytest.raises(UserError, match=r"X_gc, Y_gc, Z_gc are Galactocentric .* from the Sun"):
        read_catalog(path, card, system=A_V)


@pytest.mark.parametrize(
    ("frame", "names"),
    [
        ("icrs", ("x", "y", "z")),
        ("galactocentric", ("x", "y", "z")),
        ("barycentrictrueecliptic", ("lon", "lat", "distance")),
        ("supergalactic", ("sgl", "sgb", "distance")),
        ("icrs", ("ra", "dec", "distance")),
    ],
)
@pytest.mark.parametrize("format_name", ["ecsv", "parquet"])
def test_galactic_places_are_of_no_other_frame(
    tmp_path: Path, format_name: str, frame: str, names: tuple[str, ...]
) -> None:
    plain = star_columns()
    near = SkyCoord(
        plain["l"], plain["b"], distance=np.full(len(plain), 90.0) * u.pc, frame="galactic"
    )
    places = near.transform_to(frame)
    if names[0] == "x":
        places = SkyCoord(places, representation_type="cartesian")
    table = QTable({"place": places, **{n: plain[n] for n in plain.colnames if "extinction" in n}})
    path = write(tmp_path, format_name, table)
    roles = ("x", "y", "z") if names[0] == "x" else ("l", "b", "distance")
    card = card_named("generic", {r: f"place.{n}" for r, n in zip(roles, names, strict=True)})
    with pytest.raises(UserError, match=rf"{frame}.*: another frame .*expected Galactic l, b"):
        read_places(path, card)


@pytest.mark.parametrize("name", ["ecl_lon", "elat", "SGL", "ecliptic_longitude"])
def test_names_of_another_frame_are_no_galactic_ones(tmp_path: Path, name: str) -> None:
    table = Table(star_columns())
    table.rename_column("l", name)
    path = write(tmp_path, "fits", table)
    with pytest.raises(UserError, match="missing l") as caught:
        read_places(path, "generic")
    assert f"l={name}" not in str(caught.value)
    with pytest.raises(UserError, match=f"columns {name}, b: another frame"):
        read_places(path, card_named("generic", {"l": name}))


def test_against_skycoord_to_a_billionth_of_a_degree() -> None:
    rng = np.random.default_rng(0)
    pole = SkyCoord(l=np.zeros(3), b=[90.0, -90.0, 0.0], unit="deg", frame="galactic").icrs
    ra = np.concatenate([rng.uniform(0, 360, 5000), pole.ra.deg, [0.0, 360.0, 12.0, 13.0]])
    dec = np.concatenate(
        [np.degrees(np.arcsin(rng.uniform(-1, 1, 5000))), pole.dec.deg, [0.0, 0.0, 90.0, -90.0]]
    )
    l, b = galactic_from_icrs(ra, dec)
    found = SkyCoord(l=l, b=b, unit="deg", frame="galactic")
    expected = SkyCoord(ra=ra, dec=dec, unit="deg").galactic
    assert found.separation(expected).to_value(u.deg).max() < 1e-9
    ordinary = np.abs(b) < 89.0
    np.testing.assert_allclose(b, expected.b.deg, rtol=0, atol=1e-9)
    shift = (l - expected.l.deg + 180.0) % 360.0 - 180.0
    assert np.abs(shift[ordinary]).max() < 1e-9
    assert ((l >= 0.0) & (l < 360.0)).all()


def both(tmp_path: Path, shift: int = 0, **changes: Any) -> Path:
    """Stars with l, b and, some rows further down, the ra, dec of the same."""
    table = Table(star_columns())
    sky = SkyCoord(table["l"], table["b"], unit="deg", frame="galactic").icrs
    table["ra"], table["dec"] = np.roll(sky.ra.deg, shift), np.roll(sky.dec.deg, shift)
    for name, values in changes.items():
        table[name] = values
    table.write(tmp_path / "both.ecsv")
    return tmp_path / "both.ecsv"


def test_two_pairs_of_directions_say_the_same(tmp_path: Path) -> None:
    found = read_catalog(both(tmp_path), "generic", system=A_V).stars
    np.testing.assert_allclose(found.l, star_columns()["l"].value)


def test_two_pairs_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = both(tmp_path, shift=1)
    words = "l, b and ra, dec are different directions in 100 % of the first .* rows, in row"
    for read in (lambda: read_catalog(path, "generic", system=A_V), lambda: read_places(path)):
        with pytest.raises(UserError, match=f"{words}.*--column l=l --column b=b"):
            read()
    with pytest.raises(UserError, match=words):
        read_catalog(path, card_named("generic", {"extinction": "extinction"}), system=A_V)
    card = card_named("generic", {"l": "l", "b": "b"})
    found = read_catalog(path, card, system=A_V).stars
    np.testing.assert_allclose(found.l, star_columns()["l"].value)


def test_words_and_numbers_that_stand_for_nothing_are_not_compared(tmp_path: Path) -> None:
    n = len(star_columns()["l"])
    nothing = np.full(n, -999.0)
    cases = {"ra": ["05:34:12"] * n, "dec": np.full(n, np.nan), "both": None}
    for name, values in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        columns = {"ra": nothing, "dec": nothing} if values is None else {name: values}
        path = both(folder, shift=1, **columns)
        assert len(read_catalog(path, "generic", system=A_V).stars) == n


def test_whole_degrees_are_the_same_direction(tmp_path: Path) -> None:
    columns = star_columns()
    sky = SkyCoord(columns["l"], columns["b"], frame="galactic").icrs
    path = both(tmp_path, ra=np.round(sky.ra.deg), dec=np.round(sky.dec.deg))
    assert len(read_catalog(path, "generic", system=A_V).stars) == len(columns)


def test_a_beam_of_constant_direction_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "beam.toml").write_text(
        'inherits = "generic"\ntitle = "a beam"\nsystem = "A_V"\n[constants]\nl = 30.0\nb = 5.0\n'
    )
    path = both(tmp_path)
    table = Table.read(path)
    table.remove_columns(["l", "b"])
    table.write(path, overwrite=True)
    found = read_catalog(path, tmp_path / "beam.toml").stars
    np.testing.assert_allclose(found.l, 30.0)
