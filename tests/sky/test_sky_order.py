"""Stars sorted on disk: by pixel, then by distance, whatever the chunks and however crowded."""

from dataclasses import replace
from pathlib import Path

import healpy
import numpy as np
import pytest

from dustmap.sky.stars import (
    ExactDistances,
    FlatParallax,
    ParallaxDistances,
    SkySorter,
    StarTable,
    concatenate,
)
from dustmap.sky.stars._store import sky_keys
from tests.sky.test_star_table import stars

NONE = np.empty(0, np.int64)


def scattered(count: int, spread: float, seed: int = 0) -> StarTable:
    """Stars within `spread` of the whole sky, distances over five orders of magnitude."""
    rng = np.random.default_rng(seed)
    return replace(
        stars(count),
        l=360.0 * spread * rng.random(count),
        b=90.0 * spread * (2.0 * rng.random(count) - 1.0),
        distances=ExactDistances(10.0 ** rng.uniform(0.0, 5.0, count)),
    )


def ordered(table: StarTable, folder: Path, chunk: int) -> tuple[StarTable, list[int]]:
    """Sorted by files; the lengths of the pieces."""
    folder.mkdir()
    sorter = SkySorter(folder)
    for start in range(0, len(table), chunk):
        sorter.add(table[start : start + chunk])
    pieces = list(sorter.tables(NONE))
    assert list(folder.iterdir()) == []
    return concatenate(pieces), [len(piece) for piece in pieces]


def test_keys_are_pixels_then_distances() -> None:
    table = scattered(500, 0.01)
    pixel = healpy.ang2pix(256, table.l, table.b, nest=True, lonlat=True)
    assert len(np.unique(pixel)) < 300
    expected = np.lexsort((table.distance, pixel))
    np.testing.assert_array_equal(np.argsort(sky_keys(table)), expected)


def test_parallaxes_fall_with_distance_below_zero_too() -> None:
    parallax = np.array([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 9.0])
    distances = ParallaxDistances(parallax, np.full(7, 0.1), FlatParallax(1e4))
    table = replace(stars(7), l=np.full(7, 3.0), b=np.full(7, 2.0), distances=distances)
    keys = sky_keys(table)
    assert keys[2] == keys[3]
    assert (np.diff(keys[[6, 5, 4, 3, 1, 0]]) > 0).all()


@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_the_order_does_not_depend_on_chunks_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    table = scattered(600, spread)
    expected = table.source_id[np.argsort(sky_keys(table), kind="stable")]
    whole, _ = ordered(table, tmp_path / "whole", 600)
    np.testing.assert_array_equal(whole.source_id, expected)
    monkeypatch.setattr("dustmap.sky.stars._store.ROWS", 16)
    parts, lengths = ordered(table, tmp_path / "parts", 77)
    assert max(lengths) <= 16
    for name in ("source_id", "l", "b", "distance", "extinction", "extinction_error"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_stars_with_one_key_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dustmap.sky.stars._store.ROWS", 8)
    table = replace(scattered(61, 0.0), distances=ExactDistances(np.full(61, 50.0)))
    one_nearer = table[:1].distances.columns()["distance_pc"] / 2.0
    distances = ExactDistances(np.concatenate([np.full(60, 50.0), one_nearer]))
    found, _ = ordered(replace(table, distances=distances), tmp_path / "same", 13)
    expected = np.concatenate([table.source_id[60:], table.source_id[:60]])
    np.testing.assert_array_equal(found.source_id, expected)


def test_some_stars_are_left_out(tmp_path: Path) -> None:
    table = scattered(50, 1.0)
    sorter = SkySorter(tmp_path)
    sorter.add(table)
    kept = concatenate(list(sorter.tables(np.array([3, 20, 49]))))
    assert set(kept.source_id) == set(np.delete(table.source_id, [3, 20, 49]))


def test_stars_of_other_kinds_are_refused(tmp_path: Path) -> None:
    sorter = SkySorter(tmp_path)
    sorter.add(stars())
    with pytest.raises(ValueError, match="one extinction system"):
        sorter.add(stars(system="A_G"))
