"""The page of a map as a file: its numbers, its size, and that it asks for nothing else."""

import re
from pathlib import Path

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.view import view_of
from dustmap.sky.view._volumes import MOST_DECADES, Scale, block_means
from tests.sky.view.blob import AROUND, PEAK, Page, blob_map, decoded, odd_maps

PLACE = SkyCoord(30 * u.deg, -5 * u.deg, 70 * u.pc, frame="galactic")


@pytest.mark.parametrize("logarithmic", [True, False])
def test_codes_are_half_a_step_off_at_most(logarithmic: bool) -> None:
    random = np.random.default_rng(1)
    values = np.float32(10.0) ** random.uniform(-5.0, -1.5, (4, 5, 300)).astype(np.float32)
    if not logarithmic:
        values -= np.float32(0.005)
    scale = Scale.of(values, logarithmic)
    back = decoded(scale, scale.encode(values))
    of = np.log10 if logarithmic else np.asarray
    assert np.abs(of(back) - of(values.astype(np.float64))).max() <= scale.half_step * (1 + 1e-6)
    assert decoded(scale, np.array([1, 255], np.uint8)) == pytest.approx(
        [values.min(), values.max()]
    )
    error = np.abs(back / values - 1) if logarithmic else np.abs(back - values)
    assert error.max() <= scale.error * (1 + 1e-6)


def test_what_is_far_below_the_top_counts_as_the_lower_end() -> None:
    values = np.array([0.0, 1e-12, 1.0, np.nan], np.float32)
    scale = Scale.of(values, True)
    assert (scale.low, scale.high) == (-MOST_DECADES, 0.0)
    assert scale.encode(values).tolist() == [1, 1, 255, 0]
    assert np.isnan(decoded(scale, np.zeros(1, np.uint8)))


@pytest.mark.parametrize("value", [0.0, -0.002, 0.002])
def test_a_constant_map_has_a_scale(value: float) -> None:
    values = np.full((2, 2, 2), value, np.float32)
    for logarithmic in (False, value > 0):
        scale = Scale.of(values, logarithmic)
        assert decoded(scale, scale.encode(values)) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("factor", [1, 2, 3, 7])
def test_blocks_are_averaged(factor: int) -> None:
    """At the upper faces blocks have fewer voxels, and voxels without a value do not count."""
    values = np.random.default_rng(0).random((5, 6, 7), np.float32)
    values[0, 0, :2] = np.nan
    values[:2, :2, :2] = np.nan
    found = block_means(values, factor)
    assert found.shape == tuple(-(-n // factor) for n in values.shape)
    for index in np.ndindex(found.shape):
        block = values[tuple(slice(factor * i, factor * (i + 1)) for i in index)]
        known = block[np.isfinite(block)]
        expected = known.mean() if known.size else np.nan
        assert found[index] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_the_page_has_the_map_to_the_error_that_it_states() -> None:
    density = blob_map()
    page = Page(view_of(density).html)
    names = [volume["name"] for volume in page.about["volumes"]]
    assert names == ["mean", "spread", "coverage", *(f"sample {k}" for k in (1, 2, 3, 4))]
    std = density.std
    assert std is not None
    expected = [density.mean, std / density.mean, density.cube(Quantity.COVERAGE)]
    expected += [density.cube(Quantity.SAMPLES, k) for k in range(4)]
    for number, values in enumerate(expected):
        described = page.about["volumes"][number]
        error = np.abs(page.values(number) / values - 1.0)
        if not described["logarithmic"]:
            error = np.abs(page.values(number) - values)
        assert described["error"] < 0.02
        assert error.max() <= described["error"] * (1 + 1e-4), names[number]


def test_the_page_says_what_it_shows() -> None:
    about = Page(view_of(blob_map(), title="A blob").html).about
    assert about["title"] == "A blob"
    assert about["box"] == [[-105.0, -85.0, -55.0], [125.0, 95.0, 65.0]]
    assert AROUND < about["threshold"] < PEAK
    assert about["density"][1] == pytest.approx(PEAK, rel=0.3)
    assert all(re.fullmatch("[0-9a-f]{1536}", table) for table in about["colours"].values())


def test_a_map_of_samples_alone_has_their_moments() -> None:
    whole = blob_map()
    drawn = np.stack([whole.cube(Quantity.SAMPLES, k) for k in range(4)])
    density = DustMap.from_arrays(whole.grid, {Quantity.SAMPLES: drawn}, "A_V", positive=True)
    page = Page(view_of(density, samples=1).html)
    assert [volume["name"] for volume in page.about["volumes"]] == ["mean", "spread", "sample 1"]
    assert page.values(0) == pytest.approx(drawn.mean(0), rel=0.03)
    spread = np.sqrt(np.expm1(np.log(drawn).var(0)))  # of pairs, as in the package
    assert page.values(1) == pytest.approx(spread, rel=0.03)


def test_a_density_of_any_sign_has_a_linear_scale() -> None:
    grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    mean = np.linspace(-0.001, 0.004, 125)
    page = Page(view_of(DustMap.from_nodes(grid, mean, 0.1 * np.ones(125), "A_V")).html)
    described = page.about["volumes"][0]
    assert not page.about["positive"]
    assert not described["logarithmic"]
    assert described["error"] == pytest.approx(0.005 / 508)
    cube: NDArray[np.float64] = mean.reshape(5, 5, 5).transpose()
    assert np.abs(page.values(0) - cube).max() <= described["error"] * (1 + 1e-4)
    assert page.values(1) == pytest.approx(0.1)


def test_samples_of_any_sign_have_a_linear_scale() -> None:
    """The mean is positive everywhere, a sample is not."""
    grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    mean = np.full((5, 5, 5), 0.001, np.float32)
    drawn = np.stack([mean - 0.002, mean + 0.002])
    arrays = {Quantity.MEAN: mean, Quantity.SAMPLES: drawn}
    density = DustMap.from_arrays(grid, arrays, "A_V", positive=False)
    page = Page(view_of(density, samples=1).html)
    names = [volume["name"] for volume in page.about["volumes"]]
    assert page.values(names.index("sample 1")) == pytest.approx(-0.001, rel=0.01)


@pytest.mark.parametrize("name", odd_maps())
def test_odd_maps_have_scales(name: str) -> None:
    about = Page(view_of(odd_maps()[name]).html).about
    for low, high in (about["density"], about["spread"]):
        assert (0.0 if about["positive"] else -np.inf) < low < high
    assert about["density"][0] <= about["threshold"] <= about["density"][1]
    assert all(volume["logarithmic"] == about["positive"] for volume in about["volumes"])


def rough_map(side: int) -> DustMap:
    """Noise, which no packing makes small, with four samples."""
    random = np.random.default_rng(5)
    grid = RegularGrid((-1.0,) * 3, (1.0,) * 3, (side,) * 3)
    cubes = np.exp(random.standard_normal((6, *grid.shape))).astype(np.float32)
    arrays = {Quantity.MEAN: cubes[0], Quantity.STD: cubes[1], Quantity.SAMPLES: cubes[2:]}
    return DustMap.from_arrays(grid, arrays, "A_V", positive=True)


@pytest.mark.parametrize("most_bytes", [500_000, 200_000, 110_000])
def test_a_page_is_as_fine_as_its_size_allows(most_bytes: int) -> None:
    page = view_of(rough_map(40), most_bytes=most_bytes)
    assert page.size <= most_bytes
    assert page.size == len(page.html.encode())
    mean, *rest = (volume.factor for volume in page.volumes)
    assert len(set(rest)) == 1
    assert 1 <= mean <= rest[0]
    assert rest[0] > 1
    assert f"the others: blocks of {rest[0]}³ voxels, {rest[0]} pc" in page.coarsened
    assert Page(page.html).about["coarsened"] == page.coarsened
    finer = view_of(rough_map(40), most_bytes=2 * most_bytes)
    assert finer.volumes[0].factor <= mean


def test_a_page_that_has_room_is_as_fine_as_the_map() -> None:
    page = view_of(rough_map(12))
    assert {volume.factor for volume in page.volumes} == {1}
    assert page.coarsened == Page(page.html).about["coarsened"] == ""


def test_a_size_that_nothing_fits_is_refused() -> None:
    with pytest.raises(UserError, match=r"expected room for 6 cubes.*--max-size") as refusal:
        view_of(rough_map(12), most_bytes=1_000)
    named = re.search(r"at least ([\d,]+) bytes, got 1,000 bytes", str(refusal.value))
    assert named is not None
    least = int(named[1].replace(",", ""))
    assert len(view_of(rough_map(12), most_bytes=least).html.encode()) <= least
    with pytest.raises(UserError, match="expected room"):
        view_of(rough_map(12), most_bytes=least - 1)


def test_the_page_asks_for_nothing() -> None:
    text = view_of(blob_map(), {"here": PLACE}).html
    assert not re.search(r"https?:|wss?://|url\(|@import|\bfetch\(|XMLHttp|importScripts", text)
    page = Page(text)
    links = [
        (tag, value)
        for tag, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset", "poster")
    ]
    assert links == [("link", "data:,")]
    (policy,) = [
        str(attributes["content"])
        for _, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")


def test_names_and_titles_are_words_and_never_elements() -> None:
    name, title = "</script><script>alert('1')</script> [[about]]", '<img src="x"> & [[script]]'
    plain, odd = (
        Page(view_of(blob_map(), *given).html) for given in (({"": PLACE},), ({name: PLACE},))
    )
    titled = Page(view_of(blob_map(), {name: PLACE}, title=title).html)
    assert [tag for tag, _ in plain.elements] == [tag for tag, _ in odd.elements]
    assert [tag for tag, _ in plain.elements] == [tag for tag, _ in titled.elements]
    assert odd.about["points"][0][0] == name
    assert titled.texts["title"] == titled.about["title"] == title


def test_points_are_where_they_are() -> None:
    several = SkyCoord([0, 90] * u.deg, [0, 0] * u.deg, [50, 60] * u.pc, frame="galactic")
    points = Page(view_of(blob_map(), {"one": PLACE, "two": several}).html).about["points"]
    assert [point[0] for point in points] == ["one", "two", "two"]
    assert points[1][1:] == [50.0, 0.0, 0.0]
    assert points[2][1:] == [0.0, 60.0, 0.0]
    assert np.linalg.norm(points[0][1:]) == pytest.approx(70.0, abs=0.02)


def test_points_and_samples_that_make_no_sense_are_refused() -> None:
    nowhere = SkyCoord(0 * u.deg, 0 * u.deg, np.nan * u.pc, frame="galactic")
    many = SkyCoord(np.zeros(5001) * u.deg, np.zeros(5001) * u.deg, 9 * u.pc, frame="galactic")
    with pytest.raises(UserError, match="expected finite coordinates"):
        view_of(blob_map(), {"nowhere": nowhere})
    with pytest.raises(UserError, match="expected at most 5,000"):
        view_of(blob_map(), {"many": many})
    with pytest.raises(UserError, match="samples: expected 0 or more, got -1"):
        view_of(blob_map(), samples=-1)


def test_a_page_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    page = view_of(blob_map(), samples=0)
    page.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(FileExistsError, match="--overwrite"):
        page.save(tmp_path / "a.html")
    page.save(tmp_path / "a.html", overwrite=True)
    with pytest.raises(UserError, match=r"b\.pdf: expected a page that ends in \.html"):
        page.save(tmp_path / "b.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    density = blob_map()
    page = density.view({"here": PLACE}, samples=2)
    (frame,) = Page(page._repr_html_()).elements
    assert frame[0] == "iframe"
    assert frame[1]["srcdoc"] == page.html
    assert frame[1]["sandbox"] == "allow-scripts"
    assert page.html == view_of(density, {"here": PLACE}, samples=2).html
