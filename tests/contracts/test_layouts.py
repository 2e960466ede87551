"""The contract of export layouts: others read in the file what the map itself answers.

Numbers are float32, some of them sums of segments: they agree within 5e-5. Outside the box of the
map densities are NaN, and so are integrals, but in Bayestar's layout: there they stay what they
are at the face.
"""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dustmap.sky.layouts import LAYOUTS, LayoutCounts
from dustmap.sky.systems import conversion, system_named
from tests.contracts.layouts import FIELD, LAYOUT_CASES, LayoutCase, coordinates
from tests.sky.layouts.analytic import CLOUDS, PROVENANCE, AnalyticField, Vector

RTOL = 5e-5


class Written(NamedTuple):
    case: LayoutCase
    path: Path
    counts: LayoutCounts

    @property
    def factor(self) -> float:
        """From mag/pc of the map to the numbers of the file."""
        return self.case.factor * conversion(FIELD.system, system_named(self.case.system))


@pytest.fixture(scope="module", params=LAYOUT_CASES, ids=lambda case: case.name)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    case: LayoutCase = request.param
    path = tmp_path_factory.mktemp(case.name) / case.file
    yield Written(case, path, case.write(path, FIELD, False))
    path.unlink()


def test_every_layout_has_a_case() -> None:
    assert {case.name.partition("_")[0] for case in LAYOUT_CASES} == set(LAYOUTS)


def test_file_holds_what_the_map_answers(written: Written) -> None:
    for stored in written.case.stored(written.path):
        expected = stored.expected()
        assert np.isfinite(expected).sum() > 40
        np.testing.assert_allclose(stored.values, written.factor * expected, rtol=RTOL)


def test_its_reader_answers_as_the_map(written: Written) -> None:
    read = written.case.read(written.path)
    stored = next(written.case.stored(written.path))
    expected = stored.expected()
    distance = np.linalg.norm(stored.positions, axis=-1)
    # Readers know nothing beyond the first and the last shell, nor beside a pixel that is outside.
    between = (distance > 1.001 * distance.min()) & (distance < 0.999 * distance.max())
    known = np.isfinite(expected) & between
    places = coordinates(stored.positions[known][::7])
    answers = read(places)
    whole = np.isfinite(answers)
    assert whole.sum() > 40
    np.testing.assert_allclose(
        answers[whole], written.factor * expected[known][::7][whole], rtol=2 * RTOL
    )


def test_counts_are_of_numbers_outside(written: Written) -> None:
    case, counts = written.case, written.counts
    assert counts.values >= counts.outside >= 0
    assert counts.raised == 0
    assert (counts.outside > 0) == case.leaves_box


def test_file_states_unit_system_and_configuration(written: Written) -> None:
    case, path = written.case, written.path
    assert case.labels(path) == (case.unit, case.system)
    # A FITS header breaks long lines.
    assert PROVENANCE.config_sha256[:40].encode() in path.read_bytes().replace(b"\n", b"")


def test_existing_output_is_refused_or_replaced_by_the_same_bytes(
    written: Written, tmp_path: Path
) -> None:
    case, path = written.case, tmp_path / written.case.file
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        case.write(path, FIELD, False)
    assert path.read_text() == "mine"
    assert case.write(path, FIELD, True) == written.counts
    assert path.read_bytes() == written.path.read_bytes()
    # Nor do bytes differ later: astropy's comments on checksums would say when they were made.
    assert b"updated 20" not in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


class Ends(Exception):
    pass


@dataclass(frozen=True, eq=False)
class Ending(AnalyticField):  # type: ignore[misc]
    """A density whose computation fails."""

    def density(self, x: Vector) -> Vector:
        raise Ends

    def integral(self, start: Vector, end: Vector) -> Vector:
        raise Ends


def test_nothing_is_left_of_a_density_that_ends(written: Written, tmp_path: Path) -> None:
    with pytest.raises(Ends):
        written.case.write(tmp_path / "map", Ending(CLOUDS, box=(FIELD.lower, FIELD.upper)), False)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_nothing_is_left_on_a_full_disk(written: Written, tmp_path: Path) -> None:
    path = tmp_path / written.case.file
    full = disk_of(written.path.stat().st_size // 2)
    with full, pytest.raises(OSError, match="File too large") as raised:
        written.case.write(path, FIELD, False)
    assert raised.value.errno == errno.EFBIG
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
