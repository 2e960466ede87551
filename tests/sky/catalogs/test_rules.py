"""Cuts and flags: against the formulas that they stand for, and what a wrong one is answered."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.catalogs import card_named
from dustmap.sky.catalogs._rules import CardTable, Cut, parse_cut

FLAGS = {"flag": {"low": 0, "high": 3}}
COLUMNS: dict[str, NDArray[Any]] = {
    "x": np.array([1.0, 2.0, np.nan, -1.0]),
    "y": np.array([2.0, 0.0, 1.0, 4.0]),
    "flag": np.ma.MaskedArray([0, 8, 9, 1], mask=[False, False, False, True]),
    "name": np.array(["0000", "0100", "", "0000"]),
}


def cut(**raw: object) -> Cut:
    return parse_cut(CardTable(raw, "card test: cuts"), FLAGS)


@pytest.mark.parametrize(
    ("raw", "kept", "words"),
    [
        ({"column": "x", "above": 1}, [1], "x > 1"),
        ({"column": "x", "at_least": 1}, [0, 1], "x >= 1"),
        ({"column": "x", "below": 1}, [3], "x < 1"),
        ({"column": "x", "at_most": 1}, [0, 3], "x <= 1"),
        ({"column": "x", "at_least": 0, "below": 2}, [0], "x >= 0 and x < 2"),
        ({"column": "x", "equals": 2}, [1], "x = 2"),
        ({"column": "x", "one_of": [1, -1]}, [0, 3], "x in 1, -1"),
        ({"column": "name", "equals": "0000"}, [0, 3], "name = 0000"),
        ({"column": "name", "one_of": ["0100", ""]}, [1, 2], "name in 0100, "),
        ({"sum": {"x": 1, "y": -0.5}, "at_least": 0}, [0, 1], "x - 0.5 y >= 0"),
        ({"ratio": ["x", "y"], "above": 0.25}, [0], "x / y > 0.25"),
        ({"column": "flag", "bits_clear": [3]}, [0], "flag has bits 3 clear"),
        ({"column": "flag", "bits_clear": ["low", "high"]}, [0], "flag has bits low, high clear"),
        ({"column": "flag", "bits_set": ["low", 3]}, [2], "flag has bits low, 3 set"),
        ({"column": "flag", "below": 9}, [0, 1], "flag < 9"),
    ],
)
def test_what_is_kept(raw: dict[str, object], kept: list[int], words: str) -> None:
    made = cut(**raw)
    assert np.flatnonzero(made.keeps(COLUMNS)).tolist() == kept
    assert str(made) == words


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"column": "x"}, "at least one of above"),
        ({"above": 1}, "one of column, sum, ratio"),
        ({"column": "x", "ratio": ["x", "y"], "above": 1}, "one of column, sum, ratio"),
        ({"column": "x", "abov": 1}, "unknown key 'abov'; did you mean above?"),
        ({"column": "x", "above": "1"}, "above = '1': expected a finite number"),
        ({"column": "x", "above": True}, "expected a finite number"),
        ({"column": "x", "above": 10**400}, "expected a finite number"),
        ({"column": "x", "above": float("nan")}, "expected a finite number"),
        ({"column": "x", "one_of": 3}, "expected a list"),
        ({"column": "x", "one_of": []}, "not empty"),
        ({"ratio": ["x"], "above": 1}, "expected two columns"),
        ({"sum": {"x": "1"}, "above": 1}, "expected a finite number"),
        ({"sum": {}, "above": 1}, "at least one column"),
        ({"column": "flag", "bits_clear": ["hihg"]}, "'hihg' is no flag; there are low, high"),
        ({"column": "x", "bits_clear": ["low"]}, "names no flags of this column"),
        ({"column": "flag", "bits_clear": [64]}, "expected a bit from 0 to 62"),
    ],
)
def test_what_is_refused(raw: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=r"^card test: cuts.*: ") as caught:
        cut(**raw)
    assert words in str(caught.value)


def test_edenhofer24_is_the_published_selection() -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, NDArray[Any]] = {
        "quality_flags": np.ma.MaskedArray(rng.integers(0, 64, 4000)),
        "parallax": rng.uniform(0.01, 30.0, 4000),
        "parallax_error": rng.uniform(0.001, 3.0, 4000),
    }
    kept = np.logical_and.reduce(
        [one.keeps(columns) for one in card_named("zgr23").cuts("edenhofer24")]
    )
    w, s = columns["parallax"], columns["parallax_error"]
    near = (w > s) & (1.0 / np.where(w > s, w - s, 1.0) < 1.8)
    far = 1.0 / (w + s) > 0.040
    np.testing.assert_array_equal(kept, near & far & (np.ma.getdata(columns["quality_flags"]) < 8))
    assert 50 < kept.sum() < 3950


def test_flags_of_zgr23() -> None:
    flags = card_named("zgr23").flags["quality_flags"]
    assert flags["chi2_opt"] == 3
    assert {flags["teff_confidence"], flags["parallax"]} == {0, 5}


@pytest.mark.parametrize(
    "raw", [{"sum": {"n": 1}, "at_most": 5}, {"ratio": ["n", "m"], "below": 5}]
)
def test_missing_whole_numbers_pass_no_test(raw: dict[str, object]) -> None:
    columns = {
        "n": np.ma.MaskedArray(np.array([1, 1]), mask=[True, False]),
        "m": np.ma.MaskedArray(np.array([1, 1]), mask=[False, False]),
    }
    assert parse_cut(CardTable(raw, "here"), {}).keeps(columns).tolist() == [False, True]
