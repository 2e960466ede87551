"""The generic card: any way to give directions, distances and extinctions, in any unit."""

import itertools
import re
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from astropy.table import QTable, Table

from dustmap.cli import main
from dustmap.errors import UserError
from dustmap.sky.catalogs import SchemaCard, card_named, read_catalog, read_places
from dustmap.sky.stars import (
    ExactDistances,
    FlatParallax,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
)
from dustmap.sky.systems import conversion, system_named
from tests.sky.catalogs.files import WITH_UNITS, star_columns, write

N = 20
A_V = system_named("A_V")
RNG = np.random.default_rng(8)
SKY = SkyCoord(
    l=RNG.uniform(0, 360, N),
    b=RNG.uniform(-80, 80, N),
    distance=RNG.uniform(50, 500, N) * u.pc,
    unit=("deg", "deg"),
    frame="galactic",
)
PC = SKY.distance.to_value(u.pc)
XYZ = SKY.cartesian.xyz.to_value(u.pc)
VALUE = RNG.normal(0.1, 0.3, N)
POSITIONS = {
    "galactic": {"l": SKY.l.deg, "b": SKY.b.deg},
    "icrs": {"ra": SKY.icrs.ra.deg, "dec": SKY.icrs.dec.deg},
    "cartesian": {"x": XYZ[0], "y": XYZ[1], "z": XYZ[2]},
}
DISTANCES = {
    "percentiles": {"distance_p16": PC - 9, "distance_p50": PC, "distance_p84": PC + 20},
    "two-sided": {"dist": PC, "dist_err_lo": np.full(N, 9.0), "dist_err_hi": np.full(N, 20.0)},
    "error": {"distance": PC, "distance_error": np.full(N, 9.0)},
    "parallax": {"parallax": 1000 / PC, "parallax_error": np.full(N, 0.1)},
    "exact": {"distance": PC},
}
EXTINCTIONS = {
    "error": {"extinction": VALUE, "extinction_error": np.full(N, 0.15)},
    "two-sided": {
        "av": VALUE,
        "av_lower_error": np.full(N, 0.1),
        "av_upper_error": np.full(N, 0.2),
    },
    "percentiles": {"ext16": VALUE - 0.1, "ext50": VALUE, "ext84": VALUE + 0.2},
}
KINDS = {
    "percentiles": PercentileDistances,
    "two-sided": PercentileDistances,
    "error": GaussianDistances,
    "parallax": ParallaxDistances,
    "exact": ExactDistances,
}


@pytest.mark.parametrize(
    ("position", "distance", "extinction"),
    list(itertools.product(POSITIONS, DISTANCES, EXTINCTIONS)),
)
def test_every_combination(tmp_path: Path, position: str, distance: str, extinction: str) -> None:
    columns = POSITIONS[position] | DISTANCES[distance] | EXTINCTIONS[extinction]
    path = write(tmp_path, "csv", Table(columns))
    catalog = read_catalog(path, system=A_V, prior=FlatParallax(5000.0))
    stars = catalog.stars
    assert isinstance(stars.distances, KINDS[distance])
    assert stars.source_id.tolist() == list(range(N))
    np.testing.assert_allclose(stars.l, SKY.l.deg, atol=1e-9)
    np.testing.assert_allclose(stars.b, SKY.b.deg, atol=1e-9)
    np.testing.assert_array_equal(stars.extinction, VALUE)
    np.testing.assert_allclose(stars.extinction_error, 0.15)
    np.testing.assert_allclose(stars.distance, PC, rtol=0.05)
    if distance == "parallax":
        assert stars.distances.columns()["parallax_mas"].tolist() == (1000 / PC).tolist()
    if distance in ("percentiles", "two-sided"):
        for side, offset in (("p16", -9), ("p84", 20)):
            np.testing.assert_allclose(
                stars.distances.columns()[f"distance_{side}_pc"], PC + offset
            )
    assert catalog.provenance["distances_from"] == distance


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("dist_err_hi", 0.0, "distance_error_upper is not > 0"),
        ("dist_err_lo", 600.0, "distance_error_lower is not below the distance"),
        ("av_upper_error", -0.1, "extinction_error_upper is below 0"),
    ],
)
def test_two_errors_that_no_star_has(tmp_path: Path, column: str, value: float, words: str) -> None:
    columns = POSITIONS["galactic"] | DISTANCES["two-sided"] | EXTINCTIONS["two-sided"]
    columns[column] = np.where(np.arange(N) == 4, value, columns[column])
    path = write(tmp_path, "csv", Table(columns))
    with pytest.raises(UserError, match=words):
        read_catalog(path, system=A_V)
    dropped = read_catalog(path, system=A_V, invalid="drop").stars
    assert len(dropped) == N - 1


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("r_lo", "r_hi"), "--column distance_p16=r_lo --column distance_p50=r_med --column "
         "distance_p84=r_hi"),
        (("r_e_lo", "r_e_hi"), "--column distance_error_lower=r_e_lo --column "
         "distance_error_upper=r_e_hi"),
        (("r_err1", "r_err2"), "--column distance_error=r_err1"),
    ],
)  # fmt: skip
def test_sides_of_distances_are_proposed_as_what_they_are_called(
    tmp_path: Path, names: tuple[str, str], options: str
) -> None:
    sides = {names[0]: PC - 9, names[1]: PC + 20}
    columns = POSITIONS["galactic"] | EXTINCTIONS["error"] | {"r_med": PC} | sides
    path = write(tmp_path, "csv", Table(columns))
    card = card_named("generic").with_columns({"distance": "r_med"})
    with pytest.raises(UserError, match=re.escape(f"name them, such as {options}, or say")):
        read_catalog(path, card, system=A_V)


def test_a_side_is_not_proposed_for_the_value(tmp_path: Path) -> None:
    sides = {"r_lo_geo": PC - 9, "r_hi_geo": PC + 20, "r_med_geo": PC}
    path = write(tmp_path, "csv", Table(POSITIONS["galactic"] | EXTINCTIONS["error"] | sides))
    with pytest.raises(UserError, match="such as --column distance=r_med_geo or"):
        read_catalog(path, system=A_V)


def test_positions_are_distances_where_nothing_else_is(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", Table(POSITIONS["cartesian"] | EXTINCTIONS["error"]))
    stars = read_catalog(path, system=A_V).stars
    assert isinstance(stars.distances, ExactDistances)
    np.testing.assert_allclose(stars.distance, PC)
    np.testing.assert_allclose(stars.positions(), XYZ.T, atol=1e-9)


@pytest.mark.parametrize("format_name", WITH_UNITS)
def test_units_of_the_file_win(tmp_path: Path, format_name: str) -> None:
    table = QTable(
        {
            "L": SKY.l.to(u.rad),
            "B": SKY.b.to(u.arcmin),
            "Distance": SKY.distance.to(u.kpc),
            "Distance_Error": np.full(N, 0.009) * u.kpc,
            "Extinction": (1000.0 * VALUE) * u.mmag,
            "Extinction_Error": np.full(N, 150.0) * u.mmag,
        },
        meta={"EXTSYS": "E(B-V)"},
    )
    stars = read_catalog(write(tmp_path, format_name, table)).stars
    np.testing.assert_allclose(stars.l, SKY.l.deg)
    np.testing.assert_allclose(stars.b, SKY.b.deg)
    np.testing.assert_allclose(stars.distance, PC)
    np.testing.assert_allclose(stars.distances.columns()["distance_error_pc"], 9.0)
    np.testing.assert_allclose(stars.extinction, VALUE)
    np.testing.assert_allclose(stars.extinction_error, 0.15)
    assert stars.system.name == "E(B-V)"


def test_units_in_the_name(tmp_path: Path) -> None:
    columns = {"l_deg": SKY.l.deg, "b_deg": SKY.b.deg, "distance_kpc": PC / 1000}
    path = write(tmp_path, "csv", Table(columns | EXTINCTIONS["error"]))
    np.testing.assert_allclose(read_catalog(path, system=A_V).stars.distance, PC)


@pytest.mark.parametrize(
    ("column", "unit", "words"),
    [
        ("distance_pc", u.mag, "column distance_pc is in mag: expected a unit like pc"),
        ("extinction", u.pc, "column extinction is in pc: expected a unit like mag"),
        ("b", u.pc, "column b is in pc: expected a unit like deg"),
    ],
)
@pytest.mark.parametrize("format_name", WITH_UNITS)
def test_wrong_units(
    tmp_path: Path, format_name: str, column: str, unit: u.UnitBase, words: str
) -> None:
    table = Table(star_columns(), meta={})
    table[column].unit = unit
    with pytest.raises(UserError, match=words):
        read_catalog(write(tmp_path, format_name, table), system=A_V)


@pytest.mark.parametrize("format_name", WITH_UNITS)
def test_systems_are_converted_from_the_label(tmp_path: Path, format_name: str) -> None:
    table = star_columns()
    path = write(tmp_path, format_name, table)
    assert read_catalog(path).stars.system == A_V
    catalog = read_catalog(path, system=system_named("E(B-V)"))
    np.testing.assert_allclose(catalog.stars.extinction, table["extinction"].value / 3.1)
    assert catalog.stars.system.name == "E(B-V)"
    assert catalog.provenance["files"][0]["extinction_system"] == "A_V"


def test_an_unlabelled_extinction_is_no_guess(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", Table(star_columns()))
    with pytest.raises(UserError, match="nothing says which extinction this is") as caught:
        read_catalog(path)
    for choice in ("A_V", "E(ZGR23)", "custom:NAME"):
        assert choice in str(caught.value)
    assert read_catalog(path, system=A_V).stars.system == A_V


@pytest.mark.parametrize(
    ("value", "error", "spelled"),
    [("ebv", "ebv_err", "E(B-V)"), ("E_BV", "E_BV_err", "E(B-V)"), ("av", "e_av", "A_V")],
)
def test_the_name_of_a_column_is_proposed_for_its_system(
    tmp_path: Path, value: str, error: str, spelled: str
) -> None:
    table = Table(star_columns())
    table.rename_columns(["extinction", "extinction_error"], [value, error])
    path = write(tmp_path, "csv", table)
    with pytest.raises(UserError, match=re.escape(f'such as "{spelled}" for a column {value};')):
        read_catalog(path)


def test_files_of_two_systems(tmp_path: Path) -> None:
    other = star_columns(seed=1)
    other["source_id"] += 10**6
    other.meta["EXTSYS"] = "A_G"
    paths = [write(tmp_path, "fits", star_columns()), write(tmp_path, "fits", other, "other")]
    with pytest.raises(UserError, match=r"is in A_V and .* in A_G; name the system to convert"):
        read_catalog(paths)
    stars = read_catalog(paths, system=A_V).stars
    np.testing.assert_allclose(stars.extinction[7:], other["extinction"].value * 2.8 / 2.2732)


def test_a_label_that_contradicts_the_card(tmp_path: Path) -> None:
    table = star_columns()
    table.meta["EXTSYS"] = "A_G"
    table.rename_columns(
        ["l", "b", "distance_pc", "extinction", "extinction_error"],
        ["l_deg", "b_deg", "dist_pc", "AV", "e_AV"],
    )
    table["e_dist_pc"] = 1.0 * u.pc
    with pytest.raises(UserError, match="A_G by the file itself and A_V by the card"):
        read_catalog(write(tmp_path, "fits", table), "dias2021")


def test_files_of_two_kinds(tmp_path: Path) -> None:
    shared = POSITIONS["galactic"] | EXTINCTIONS["error"]
    exact = write(tmp_path, "csv", Table(shared | DISTANCES["exact"]), "exact")
    uncertain = write(tmp_path, "csv", Table(shared | DISTANCES["error"]), "uncertain")
    with pytest.raises(UserError, match="ingest them apart"):
        read_catalog([exact, uncertain], system=A_V)


@pytest.mark.parametrize("error", ["E(B-V)_err", "E(B-V)_error", "sigma_E(B-V)", "E_BV_err"])
def test_errors_of_reddening_go_by_many_names(tmp_path: Path, error: str) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    value = "E_BV" if error.startswith("E_BV") else "E(B-V)"
    table = Table({**columns, value: VALUE, error: np.full(N, 0.15)})
    stars = read_catalog(write(tmp_path, "csv", table), system=system_named("E(B-V)")).stars
    np.testing.assert_allclose(stars.extinction, VALUE)
    np.testing.assert_allclose(stars.extinction_error, 0.15)


def test_reddening_in_the_columns_of_vizier(tmp_path: Path) -> None:
    """Of the system that the column is called by, whatever they are converted to."""
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    table = Table({**columns, "E(B-V)": VALUE, "e_E(B-V)": np.full(N, 0.15)})
    path, reddening = write(tmp_path, "csv", table), system_named("E(B-V)")
    stars = read_catalog(path, system=reddening).stars
    np.testing.assert_allclose(stars.extinction, VALUE)
    np.testing.assert_allclose(stars.extinction_error, 0.15)
    assert stars.system == reddening
    assert read_catalog(path).stars.system == reddening
    converted = read_catalog(path, system=A_V).stars
    np.testing.assert_allclose(converted.extinction, 3.1 * np.asarray(VALUE))
    np.testing.assert_allclose(converted.extinction_error, 3.1 * 0.15)
    plain = Table({**columns, "EBV": VALUE, "e_EBV": np.full(N, 0.15)})
    path = write(tmp_path, "csv", plain, "plain")
    with pytest.raises(UserError, match="name its system"):
        read_catalog(path)
    np.testing.assert_allclose(read_catalog(path, system=reddening).stars.extinction, VALUE)


@pytest.mark.parametrize("column", ["SFD_EBV", "my_A_G"])
def test_names_that_end_like_another_extinction_are_warned_of(
    tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    path = write(tmp_path, "csv", Table({**columns, column: VALUE, "sigma": np.full(N, 0.15)}))
    card = card_named("generic", {"extinction": column, "extinction_error": "sigma"})
    stars = read_catalog(path, card, system=A_V).stars
    np.testing.assert_allclose(stars.extinction, VALUE)
    assert f"column {column} is taken as A_V, as declared; if it is the" in caplog.text


@pytest.mark.parametrize("column", ["EBV", "ebv", "E_BV"])
def test_reddening_by_any_spelling_is_no_extinction(
    tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    path = write(tmp_path, "csv", Table({**columns, column: VALUE, "ebv_err": np.full(N, 0.15)}))
    stars = read_catalog(path, system=A_V).stars
    np.testing.assert_allclose(stars.extinction, 3.1 * np.asarray(VALUE))
    np.testing.assert_allclose(stars.extinction_error, 3.1 * 0.15)
    assert f"column {column} is E(B-V) by its name: converted to A_V" in caplog.text
    custom = read_catalog(path, system=system_named("custom:mine")).stars
    np.testing.assert_allclose(custom.extinction, VALUE)


def test_extinctions_by_name_are_those_that_the_reader_declares_among_their_kind(
    tmp_path: Path,
) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    values = {"av16": VALUE, "av50": np.asarray(VALUE) + 0.1, "av84": np.asarray(VALUE) + 0.2}
    path = write(tmp_path, "csv", Table({**columns, **values}))
    for name in ("A_V", "A0", "A_V_542"):
        stars = read_catalog(path, system=system_named(name)).stars
        np.testing.assert_allclose(stars.extinction, values["av50"])
        assert stars.system.name == name
    reddening = read_catalog(path, system=system_named("E(B-V)")).stars
    np.testing.assert_allclose(reddening.extinction, values["av50"] / 3.1)


@pytest.mark.parametrize(("header", "written"), [("D", "D [kpc]"), ("D [kpc]", "D")])
def test_errors_that_are_named_without_a_unit_have_that_of_their_values(
    tmp_path: Path, header: str, written: str
) -> None:
    kiloparsecs = {header: np.full(N, 0.2), "eD": np.full(N, 0.02)}
    extinctions = {"extinction": VALUE, "extinction_error": np.full(N, 0.1)}
    path = write(tmp_path, "csv", Table({**POSITIONS["galactic"], **kiloparsecs, **extinctions}))

    def error_of(error: str) -> float:
        card = card_named("generic", columns={"distance": written, "distance_error": error})
        distances = read_catalog(path, card, system=A_V).stars.distances
        assert isinstance(distances, GaussianDistances)
        np.testing.assert_allclose(distances.distance, 200.0)
        return float(distances.error[0])

    assert error_of("eD") == pytest.approx(20.0)
    assert error_of("eD [kpc]") == pytest.approx(20.0)
    assert error_of("eD [pc]") == pytest.approx(0.02)


@pytest.mark.parametrize(
    "name",
    [
        "distance_std",
        "e_distance",
        "sigma_distance",
        "distance_sigma",
        "distance_uncertainty",
        "err_distance",
    ],
)
def test_errors_of_distances_are_read_by_their_usual_names(tmp_path: Path, name: str) -> None:
    columns = POSITIONS["galactic"] | {"distance": PC, name: 0.1 * PC} | EXTINCTIONS["error"]
    stars = read_catalog(write(tmp_path, "csv", Table(columns)), system=A_V).stars
    assert isinstance(stars.distances, GaussianDistances)
    np.testing.assert_allclose(stars.distances.error, 0.1 * PC)


def test_bounds_of_distances_are_percentiles(tmp_path: Path) -> None:
    bounds = {"distance_lower": PC - 9, "distance": PC, "distance_upper": PC + 20}
    columns = POSITIONS["galactic"] | bounds | EXTINCTIONS["error"]
    stars = read_catalog(write(tmp_path, "csv", Table(columns)), system=A_V).stars
    assert isinstance(stars.distances, PercentileDistances)


@pytest.mark.parametrize(
    ("distance", "error"),
    [
        *(("dist", "s_dist"), ("rgeo", "B_rgeo"), ("r_med_geo", "r_lo_geo"), ("D", "sigma_D")),
        *(("dist", "fractional_distance_error"), ("dist", "dist_var"), ("dist", "d84")),
    ],
)
def test_distances_are_not_exact_beside_an_unread_error(
    tmp_path: Path, distance: str, error: str
) -> None:
    columns = POSITIONS["galactic"] | {distance: PC, error: 0.1 * PC} | EXTINCTIONS["error"]
    path = write(tmp_path, "csv", Table(columns))
    named = {"distance": distance}
    with pytest.raises(UserError, match=f"count as exact, while {error} look"):
        read_catalog(path, card_named("generic", named), system=A_V)
    exact = card_named("generic", named | {"distance_error": "none"})
    assert isinstance(read_catalog(path, exact, system=A_V).stars.distances, ExactDistances)
    gaussian = card_named("generic", named | {"distance_error": error})
    assert isinstance(read_catalog(path, gaussian, system=A_V).stars.distances, GaussianDistances)


def test_places_have_errors_of_distances_too(tmp_path: Path) -> None:
    columns = POSITIONS["cartesian"] | {"distance_error": 0.1 * PC} | EXTINCTIONS["error"]
    with pytest.raises(UserError, match="count as exact, while distance_error look"):
        read_places(write(tmp_path, "csv", Table(columns)))


def test_errors_beside_x_y_z_ask_for_distances(tmp_path: Path) -> None:
    for name in ("distance_error", "x_err"):
        columns = POSITIONS["cartesian"] | {name: 0.1 * PC} | EXTINCTIONS["error"]
        path = write(tmp_path, "csv", Table(columns), name)
        with pytest.raises(UserError, match=f"{name} look like their errors; make a column"):
            read_catalog(path, system=A_V)
        exact = card_named("generic", {"distance_error": "none"})
        assert isinstance(read_catalog(path, exact, system=A_V).stars.distances, ExactDistances)
    x, y, z = (np.asarray(values) for values in POSITIONS["cartesian"].values())
    columns["d"] = np.sqrt(x**2 + y**2 + z**2)
    named = card_named("generic", {"distance": "d", "distance_error": name})
    path = write(tmp_path, "csv", Table(columns), "both")
    assert isinstance(read_catalog(path, named, system=A_V).stars.distances, GaussianDistances)


def test_two_errors_that_differ_in_case_are_two_sides(tmp_path: Path) -> None:
    columns = POSITIONS["galactic"] | DISTANCES["exact"]
    sides = {"av": VALUE, "e_av": np.full(N, 0.1), "E_av": np.full(N, 0.3)}
    path = write(tmp_path, "csv", Table(columns | sides))
    with pytest.raises(UserError, match="extinction_error = e_av, and there is another column of"):
        read_catalog(path, system=A_V)
    card = card_named("generic", {"extinction": "av", "extinction_error": "E_av"})
    np.testing.assert_allclose(read_catalog(path, card, system=A_V).stars.extinction_error, 0.3)


@pytest.mark.parametrize("column", ["A_G", "a_g", "AG", "ag"])
def test_one_passband_is_converted_however_it_is_spelled(tmp_path: Path, column: str) -> None:
    columns = POSITIONS["galactic"] | DISTANCES["exact"]
    columns |= {column: VALUE, "extinction_error": np.full(N, 0.1)}
    card = card_named("generic", {"extinction": column})
    stars = read_catalog(write(tmp_path, "csv", Table(columns)), card, system=A_V).stars
    factor = conversion(system_named("A_G"), A_V)
    np.testing.assert_allclose(stars.extinction, factor * np.asarray(VALUE))


def test_zero_points_are_of_parallaxes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = POSITIONS["galactic"] | DISTANCES["exact"] | EXTINCTIONS["error"]
    path = write(tmp_path, "csv", Table(columns))
    catalog = read_catalog(path, system=A_V, parallax_zero_point=-0.5)
    assert "zero point of -0.5 mas is for parallaxes and not used: distances are" in caplog.text
    assert "parallax_zero_point_mas" not in catalog.provenance
    given = [str(path), "--system", "A_V", "--output", str(tmp_path / "stars.zarr")]
    main(["ingest", *given, "--distance-max", "5kpc"])
    assert "--distance-scale are for parallaxes and not used" in capsys.readouterr().err


def test_letters_of_photometry_are_no_directions(tmp_path: Path) -> None:
    """B is a magnitude, L a luminosity, whatever else has the directions."""
    given = EXTINCTIONS["error"] | DISTANCES["exact"]
    places = POSITIONS["galactic"]
    vizier = {"GLON": places["l"], "GLAT": places["b"]}
    letters = {"L": np.full(N, 3.0), "B": np.full(N, 9.0)}
    expected = read_catalog(write(tmp_path, "csv", Table(given | places)), system=A_V).stars
    for number, columns in enumerate((vizier, POSITIONS["icrs"])):
        path = write(tmp_path, "csv", Table(given | letters | columns), f"photometry{number}")
        stars = read_catalog(path, system=A_V).stars
        np.testing.assert_allclose(stars.b, expected.b, atol=1e-6)
        np.testing.assert_allclose(stars.l, expected.l, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "factor"), [(("dist_kpc", "dist_err"), 1e3), (("dist", "dist_err"), 1.0)]
)
def test_errors_without_a_unit_have_that_of_their_values(
    tmp_path: Path, names: tuple[str, str], factor: float
) -> None:
    given = POSITIONS["galactic"] | EXTINCTIONS["error"]
    columns = {names[0]: np.full(N, 0.2), names[1]: np.full(N, 0.01)}
    stars = read_catalog(write(tmp_path, "csv", Table(given | columns)), system=A_V).stars
    assert isinstance(stars.distances, GaussianDistances)
    np.testing.assert_allclose(stars.distances.distance, 0.2 * factor)
    np.testing.assert_allclose(stars.distances.error, 0.01 * factor)


def test_an_error_keeps_the_unit_that_its_name_says(tmp_path: Path) -> None:
    given = POSITIONS["galactic"] | EXTINCTIONS["error"]
    columns = {"dist_kpc": np.full(N, 0.2), "e_dist_pc": np.full(N, 10.0)}
    stars = read_catalog(write(tmp_path, "csv", Table(given | columns)), system=A_V).stars
    assert isinstance(stars.distances, GaussianDistances)
    np.testing.assert_allclose(stars.distances.error, 10.0)


@pytest.mark.parametrize("unit", [u.dex(u.pc), u.dex, u.mag(u.pc)])
def test_logarithms_are_no_units(tmp_path: Path, unit: u.UnitBase) -> None:
    given = POSITIONS["galactic"] | EXTINCTIONS["error"]
    table = Table(given | {"distance": np.full(N, 2.5)})
    table["distance"].unit = unit
    with pytest.raises(UserError, match="a logarithm: expected a unit like pc for distance"):
        read_catalog(write(tmp_path, "ecsv", table), system=A_V)


def test_a_unit_that_the_user_names_is_taken_where_the_file_has_none_that_is_known(
    tmp_path: Path,
) -> None:
    given = POSITIONS["galactic"] | EXTINCTIONS["error"]
    table = Table(given | {"distance": np.full(N, 2.5)})
    table["distance"].unit = u.UnrecognizedUnit("furlongs")
    path = write(tmp_path, "ecsv", table)
    with pytest.raises(UserError, match='name another, as --column "distance=distance'):
        read_catalog(path, system=A_V)
    card = card_named("generic", {"distance": "distance [kpc]"})
    np.testing.assert_allclose(read_catalog(path, card, system=A_V).stars.distance, 2500.0)


NAMES_WITH_UNITS = {
    "l (rad)": SKY.l.rad,
    "b [rad]": SKY.b.rad,
    "Dist(kpc)": PC / 1e3,
    "dist_err": PC / 1e4,
    "E(B-V) [mmag]": 1e3 * VALUE,
    "e_E(B-V) (mag)": np.full(N, 0.05),
}


@pytest.mark.parametrize("format_name", ["csv", "fits", "parquet"])
def test_units_behind_names(tmp_path: Path, format_name: str) -> None:
    stars = read_catalog(write(tmp_path, format_name, Table(NAMES_WITH_UNITS))).stars
    np.testing.assert_allclose([stars.l, stars.b], [SKY.l.deg, SKY.b.deg])
    assert isinstance(stars.distances, GaussianDistances)
    np.testing.assert_allclose(stars.distances.distance, PC)
    np.testing.assert_allclose(stars.distances.error, PC / 10.0)
    np.testing.assert_allclose(stars.extinction, VALUE)
    np.testing.assert_allclose(stars.extinction_error, 0.05)
    assert stars.system.name == "E(B-V)"


@pytest.mark.parametrize("named", ["Dist(kpc)", "Dist", "Dist [kpc]"])
def test_a_unit_behind_a_name_that_the_user_gives(tmp_path: Path, named: str) -> None:
    path = write(tmp_path, "csv", Table(NAMES_WITH_UNITS))
    stars = read_catalog(path, card_named("generic", {"distance": named})).stars
    np.testing.assert_allclose(stars.distance, PC)


def test_brackets_that_hold_no_unit_of_theirs(tmp_path: Path) -> None:
    """V of A(V) is not volt, and two columns with a unit behind one name are too many."""
    table = Table(POSITIONS["galactic"] | {"dist": PC, "A(V)": VALUE, "e_A(V)": np.full(N, 0.1)})
    card = card_named("generic", {"extinction": "A(V)", "extinction_error": "e_A(V)"})
    stars = read_catalog(write(tmp_path, "csv", table), card, system=A_V).stars
    np.testing.assert_array_equal(stars.extinction, VALUE)
    table["dist (kpc)"], table["dist (pc)"] = PC / 1e3, PC
    assert len(read_catalog(write(tmp_path, "fits", table), card, system=A_V).stars) == N
    table.remove_column("dist")
    with pytest.raises(UserError, match=r"dist could be any of dist \(kpc\), dist \(pc\); rename"):
        read_catalog(write(tmp_path, "parquet", table), card, system=A_V)


def test_lists_of_any_length_are_named(tmp_path: Path) -> None:
    given = POSITIONS["galactic"] | EXTINCTIONS["error"] | DISTANCES["exact"]
    columns = {name: pa.array(np.asarray(values, float)) for name, values in given.items()}
    lists = pa.array([[0.1] * (1 + row % 3) for row in range(N)])
    pq.write_table(pa.table(columns | {"epochs": lists}), tmp_path / "stars.parquet")
    assert len(read_catalog(tmp_path / "stars.parquet", system=A_V).stars) == N
    places = read_places(tmp_path / "stars.parquet")
    assert places.table["epochs"][2].tolist() == [0.1] * 3
    pq.write_table(pa.table(columns | {"distance": lists}), tmp_path / "stars.parquet")
    with pytest.raises(
        UserError, match=r"column distance holds lists .* make a plain column of it"
    ):
        read_catalog(tmp_path / "stars.parquet", system=A_V)


def test_columns_of_one_entry_a_row_are_columns(tmp_path: Path) -> None:
    columns = POSITIONS["galactic"] | EXTINCTIONS["error"] | DISTANCES["exact"]
    with h5py.File(tmp_path / "stars.h5", "w") as file:
        for name, values in columns.items():
            file[name] = np.asarray(values, float)[:, None]
    assert len(read_catalog(tmp_path / "stars.h5", system=A_V).stars) == N


def test_an_error_goes_with_its_own_value(tmp_path: Path) -> None:
    columns = POSITIONS["galactic"] | DISTANCES["exact"]
    both = Table(columns | {"A_V": VALUE, "E(B-V)": VALUE / 3.1, "e_E(B-V)": np.full(N, 0.05)})
    path = write(tmp_path, "csv", both)
    with pytest.raises(UserError, match=r"extinction = A_V, and extinction_error = e_E\(B-V\)"):
        read_catalog(path, system=A_V)
    named = {"extinction": "E(B-V)", "extinction_error": "e_E(B-V)"}
    stars = read_catalog(path, card_named("generic", named), system=A_V).stars
    np.testing.assert_allclose(stars.extinction_error, 3.1 * 0.05)


def named(columns: dict[str, str]) -> SchemaCard:
    """The generic card with columns that a user has named."""
    return card_named("generic", columns)


@pytest.mark.parametrize("column", ["A_H", "ah", "ebpminrp_gspphot", "E(J-K)", "A_J_mean"])
def test_extinctions_of_bands_that_no_system_has_are_refused(tmp_path: Path, column: str) -> None:
    """A custom system may be called anything."""
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    path = write(tmp_path, "csv", Table({**columns, column: VALUE, "er": np.full(N, 0.15)}))
    card = named({"extinction": column, "extinction_error": "er"})
    with pytest.raises(UserError, match="the extinction of another band by its name; rename it"):
        read_catalog(path, card, system=A_V)
    custom = read_catalog(path, card, system=system_named("custom:mine")).stars
    np.testing.assert_allclose(custom.extinction, VALUE)
    named_so = {**columns, "ebv": VALUE, "e_ebv": np.full(N, 0.15)}
    labelled = write(tmp_path, "fits", Table(named_so, meta={"EXTSYS": "custom:mine"}))
    assert read_catalog(labelled).stars.system == system_named("custom:mine")


def test_words_behind_a_system_leave_it_what_it_is(tmp_path: Path) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"], "er": np.full(N, 0.15)}
    for column, system in {"ag_gspphot": "A_G", "ebv_mag": "E(B-V)", "A_K": "A_Ks"}.items():
        path = write(tmp_path, "csv", Table({**columns, column: VALUE}), column)
        card = named({"extinction": column, "extinction_error": "er"})
        factor = conversion(system_named(system), A_V)
        stars = read_catalog(path, card, system=A_V).stars
        np.testing.assert_allclose(stars.extinction, factor * np.asarray(VALUE))


def test_a_header_and_a_column_that_say_different_extinctions_are_refused(tmp_path: Path) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    values = {"E(B-V)": VALUE, "e_E(B-V)": np.full(N, 0.15)}
    table = Table({**columns, **values}, meta={"EXTSYS": "A_V"})
    with pytest.raises(UserError, match=r"are A_V \(EXTSYS in the header\), and the column"):
        read_catalog(write(tmp_path, "fits", table))


def test_answers_of_a_map_have_the_system_of_the_map(tmp_path: Path) -> None:
    """Beside measured extinctions of another."""
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"]}
    values = {"extinction_mean": VALUE, "extinction_std": np.full(N, 0.15)}
    table = Table({**columns, **values}, meta={"EXTSYS": "E(B-V)", "MAPSYS": "A_V"})
    card = named({"extinction": "extinction_mean", "extinction_error": "extinction_std"})
    stars = read_catalog(write(tmp_path, "fits", table), card).stars
    assert stars.system == A_V
    np.testing.assert_allclose(stars.extinction, VALUE)
    measured = dict(zip(("p16", "p50", "p84"), (VALUE - 0.1, VALUE, VALUE + 0.1), strict=True))
    for name, value in measured.items():
        table[f"extinction_{name}"] = value
    path = write(tmp_path, "fits", table, "measured")
    assert read_catalog(path).stars.system == system_named("E(B-V)")


@pytest.mark.parametrize(
    "columns",
    [
        {"dist16": PC - 9, "dist50": PC, "dist84": PC + 9, "dist": PC},
        {**DISTANCES["percentiles"], "distance": PC, "distance_error": np.full(N, 9.0)},
        {"distance": PC, "L_z": PC, "u_x": PC, "dist_function": PC, "xmatch_dist_sigma": PC},
    ],
)
def test_columns_that_belong_together_or_to_nothing_are_read(
    tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    path = write(
        tmp_path, "csv", Table({**POSITIONS["galactic"], **EXTINCTIONS["error"], **columns})
    )
    np.testing.assert_allclose(read_catalog(path, system=A_V).stars.distances.median, PC)
    values = {"av16": VALUE - 0.1, "av50": VALUE, "av84": VALUE + 0.1, "av": VALUE}
    both = Table({**POSITIONS["galactic"], **values, **columns})
    stars = read_catalog(write(tmp_path, "csv", both, "both"), system=A_V).stars
    np.testing.assert_allclose(stars.extinction, VALUE)


@pytest.mark.parametrize(
    "columns",
    [
        {"dist": PC, "av": VALUE, "E_BV": VALUE, "E_BV_error": PC},
        {"dist": PC, "EBV": VALUE, "AV_mean": VALUE, "AV_err": np.full(N, 0.1)},
        {**EXTINCTIONS["error"], "distance": PC, "dist": PC, "dist_err_lo": PC, "dist_err_hi": PC},
        {**EXTINCTIONS["error"], "distance": PC, "dist": PC, "dist16": PC - 9, "dist84": PC + 9},
    ],
)
def test_errors_of_other_columns_are_not_those_of_a_value(
    tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    path = write(tmp_path, "csv", Table({**POSITIONS["galactic"], **columns}))
    with pytest.raises(UserError, match="which is another column's; name both"):
        read_catalog(path, system=A_V)


def test_errors_of_another_system_are_refused_where_its_values_are_not_there(
    tmp_path: Path,
) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"], "extinction": VALUE}
    path = write(tmp_path, "csv", Table({**columns, "e_ebv": np.full(N, 0.1)}))
    with pytest.raises(UserError, match=r"e_ebv, are those of E\(B-V\) by their name"):
        read_catalog(path, system=A_V)
    read_catalog(path, system=system_named("E(B-V)"))


@pytest.mark.parametrize(("position", "first"), [("galactic", "l"), ("cartesian", "x")])
def test_a_unit_of_one_coordinate_alone_is_refused(
    tmp_path: Path, position: str, first: str
) -> None:
    """Of hours and degrees, and of all of them, it is read."""
    columns = dict(POSITIONS[position])
    unit = u.rad if position == "galactic" else u.kpc
    rest = EXTINCTIONS["error"] | (DISTANCES["exact"] if position == "galactic" else {})
    table = QTable({**columns, **rest})
    table[first] = (columns[first] * (u.deg if unit is u.rad else u.pc)).to(unit)
    with pytest.raises(UserError, match="and no unit of"):
        read_catalog(write(tmp_path, "ecsv", table), system=A_V)
    for name in columns:
        table[name] = (columns[name] * (u.deg if unit is u.rad else u.pc)).to(unit)
    stars = read_catalog(write(tmp_path, "ecsv", table, "all"), system=A_V).stars
    np.testing.assert_allclose(stars.distance, PC)
    hours = QTable({**POSITIONS["icrs"], **DISTANCES["exact"], **EXTINCTIONS["error"]})
    hours["ra"] = (POSITIONS["icrs"]["ra"] * u.deg).to(u.hourangle)
    read = read_catalog(write(tmp_path, "ecsv", hours, "hours"), system=A_V).stars
    np.testing.assert_allclose(read.distance, PC)


@pytest.mark.parametrize("name", ["dist_kpc", "d_kpc", "R_kpc", "DIST_KPC", "r_pc", "d"])
def test_names_that_end_with_a_unit_say_it(tmp_path: Path, name: str) -> None:
    """Named by the user, by the card's own name or not, or in a card of the user."""
    unit = u.kpc if name.lower().endswith("_kpc") else u.pc
    columns = {**POSITIONS["galactic"], **EXTINCTIONS["error"]}
    path = write(tmp_path, "csv", Table({**columns, name: (PC * u.pc).to_value(unit)}))
    card = card_named("generic", {"distance": name})
    np.testing.assert_allclose(read_catalog(path, card, system=A_V).stars.distance, PC)
    own = tmp_path / "own.toml"
    own.write_text(
        f'title = "mine"\ninherits = "generic"\n[columns]\ndistance = {{names = ["{name}"]}}'
    )
    np.testing.assert_allclose(
        read_catalog(path, card_named(str(own)), system=A_V).stars.distance, PC
    )


@pytest.mark.parametrize("name", ["d_kpc", "d_pc", "R_kpc"])
def test_a_distance_by_another_name_is_not_taken_for_three_coordinates(
    tmp_path: Path, name: str
) -> None:
    columns = {**POSITIONS["galactic"], **EXTINCTIONS["error"], name: PC}
    with pytest.raises(UserError, match="missing distance "):
        read_catalog(write(tmp_path, "csv", Table(columns)), system=A_V)


@pytest.mark.parametrize("written", ["D [kpc]", "D[kpc]"])
def test_units_of_named_columns_in_brackets(tmp_path: Path, written: str) -> None:
    """With or without a space before these; a unit in capitals, which is one of charge, too."""
    columns = {**POSITIONS["galactic"], **EXTINCTIONS["error"]}
    path = write(tmp_path, "csv", Table({**columns, "D": PC / 1e3}))
    card = card_named("generic", {"distance": written})
    np.testing.assert_allclose(read_catalog(path, card, system=A_V).stars.distance, PC)
    table = QTable({**columns, "distance": PC * u.pc})
    loud = write(tmp_path, "fits", table, "loud")
    fits.setval(loud, f"TUNIT{len(columns) + 1}", value="PC", ext=1)
    np.testing.assert_allclose(read_catalog(loud, system=A_V).stars.distance, PC)


@pytest.mark.parametrize(
    "column",
    ["u_distance", "distance_error_percent", "distance_geo_err", "distance_l68", "distance_q1",
     "distance_ci", "distance+"],
)  # fmt: skip
def test_more_names_of_errors_keep_distances_from_being_exact(tmp_path: Path, column: str) -> None:
    columns = {**POSITIONS["galactic"], **DISTANCES["exact"], **EXTINCTIONS["error"], column: PC}
    with pytest.raises(UserError, match="distances would count as exact"):
        read_catalog(write(tmp_path, "csv", Table(columns)), system=A_V)


@pytest.mark.parametrize("column", ["parallax_over_error", "parallax_rel_error"])
def test_what_is_made_of_errors_is_not_proposed_for_them(tmp_path: Path, column: str) -> None:
    rest = {**POSITIONS["galactic"], **EXTINCTIONS["error"]}
    path = write(tmp_path, "csv", Table({**rest, "parallax": 1000 / PC, column: PC}))
    with pytest.raises(UserError, match="missing parallax_error") as caught:
        read_catalog(path, system=A_V)
    assert f"parallax_error={column}" not in str(caught.value)
