"""Star stores: zarr v3 groups that give back what was put in, whole or in chunks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from dustmap.errors import UserError
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    ExponentialDensity,
    FlatParallax,
    GaussianDistances,
    ParallaxDistances,
    PercentileDistances,
    StarTable,
    open_star_store,
    star_store,
)
from dustmap.sky.stars._store import CHUNK
from tests.sky.test_star_table import stars, with_parallaxes

ERROR = np.array([0.1, 0.2, 0.3])
FAR = np.array([100.0, 200.0, 300.0])
KINDS: list[AbstractDistances] = [
    ExactDistances(FAR),
    GaussianDistances(FAR, ERROR),
    PercentileDistances(FAR - 10, FAR, FAR + 30),
    ParallaxDistances(np.array([-1.0, 0.0, 3.0]), ERROR, FlatParallax(5e3)),
    ParallaxDistances(np.array([-1.0, 0.0, 3.0]), ERROR, ExponentialDensity(700.0, 5e3)),
]


def assert_same(a: StarTable, b: StarTable) -> None:
    assert a.system == b.system
    assert a.source_id.dtype == np.int64
    for name in ("source_id", "l", "b", "extinction", "extinction_error"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert type(a.distances) is type(b.distances)
    assert list(a.distances.columns()) == list(b.distances.columns())
    for name, values in a.distances.columns().items():
        np.testing.assert_array_equal(values, b.distances.columns()[name])
    np.testing.assert_array_equal(a.distance, b.distance)


@pytest.mark.parametrize("distances", KINDS, ids=lambda d: type(d).__name__)
def test_stars_read_back_exactly(tmp_path: Path, distances: AbstractDistances) -> None:
    table = replace(stars(3, system="E(ZGR23)"), distances=distances)
    with star_store(tmp_path / "stars.zarr") as store:
        store.append(table)
    assert_same(open_star_store(tmp_path / "stars.zarr").read(), table)


def test_a_custom_system_is_kept(tmp_path: Path) -> None:
    table = stars(system="custom:K2 colour")
    with star_store(tmp_path / "stars.zarr") as store:
        store.append(table)
    assert open_star_store(tmp_path / "stars.zarr").read().system == table.system


def test_chunks_join_to_the_whole(tmp_path: Path) -> None:
    path, parts = tmp_path / "stars.zarr", [with_parallaxes(n) for n in (5, 1, 7)]
    with star_store(path) as store:
        for part in parts:
            store.append(part)
        assert len(store) == 13
    opened = open_star_store(path)
    assert len(opened) == 13
    whole, chunks = opened.read(), list(opened.chunks(4))
    assert [len(chunk) for chunk in chunks] == [4, 4, 4, 1]
    for name in ("source_id", "extinction", "distance"):
        expected = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(getattr(whole, name), expected)
        joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
        np.testing.assert_array_equal(joined, expected)


def test_more_than_a_chunk_of_zarr_goes_in_piece_by_piece(tmp_path: Path) -> None:
    count = CHUNK // 2 + 3
    with star_store(tmp_path / "stars.zarr") as store:
        for k in range(3):
            store.append(stars(count, first=k * count))
    read = open_star_store(tmp_path / "stars.zarr").read()
    np.testing.assert_array_equal(read.source_id - 2**60, np.arange(3 * count))


def test_xarray_opens_a_store_with_its_units_and_provenance(tmp_path: Path) -> None:
    with star_store(tmp_path / "stars.zarr") as store:
        store.append(with_parallaxes(4))
        store.describe({"schema": "zgr23", "counts": {"read": 10, "kept": 4}})
    with xr.open_zarr(tmp_path / "stars.zarr", consolidated=False) as dataset:
        assert dataset.sizes == {"star": 4}
        units = {name: dataset[name].attrs.get("units") for name in dataset}
        assert units == {
            "source_id": None,
            "l": "deg",
            "b": "deg",
            "parallax_mas": "mas",
            "parallax_error_mas": "mas",
            "extinction": "mag",
            "extinction_error": "mag",
        }
        assert dataset.attrs["extinction_system"] == "A_V"
        assert dataset.attrs["distances"] == "parallax"
        assert dataset.attrs["distance_prior"] == "flat-parallax"
        assert dataset.attrs["distance_max_pc"] == 1e4
        assert dataset.attrs["counts"] == {"read": 10, "kept": 4}
    assert open_star_store(tmp_path / "stars.zarr").attributes["schema"] == "zgr23"


def write(path: Path, *tables: StarTable, fail: bool = False, **described: object) -> None:
    with star_store(path) as store:
        for table in tables:
            store.append(table)
        store.describe(described)
        if fail:
            raise RuntimeError("cut short")


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cut short"):
        write(tmp_path / "stars.zarr", stars(), fail=True)
    with pytest.raises(ValueError, match="no stars"):
        write(tmp_path / "stars.zarr")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_store_stays_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "stars.zarr"
    with star_store(path) as store:
        store.append(stars())
    with pytest.raises(FileExistsError, match="--overwrite"), star_store(path):
        pass
    with star_store(path, overwrite=True) as store:
        store.append(stars(6))
    assert len(open_star_store(path)) == 6


def test_tables_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one extinction system.*A_V.*A_G"):
        write(tmp_path / "a", stars(), stars(system="A_G"))
    with pytest.raises(ValueError, match=r"one kind of distances.*exact.*parallax"):
        write(tmp_path / "b", stars(), with_parallaxes(2))


def test_provenance_does_not_overwrite_what_the_store_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="itself sets the attributes distances"):
        write(tmp_path / "a", stars(), distances="good")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such star store"):
        open_star_store(tmp_path / "none.zarr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected a star store"):
        open_star_store(tmp_path / "empty")
    zarr.create_group(tmp_path / "other.zarr", zarr_format=3)
    with pytest.raises(ValueError, match="something else"):
        open_star_store(tmp_path / "other.zarr")


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"distance_prior": "wishful"}, "must be flat-parallax or exponential-density"),
        ({"distance_max_pc": "far"}, "numbers of distance_prior .* are damaged"),
        ({"distance_max_pc": None}, "numbers of distance_prior .* are damaged"),
        ({"distance_max_pc": -1.0}, "must be positive"),
        ({"extinction_system": "A_X"}, "expected an extinction system"),
        ({"distances": "guessed"}, "distances must be one of"),
    ],
)
def test_damaged_attributes_are_refused(
    tmp_path: Path, attributes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "stars.zarr"
    write(path, with_parallaxes(2))
    zarr.open_group(path).attrs.update(attributes)
    with pytest.raises(UserError, match=f"stars.zarr: .*{words}"):
        open_star_store(path)


def test_a_sample_is_from_all_over(tmp_path: Path) -> None:
    many = stars(CHUNK + 1000)
    with star_store(tmp_path / "stars.zarr") as store:
        store.append(many)
    some = open_star_store(tmp_path / "stars.zarr").sample(100)
    assert 50 < len(some) <= 100
    places = some.source_id - many.source_id[0]
    assert places[0] == 0
    assert np.diff(places).max() < CHUNK / 20
    assert places[-1] > 0.95 * len(many)
    assert len(open_star_store(tmp_path / "stars.zarr").sample(10**6)) <= len(many)
