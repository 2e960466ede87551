"""report.html: everything of a report in one file, rounded, with what its numbers mean."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dustmap.runs.reports import Check, Picture, Report, page

PNG = b"\x89PNG\r\n\x1a\n of a picture"
PASSED = Check("coverage68", 0.674, 0.52, 0.84, "learn the noise")
FAILED = Check("length <in spacings>", 0.8, 2.0, 20.0, "a smaller spacing & more stars")
SECTIONS: dict[str, dict[str, Any]] = {
    "data": {
        "files": [
            {"name": "sky.fits", "columns": {"l": "l [deg]", "extinction": "A0 [mag]"}},
        ],
        "reference": "",
    },
    "counts": {"stars_in_the_map": 5000, "stars_held_out": 500},
    "grid": {"nodes": "41 × 41 × 25", "spacing": "10 × 10 × 10 pc", "box": "X"},
    "hyperparameters": {"length": 62.8645, "std": 1.2, "nu": 1000.0},
    "units": {"length": "pc", "std": "of ln density", "nu": ""},
    "hyperparameter_errors": {"length": 15.092},
    "held_out_stars": {"rmse": 0.046024, "n": 500, "chi2": 1.1688, "coverage68": 0.674},
    "stages": {"stages": [{"stage": "fit", "seconds": 150.2, "peak_gib": 0.64}]},
    "something new": {"number": 3.25, "rows": [{"a_pc": 1.0, "b": None}, {"a_pc": 2.5, "b": 2}]},
}


class _Text(HTMLParser):
    """Words of a page, and whether every element that opens is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data.strip())


def text_of(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    assert parser.open == []
    return " ".join(filter(None, parser.words))


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    (folder / "slice.png").write_bytes(PNG)
    pictures = (Picture("slice.png", "Density & errors"),)
    return page(Report("abc", SECTIONS, (PASSED, FAILED), pictures), folder)


def test_the_page_needs_nothing_beside_itself(html: str) -> None:
    (picture,) = re.findall(r"<img [^>]*src=\"data:image/png;base64,([^\"]*)\"", html)
    assert base64.b64decode(picture) == PNG
    assert not re.search(r"https?:|<script|<link|url\(", html)


def test_a_failed_check_comes_first_with_what_to_do(html: str) -> None:
    text = text_of(html)
    assert "1 of 2 checks failed." in text
    assert text.index("a smaller spacing & more stars") < text.index("5,000")
    assert "length <in spacings>" in text
    assert "expected 2 to 20" in text


def test_numbers_are_rounded_as_their_errors_ask_for_and_have_units(html: str) -> None:
    text = text_of(html)
    assert "63 ± 15 pc" in text
    assert "1.20 of ln density of the field about its mean (held)" in text
    assert "0.0460" in text
    assert "0.046024" not in text
    assert "3 min" in text


def test_nothing_of_a_report_is_lost(html: str) -> None:
    text = text_of(html)
    assert "Something new" in text
    assert "3.25" in text
    assert "A [pc] B 1 2.50 2" in text


def test_columns_that_go_by_their_own_name_are_not_listed(html: str) -> None:
    text = text_of(html)
    assert "extinction: A0 [mag]" in text
    assert "l: l" not in text


def test_no_check_and_no_picture_make_a_page(tmp_path: Path) -> None:
    text = text_of(page(Report("", {}, ()), tmp_path))
    assert "All 0 checks passed." not in text


def test_the_view_of_the_map_is_linked_where_there_is_one(tmp_path: Path) -> None:
    assert "view.html" not in page(Report("", {}, ()), tmp_path)
    (tmp_path / "view.html").write_text("")
    assert '<a href="view.html">' in page(Report("", {}, ()), tmp_path)
