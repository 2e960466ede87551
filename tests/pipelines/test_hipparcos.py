"""The reddening of Hipparcos stars: types, colours, errors, zero points, and a made-up table."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from dustmap.sky.catalogs import read_catalog
from pipelines.hipparcos import (
    CLASSES,
    IntrinsicColours,
    ParallaxLaw,
    ReferenceStars,
    SpectralType,
    calibrate,
    class_of,
    fit_parallax_law,
    parse_type,
)
from pipelines.hipparcos.__main__ import main
from pipelines.hipparcos._classes import PRIOR_SLOPE, R_V

CATALOGS = Path(__file__).resolve().parents[2] / "catalogs"


@pytest.mark.parametrize(
    ("text", "number", "luminosity"),
    [
        ("F5", 35.0, None),
        ("K3V", 53.0, 5.0),
        ("G8/K0III/IV", 49.0, 3.5),
        ("A9/F0V", 29.5, 5.0),
        ("B9.5V", 19.5, 5.0),
        ("K1III-IV", 51.0, 3.5),
        ("B2Iab", 12.0, 1.0),
        ("B5Ib/II", 15.0, 1.5),
        ("A0...", 20.0, None),
        ("B8Vn", 18.0, 5.0),
        ("F7 V", 37.0, 5.0),
    ],
)
def test_types_are_read(text: str, number: float, luminosity: float | None) -> None:
    assert parse_type(text) == SpectralType(number, luminosity, False)


@pytest.mark.parametrize(
    "text", ["A1m...", "B9p Si", "B2Ve", "K0IIICN...", "G5III+...", "F0V comp", "A2m A5-A9"]
)
def test_peculiar_stars_are_told(text: str) -> None:
    kind = parse_type(text)
    assert kind is not None
    assert kind.peculiar


@pytest.mark.parametrize("text", ["", "Am", "K", "M...", "DA", "F0/K2V", "V"])
def test_types_without_subclass_are_none(text: str) -> None:
    assert parse_type(text) is None


def test_stars_go_to_their_classes() -> None:
    def name(text: str, magnitude: float) -> str | None:
        one = class_of(parse_type(text), magnitude)
        return one.name if one else None

    assert name("A9/F0V", 2.5) == "A V"
    assert name("F5IV/V", 3.0) == "F V"
    assert name("F5III/IV", 3.0) == "F IV"
    assert name("K0III", 1.0) == "G8-K4 III"
    assert name("K0III", 4.0) is None  # too faint for a giant
    assert name("K0", -2.0) is None  # and too bright
    assert name("K0", 1.0) == "K0 giant"
    assert name("K0", 6.0) is None
    assert name("B9", 0.0) == "B8-B9"
    assert name("A1m...", 1.0) is None
    assert name("G2V", 4.7) is None
    assert name("A0", np.nan) is None
    assert len({one.name for one in CLASSES}) == len(CLASSES)


def test_colours_are_linear_between_types() -> None:
    colours = IntrinsicColours.read()
    numbers = np.array([20.0, 20.5, 35.0, 50.0, 50.5, 60.0])
    giant = np.array([False, False, False, True, True, False])
    found = colours.at(numbers, giant)
    # A0 V, A1 V, F5 V of Pecaut & Mamajek (2013, as updated 2024); K0 III, K1 III of its notes.
    wanted = [0.0, 0.5 * (0.0 + 0.035), 0.44, 1.02, 0.5 * (1.02 + 1.07), np.nan]
    np.testing.assert_allclose(found, wanted)


def test_colours_grow_along_the_sequences() -> None:
    colours = IntrinsicColours.read()
    for numbers, values in (colours.dwarfs, colours.giants):
        assert (np.diff(numbers) > 0).all()
        assert (np.diff(values) > 0).all()


def test_the_law_of_parallaxes_is_found() -> None:
    """20,000 differences with the tails of Student's t, whose core has the quartiles of σ."""
    draw = np.random.default_rng(3)
    magnitude, beta = (
        draw.uniform(4, 11, 20_000),
        np.degrees(np.arcsin(draw.uniform(-1, 1, 20_000))),
    )
    law = ParallaxLaw(0.6, 0.5, 0.4, 0.1)
    from_t = 0.6745 / 0.7407  # quartiles of the normal distribution and of t of ν = 4
    noise = draw.standard_t(4, 20_000) * from_t * law.error(magnitude, beta)
    found = fit_parallax_law(magnitude, beta, noise + law.offset)
    np.testing.assert_allclose([found.a, found.b], [law.a, law.b], rtol=0.05)
    np.testing.assert_allclose([found.c, found.offset], [law.c, law.offset], atol=0.03)
    inside = np.abs(noise) < 0.6745 * found.error(magnitude, beta)
    assert inside.mean() == pytest.approx(0.5, abs=0.02)


def made_up(draw: np.random.Generator, n: int, reddening: float = 0.0) -> ReferenceStars:
    """Stars of two types: zero points 0.05 and 0.15, slope 0.1 about M = 2, spread 0.04."""
    numbers = draw.choice([20.0, 22.0], n)
    true = draw.normal(2.0, 0.7, n)
    zero = np.where(numbers == 20.0, 0.05, 0.15)
    excess = zero + 0.1 * (true - 2.0) + reddening + draw.normal(0.0, 0.04, n)
    return ReferenceStars(numbers, excess, true + R_V * reddening)


def test_zero_points_slopes_and_spreads_are_found() -> None:
    draw = np.random.default_rng(5)
    found = calibrate(made_up(draw, 4000), np.array([20.0, 22.0]))
    at_two = found.zero - found.slope * (found.pivot - 2.0)
    assert found.slope == pytest.approx(0.1, abs=0.005)
    np.testing.assert_allclose(at_two, [0.05, 0.15], atol=0.006)
    np.testing.assert_allclose(found.spread, 0.04, rtol=0.06)


def test_reddening_is_found_though_it_dims_the_stars() -> None:
    draw = np.random.default_rng(6)
    found = calibrate(made_up(draw, 4000), np.array([20.0, 22.0]))
    stars = made_up(draw, 4000, reddening=0.3)
    measured = found.reddening(stars)
    assert measured.mean() == pytest.approx(0.3, abs=0.01)
    error = found.error(stars.numbers, np.zeros(4000))
    assert measured.std() / error.mean() == pytest.approx(1.0, rel=0.05)
    # An error of M_V of 5 / ln 10 times that of the parallax, through the slope.
    more = found.error(stars.numbers, np.full(4000, 0.2))
    through = found.slope * 5.0 / np.log(10.0) * 0.2 / (1.0 - R_V * found.slope)
    np.testing.assert_allclose(more, np.hypot(error, through))


def test_a_slope_of_few_stars_is_drawn_to_zero() -> None:
    """Ridge regression with the variance of the residuals about the line itself."""
    x = np.linspace(-0.5, 0.5, 11)
    rest = 0.1 * np.array([1, -1, 1, -1, 1, 0, 1, -1, 1, -1, 1])
    rest -= rest.mean()
    stars = ReferenceStars(np.full(11, 30.0), 0.2 * x + rest, x)
    found = calibrate(stars, np.array([30.0]))
    variance = np.mean((0.2 * x + rest - found.slope * x) ** 2)
    wanted = 0.2 * (x @ x) / (x @ x + variance / PRIOR_SLOPE**2)
    assert found.slope == pytest.approx(wanted, rel=1e-3)


def test_the_slope_ends_where_the_reference_stars_end() -> None:
    """E = x − z − s (clip(M − 3.1 E) − M_g), by bisection."""
    draw = np.random.default_rng(8)
    found = calibrate(made_up(draw, 4000), np.array([20.0, 22.0]))
    low, high = found.range
    magnitude = np.linspace(low - 2.0, high + 3.0, 60)
    stars = ReferenceStars(np.full(60, 20.0), np.linspace(0.0, 1.0, 60), magnitude)
    left, right = np.full(60, -5.0), np.full(60, 5.0)
    for _ in range(60):
        middle = 0.5 * (left + right)
        bound = np.clip(magnitude - R_V * middle, low, high)
        less = middle + found.zero[0] + found.slope * (bound - found.pivot) < stars.excess
        left, right = np.where(less, middle, left), np.where(less, right, middle)
    np.testing.assert_allclose(found.reddening(stars), left, atol=1e-9)


def test_a_rare_type_leans_on_its_class() -> None:
    """20 stars of a type count as much as the class."""
    numbers = np.repeat([30.0, 31.0], [2000, 20])
    excess = np.repeat([0.0, 0.1], [2000, 20])
    stars = ReferenceStars(numbers, excess, np.resize([2.0, 4.0], 2020))
    found = calibrate(stars, np.array([30.0, 31.0, 32.0]))
    assert found.slope == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(found.zero, [0.0, 0.05, 0.0], atol=1e-12)
    # Least spread; of the rare type the variance about its zero point, which half of it makes.
    of_rare = 1.4826 * 0.05 / np.sqrt(2.0)
    np.testing.assert_allclose(found.spread, [0.025, of_rare, 0.025])


def test_a_table_without_its_columns_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raw.csv.gz"
    path.write_bytes(gzip.compress(b"hip,ra\n1,2\n"))
    assert main([str(path), str(tmp_path / "out.csv.gz")]) == 2
    assert "missing: ['B_V'" in capsys.readouterr().err


def test_a_made_up_table_becomes_a_catalogue(tmp_path: Path) -> None:
    """Dwarfs of one type without dust, and as many behind it: 0 and 0.2 mag, by the card."""
    draw = np.random.default_rng(7)
    header = (
        "hip,ra,dec,l,b,Hp,V,B_V,V_I,sp_type,parallax_hip2,parallax_gaia,parallax_gaia_error,ruwe"
    )
    lines = [header]
    for i in range(800):
        behind = i % 2
        parallax, colour = (5.0, 0.64) if behind else (20.0, 0.44)
        colour += draw.normal(0.0, 0.03)
        of_gaia = f"{parallax:.4f},0.02,1.0" if i % 4 < 2 else ",,"
        places = f"{draw.uniform(0, 360):.4f},{draw.uniform(-80, 80):.4f}"
        at = draw.normal(parallax, 0.5)
        lines.append(f"{i},{places},{places},8.5,8.4,{colour:.3f},0.5,F5V,{at:.3f},{of_gaia}")
    raw, output = tmp_path / "raw.csv.gz", tmp_path / "out.csv.gz"
    raw.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert main([str(raw), str(output)]) == 0
    stars = read_catalog(output, "hipparcos").stars
    with gzip.open(output, "rt") as file:
        sources = [row["parallax_source"] for row in csv.DictReader(file)]
    far = stars.distance > 100.0
    assert stars.extinction[far].mean() == pytest.approx(0.2, abs=0.01)
    assert stars.extinction[~far].mean() == pytest.approx(0.0, abs=0.01)
    assert stars.extinction_error.mean() == pytest.approx(0.03, rel=0.1)
    assert set(sources) == {"gaia3", "hip2"}
    again = tmp_path / "again.csv.gz"
    assert main([str(raw), str(again)]) == 0
    assert again.read_bytes() == output.read_bytes()


def test_the_shipped_catalogue_has_all_classes() -> None:
    with gzip.open(CATALOGS / "hipparcos_reddening.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    assert {row["class"] for row in rows} == {one.name for one in CLASSES}


DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "hipparcos_stars.csv.gz"


@pytest.mark.skipif(not DATA.is_file(), reason="the table of the catalogue does not ship")
@pytest.mark.slow
def test_the_shipped_catalogue_is_what_the_command_makes(tmp_path: Path) -> None:
    assert main([str(DATA), str(tmp_path / "again.csv.gz")]) == 0
    shipped = CATALOGS / "hipparcos_reddening.csv.gz"
    with gzip.open(tmp_path / "again.csv.gz", "rt") as again, gzip.open(shipped, "rt") as known:
        assert again.read() == known.read()
