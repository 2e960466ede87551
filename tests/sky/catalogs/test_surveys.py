"""Each card on a file with the columns of its survey; real files where they are at hand."""

import gzip
import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from astropy.coordinates import SkyCoord
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.catalogs import card_named, galactic_from_icrs, read_catalog, read_places
from dustmap.sky.stars import (
    ExponentialDensity,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
)
from dustmap.sky.systems import system_named
from tests.sky.catalogs.files import FORMATS, write

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED = REPOSITORY.parent / "shared" / "data"
Columns = dict[str, NDArray[Any]]
N = 60
IDS = np.arange(N) * 7 + 2**61 + 1


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def xp_file(path: Path, width: int) -> Columns:
    """An HDF5 file as the catalogs from XP spectra have it: vectors of `width` parameters."""
    columns: Columns = {
        "gdr3_source_id": IDS,
        "ra": rng().uniform(0, 360, N),
        "dec": rng().uniform(-90, 90, N),
        "stellar_params_est": rng().normal(1.0, 1.0, (N, width)).astype(np.float32),
        "stellar_params_err": rng().uniform(0.01, 0.1, (N, width)).astype(np.float32),
        "quality_flags": (np.arange(N) % 16).astype(np.uint8),
    }
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return columns


@pytest.mark.parametrize(
    ("card", "width", "system"), [("zgr23", 5, "E(ZGR23)"), ("zg25", 6, "custom:ZG25")]
)
def test_xp_catalogs(tmp_path: Path, card: str, width: int, system: str) -> None:
    path = tmp_path / "stellar_params_catalog_00.h5"
    columns = xp_file(path, width)
    prior = ExponentialDensity(1350.0, 20_000.0)
    catalog = read_catalog(path, card, cuts="none", prior=prior)
    stars = catalog.stars
    assert stars.system.name == system
    np.testing.assert_array_equal(stars.source_id, IDS)
    l, b = galactic_from_icrs(columns["ra"], columns["dec"])
    np.testing.assert_array_equal(stars.l, l)
    np.testing.assert_array_equal(stars.b, b)
    assert isinstance(stars.distances, ParallaxDistances)
    assert stars.distances.prior == prior
    est, err = columns["stellar_params_est"], columns["stellar_params_err"]
    assert (est[:, -1] < 0).any()  # parallaxes that no inverse could use
    np.testing.assert_array_equal(stars.distances.parallax, est[:, -1])
    np.testing.assert_array_equal(stars.distances.error, err[:, -1])
    np.testing.assert_array_equal(stars.extinction, est[:, -2])
    np.testing.assert_array_equal(stars.extinction_error, err[:, -2])


def test_a_file_of_another_card_is_known_by_it(tmp_path: Path) -> None:
    path = tmp_path / "stars.fits"
    ends = {f"azero_gspphot{end}": np.full(N, 0.3) for end in ("", "_lower", "_upper")}
    places = {"l": np.full(N, 5.0), "b": np.full(N, 1.0), "ruwe": np.ones(N)}
    parallaxes = {"parallax": np.full(N, 5.0), "parallax_error": np.full(N, 0.1)}
    Table({"source_id": IDS, **places, **parallaxes, **ends}).write(path)
    with pytest.raises(UserError, match="the card gaia-gspphot reads this file: --schema gaia-gsp"):
        read_catalog(path)


def test_zgr23_cuts_and_zero_point(tmp_path: Path) -> None:
    path = tmp_path / "stellar_params_catalog_00.h5"
    columns = xp_file(path, 5)
    flags, w = columns["quality_flags"], columns["stellar_params_est"][:, 4].astype(float)
    s = columns["stellar_params_err"][:, 4].astype(float)
    catalog = read_catalog(path, "zgr23", cuts="edenhofer24", parallax_zero_point=-0.017)
    kept = (flags < 8) & (w - s > 1 / 1.8) & (w + s < 25)
    np.testing.assert_array_equal(catalog.stars.source_id, IDS[kept])
    assert isinstance(catalog.stars.distances, ParallaxDistances)
    np.testing.assert_allclose(catalog.stars.distances.parallax, w[kept] + 0.017)
    assert catalog.provenance["parallax_zero_point_mas"] == -0.017
    assert catalog.counts.cuts == {
        "quality_flags < 8": int((flags >= 8).sum()),
        "parallax - parallax_error > 0.555556": int(((flags < 8) & (w - s <= 1 / 1.8)).sum()),
        "parallax + parallax_error < 25": 0,
    }
    strict = read_catalog(path, "zgr23", cuts="strict")
    np.testing.assert_array_equal(strict.stars.source_id, IDS[flags == 0])


def test_the_table_of_gavo(tmp_path: Path) -> None:
    table = Table(
        {
            "source_id": IDS,
            "ra": rng().uniform(0, 360, N),
            "dec": rng().uniform(-90, 90, N),
            "mod_parallax": rng().uniform(1, 5, N),
            "err_mod_parallax": np.full(N, 0.1),
            "ext": rng().uniform(0, 1, N),
            "err_ext": np.full(N, 0.05),
            "quality_flags": np.arange(N, dtype=np.int16) % 16,
        }
    )
    catalog = read_catalog(write(tmp_path, "votable binary2", table), "zgr23")
    np.testing.assert_array_equal(
        catalog.stars.extinction, table["ext"][table["quality_flags"] < 8]
    )


def percentiles(scale: float, spread: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    middle = rng().uniform(scale, 2 * scale, N)
    return middle - spread, middle, middle + 2 * spread


@pytest.mark.parametrize("format_name", ["fits", "parquet", "votable.gz", "csv"])
@pytest.mark.parametrize("upper", [False, True])
def test_starhorse(tmp_path: Path, format_name: str, upper: bool) -> None:
    card = "starhorse-i354" if upper else "starhorse-edr3"
    d, a = percentiles(1.0, 0.1), percentiles(0.5, 0.2)
    columns: Columns = {"Source" if upper else "source_id": IDS}
    columns |= {"RA_ICRS" if upper else "ra": rng().uniform(0, 360, N)}
    columns |= {"DE_ICRS" if upper else "dec": rng().uniform(-90, 90, N)}
    columns |= {f"dist{p}": v for p, v in zip((16, 50, 84), d, strict=True)}
    av = "AV" if upper else "av"
    columns |= {f"{av}{p}": v for p, v in zip((16, 50, 84), a, strict=True)}
    columns |= {"fidelity": np.linspace(0, 1, N)}
    columns |= {"sh_outflag": np.where(np.arange(N) % 3 == 0, "0000", "0100")}
    path = write(tmp_path, format_name, Table(columns))
    catalog = read_catalog(path, card)
    kept = (columns["fidelity"] > 0.5) & (np.arange(N) % 3 == 0)
    stars = catalog.stars
    np.testing.assert_array_equal(stars.source_id, IDS[kept])
    assert stars.system.name == "A_V_542"
    assert isinstance(stars.distances, PercentileDistances)
    np.testing.assert_allclose(stars.distances.p84, 1000.0 * d[2][kept])
    np.testing.assert_array_equal(stars.extinction, a[1][kept])
    np.testing.assert_allclose(stars.extinction_error, (a[2] - a[0])[kept] / 2.0)
    assert catalog.counts.rows == N
    assert catalog.counts.kept == kept.sum()
    converted = read_catalog(path, card, system=system_named("E(ZGR23)"))
    np.testing.assert_allclose(converted.stars.extinction, stars.extinction / 2.8)
    np.testing.assert_allclose(converted.stars.extinction_error, stars.extinction_error / 2.8)
    assert converted.provenance["files"][0]["extinction_factor"] == pytest.approx(1 / 2.8)


@pytest.mark.parametrize("format_name", ["fits", "csv", "parquet", "votable binary2", "hdf5"])
@pytest.mark.parametrize("dtype", [int, float, str])
def test_starhorse_whose_flags_have_lost_their_zeros(
    tmp_path: Path, format_name: str, dtype: type
) -> None:
    """As pandas and astropy read them from text: 0 is "0000", 100 is "0100", none passes none."""
    d, a = percentiles(0.3, 0.02), percentiles(0.5, 0.2)
    columns = {"source_id": IDS, "ra": np.linspace(1, 300, N), "dec": np.linspace(-70, 70, N)}
    columns |= {f"dist{p}": v for p, v in zip((16, 50, 84), d, strict=True)}
    columns |= {f"av{p}": v for p, v in zip((16, 50, 84), a, strict=True)}
    flags: NDArray[Any] = np.array([(0, 100, 1)[i % 3] for i in range(N)]).astype(dtype)
    if dtype is float:
        flags[3] = np.nan
    elif dtype is str:
        flags[3] = ""
    table = Table(columns | {"fidelity": np.ones(N), "sh_outflag": flags})
    catalog = read_catalog(write(tmp_path, format_name, table), "starhorse-edr3")
    kept = (np.arange(N) % 3 == 0) & ((np.arange(N) != 3) | (dtype is int))
    np.testing.assert_array_equal(catalog.stars.source_id, IDS[kept])
    assert catalog.counts.cuts["sh_outflag = 0000"] == N - kept.sum()


def test_shboost24(tmp_path: Path) -> None:
    d = percentiles(1.0, 0.1)
    table = Table(
        {
            "source_id": IDS,
            "l": rng().uniform(0, 360, N),
            "b": rng().uniform(-90, 90, N),
            "dist_lower": d[0],
            "dist": d[1],
            "dist_upper": d[2],
            "xgbdist_av_mean": rng().normal(0.1, 0.2, N),
            "xgbdist_av_std": rng().uniform(0.1, 0.3, N),
            "xgb_av_outputflag": np.arange(N) % 2,
        }
    )
    stars = read_catalog(write(tmp_path, "parquet", table), "shboost24").stars
    np.testing.assert_array_equal(stars.source_id, IDS[::2])
    assert (stars.extinction < 0).any()
    np.testing.assert_allclose(stars.distance, 1000.0 * d[1][::2])


@pytest.mark.parametrize("format_name", FORMATS)
def test_gaia_gspphot(tmp_path: Path, format_name: str) -> None:
    a = percentiles(0.5, 0.1)
    sky = SkyCoord(ra=rng().uniform(0, 360, N), dec=rng().uniform(-90, 90, N), unit="deg")
    table = Table(
        {
            "SOURCE_ID": IDS,
            "ra": sky.ra.deg,
            "dec": sky.dec.deg,
            "parallax": rng().uniform(0.5, 5, N),
            "parallax_error": np.full(N, 0.2),
            "ruwe": rng().uniform(0.9, 1.6, N),
            "azero_gspphot_lower": a[0],
            "azero_gspphot": a[1],
            "azero_gspphot_upper": a[2],
        }
    )
    stars = read_catalog(write(tmp_path, format_name, table), "gaia-gspphot").stars
    kept = (table["ruwe"] < 1.4) & (table["parallax"] > 1.0)
    np.testing.assert_array_equal(stars.source_id, IDS[kept])
    found = SkyCoord(l=stars.l, b=stars.b, unit="deg", frame="galactic")
    assert found.separation(sky[kept]).deg.max() < 1e-9
    assert stars.system.name == "A0"


def test_columns_of_i355_differ_in_case_alone(tmp_path: Path) -> None:
    d, a = percentiles(500.0, 20.0), percentiles(0.5, 0.1)
    columns = {
        "Source": IDS,
        "RA_ICRS": rng().uniform(0, 360, N),
        "DE_ICRS": rng().uniform(-90, 90, N),
        "Dist": d[1],
        "b_Dist": d[0],
        "B_Dist": d[2],
        "A0": a[1],
        "b_A0": a[0],
        "B_A0": a[2],
    }
    path = write(tmp_path, "csv", Table(columns))
    stars = read_catalog(path, "gaia-i355", cuts="none").stars
    assert isinstance(stars.distances, PercentileDistances)
    np.testing.assert_array_equal(stars.distances.p16, d[0])
    np.testing.assert_array_equal(stars.distances.p84, d[2])
    with pytest.raises(UserError, match=r'missing ruwe .* for the cut "ruwe < 1.4"'):
        read_catalog(path, "gaia-i355")
    del columns["b_Dist"]
    lacking = write(tmp_path, "csv", Table(columns), "lacking")
    with pytest.raises(UserError, match="B_Dist would be both distance_p16 and distance_p84"):
        read_catalog(lacking, "gaia-i355", cuts="none")


def ananke_columns() -> Columns:
    x, y, z = rng().normal(0, 1, (3, N))
    return {
        "e": rng().normal(0.5, 0.5, N),
        "e_err": rng().uniform(0.01, 0.1, N),
        "e_ananke": rng().uniform(0, 1, N),
        "x": x,
        "y": y,
        "z": z,
        "parallax": np.full(N, 1.0),
        "parallax_error": np.full(N, 0.1),
        "distance": np.sqrt(x**2 + y**2 + z**2),
    }


def test_the_original_ananke_file(tmp_path: Path) -> None:
    columns = ananke_columns()
    path = tmp_path / "ananke.txt"
    lines = [" ".join(columns)]
    lines += [
        f"{i} " + " ".join(map(repr, map(float, row)))
        for i, row in enumerate(zip(*columns.values(), strict=True))
    ]
    path.write_text("\n".join(lines) + "\n")
    stars = read_catalog(path, "ananke").stars
    np.testing.assert_array_equal(stars.source_id, np.arange(N))
    np.testing.assert_array_equal(stars.extinction, columns["e"])
    np.testing.assert_allclose(stars.distance, 1000.0 * columns["distance"])
    xyz = 1000.0 * np.stack([columns[axis] for axis in "xyz"], axis=1)
    np.testing.assert_allclose(stars.positions(), xyz, atol=1e-9)
    assert stars.system.name == "custom:ananke"
    with pytest.raises(UserError, match="custom"):
        read_catalog(path, "ananke", system=system_named("A_V"))


def test_cluster_cards(tmp_path: Path) -> None:
    d, a = percentiles(500.0, 20.0), percentiles(0.5, 0.1)
    shared: Columns = {
        "name": np.array([f"NGC {i}" for i in range(N)]),
        "l_deg": rng().uniform(0, 360, N),
        "b_deg": rng().uniform(-90, 90, N),
        "dist_pc": d[1],
        "AV": a[1],
    }
    hunt = shared | {"dist16_pc": d[0], "dist84_pc": d[2], "AV16": a[0], "AV84": a[2]}
    hunt |= {
        "type": np.where(np.arange(N) % 5, "o", "m"),
        "CST": np.linspace(0, 10, N),
        "CMDclass50": np.full(N, 0.7),
        "source": np.full(N, "x"),
    }
    path = write(tmp_path, "csv.gz", Table(hunt), "hunt")
    stars = read_catalog(path, "hunt2023").stars
    kept = (np.arange(N) % 5 > 0) & (hunt["CST"] > 5)
    np.testing.assert_array_equal(stars.source_id, np.flatnonzero(kept))
    np.testing.assert_allclose(stars.extinction_error, 0.15)
    assert len(read_catalog(path, "miglio2021").stars) == N
    dias = shared | {"e_dist_pc": np.full(N, 9.0), "e_AV": np.full(N, 0.1)}
    dias["e_AV"][3] = 0.0
    counts = read_catalog(write(tmp_path, "csv", Table(dias), "dias"), "dias2021").counts
    assert counts.invalid == {"extinction_error is not > 0": 1}
    dias["e_dist_pc"][:2] = 0.0
    catalog = read_catalog(write(tmp_path, "csv", Table(dias), "rounded"), "dias2021")
    distances = catalog.stars.distances
    assert isinstance(distances, GaussianDistances)
    np.testing.assert_array_equal(distances.error[:3], [0.5, 0.5, 9.0])
    assert catalog.counts.rounded == {"distance_error": 2}
    assert "distance_error of 0, half of a rounding step: 2" in catalog.counts.lines()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real files are not here")
@pytest.mark.parametrize(
    ("file", "card", "rows", "kept"),
    [
        ("ananke_train.csv", "ananke", 4000, 4000),
        ("clusters_hunt2023_train.csv.gz", "hunt2023", 5444, 3219),
        ("clusters_dias2021.csv.gz", "dias2021", 1741, 1741),
        ("stars_extinction_train.csv.gz", "miglio2021", 4189, 4189),
    ],
)
def test_real_files(file: str, card: str, rows: int, kept: int) -> None:
    catalog = read_catalog(SHARED / file, card)
    assert (catalog.counts.rows, catalog.counts.kept, len(catalog.stars)) == (rows, kept, kept)
    if card == "miglio2021":
        assert (catalog.stars.extinction < 0).any()
    if card == "ananke":
        table = Table.read(SHARED / file)
        np.testing.assert_array_equal(catalog.stars.source_id, table["id"])
        places = read_places(SHARED / file, card)
        np.testing.assert_array_equal(places.distances.median, catalog.stars.distance)


def test_the_clusters_in_the_repository() -> None:
    catalog = read_catalog(REPOSITORY / "catalogs" / "open_clusters_hunt2023.csv.gz", "hunt2023")
    assert catalog.counts.rows == catalog.counts.kept == 3219


def test_the_hipparcos_stars_in_the_repository(tmp_path: Path) -> None:
    path = REPOSITORY / "catalogs" / "hipparcos_reddening.csv.gz"
    assert path.stat().st_size < 2_000_000
    catalog = read_catalog(path, "hipparcos")
    stars = catalog.stars
    assert catalog.counts.rows == catalog.counts.kept == len(stars) == 71538
    assert stars.system.name == "E(B-V)"
    assert len(np.unique(stars.source_id)) == len(stars)
    # Without dust: nearer than some 75 pc.
    table = Table.read(path, format="ascii.csv")
    near = np.asarray(table["parallax_mas"]) > 13.0
    assert abs(np.median(np.asarray(table["ebv"])[near])) < 0.01
    with gzip.open(path, "rt", encoding="utf-8") as whole:
        (tmp_path / "some.csv").write_text("".join(itertools.islice(whole, 2000)))
    classified = read_catalog(tmp_path / "some.csv", "hipparcos", cuts="classified")
    assert 0 < len(classified.stars) < 1999


def test_cuts_on_parallaxes_do_not_bias_distances(tmp_path: Path) -> None:
    """Stars near the cut are where they are, not nearer, for the prior is that of all rows."""
    draw, n = np.random.default_rng(1), 20_000
    distance = draw.gamma(3.0, 600.0, n)
    error = 0.03 * np.exp(0.6 * np.log(distance / 500.0) + draw.normal(0.0, 0.4, n)).clip(0.5, 20.0)
    path = tmp_path / "gsp.fits"
    ends = {f"azero_gspphot{end}": np.full(n, a) for end, a in (("_lower", 0.2), ("_upper", 0.4))}
    Table(
        {
            "source_id": np.arange(n),
            "l": draw.uniform(0.0, 360.0, n),
            "b": np.degrees(np.arcsin(draw.uniform(-1.0, 1.0, n))),
            "parallax": 1000.0 / distance + error * draw.normal(size=n),
            "parallax_error": error,
            "ruwe": np.ones(n),
            "azero_gspphot": np.full(n, 0.3),
            **ends,
        }
    ).write(path)
    catalog = read_catalog(path, "gaia-gspphot")
    stars, counts = catalog.stars, catalog.counts
    assert sum(counts.cuts.values()) > 2_000
    assert isinstance(stars.distances, ParallaxDistances)
    over = stars.distances.parallax / stars.distances.error
    near = over < 6.5
    low, middle, high = stars.distances.quantile(np.array([0.16, 0.5, 0.84]))[near].T
    true = distance[stars.source_id[near]]
    assert np.mean((low < true) & (true < high)) == pytest.approx(0.68, abs=0.03)
    assert np.median(middle / true) == pytest.approx(1.0, abs=0.02)


def test_groups_may_be_what_a_cut_reads(tmp_path: Path) -> None:
    """Zero points of every class, of the stars of some classes."""
    every = Table.read(REPOSITORY / "catalogs" / "hipparcos_reddening.csv.gz", format="ascii.csv")[
        :400
    ]
    every.write(tmp_path / "some.csv")
    card = card_named("hipparcos").with_group("class")
    stars = read_catalog(tmp_path / "some.csv", card, cuts="classified").stars
    assert stars.groups is not None
    assert 1 < len(set(stars.groups)) < len(set(every["class"]))
    assert 0 < len(stars) < 400
    with pytest.raises(UserError, match="read as a number of every star"):
        read_catalog(tmp_path / "some.csv", card.with_group("parallax_mas"))
