"""The page of a map in a real browser: what it draws, what it answers, and that it asks nothing."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.sky.view import view_of
from tests.sky.view.blob import CLOUD, GRID, PEAK, WIDTH, blob_map, odd_maps
from tests.sky.view.browser import WINDOW, Browser, browsing

Array: TypeAlias = NDArray[np.float64]
#: Half of the camera's angle, how far it is in units of half the diagonal over its sine, and pixels
#: by which the middle of the view is above that of the canvas.
HALF_ANGLE, DISTANCE, SHIFT = math.radians(17.5), 1.1, 25.0
LOWER, UPPER = (np.array(GRID.lower) - 5.0, np.array(GRID.upper) + 5.0)
SIDES = ("Width", "Height")
#: All that is in the way of the cloud, switched off.
BARE = {"fade": False, "names": False}

Controls: TypeAlias = tuple[tuple[str, bool | float], ...]
#: Controls and their values.
CONTROLS: Controls = (
    ("#plane-2", True),
    ("#level-2", -10.0),
    ("#level-2", 30.0),
)
LAST: Controls = (("#threshold", 0.2), ("input[value=sample]", True))
MORE: Controls = (("#plane-0", True), ("#opacity", 0.9), ("input[value=spread]", True))
#: What the browser asks for itself, as its first page does, which may be late.
OWN = ("data:", "about:", "chrome://", "chrome-untrusted://")
#: Does with a control what a hand does.
SET = """(([name, value]) => {
  const control = document.querySelector(name);
  const slider = control.type === "range";
  control[slider ? "value" : "checked"] = value;
  control.dispatchEvent(new Event(slider ? "input" : "change", { bubbles: true }));
})(arguments)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = SkyCoord(*_sky(CLOUD), frame="galactic")
    path = tmp_path_factory.mktemp("page") / "view.html"
    view_of(blob_map(), {"the cloud": place}).save(path)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser, page: Path) -> Iterator[Browser]:
    """The page as it opens; whatever a test does, the console has nothing to say of it."""
    shared.requests()
    shared.complaints()
    shared.open(page)
    yield shared
    assert shared.complaints() == []


def _sky(place: tuple[float, float, float]) -> tuple[u.Quantity, u.Quantity, u.Quantity]:
    x, y, z = place
    distance = math.hypot(x, y, z)
    return math.atan2(y, x) * u.rad, math.asin(z / distance) * u.rad, distance * u.pc


def seen_at(place: Array, yaw: float, pitch: float, width: int, height: int) -> Array:
    """Project a place through a pinhole that looks at the middle of the box, +Z up: pixels (2,)."""
    turned, raised = math.radians(yaw), math.radians(pitch)
    back = np.array(
        [
            math.cos(raised) * math.cos(turned),
            math.cos(raised) * math.sin(turned),
            math.sin(raised),
        ]
    )
    right = np.array([-math.sin(turned), math.cos(turned), 0.0])
    up = np.cross(back, right)
    radius = 0.5 * np.linalg.norm(UPPER - LOWER)
    eye = 0.5 * (LOWER + UPPER) + DISTANCE * radius / math.sin(HALF_ANGLE) * back
    away = place - eye
    focal = 0.5 * min(width, height) / math.tan(HALF_ANGLE)
    x, y = focal * np.array([away @ right, away @ up]) / (away @ -back)
    return np.array([0.5 * width + x, 0.5 * height - SHIFT - y])


def test_the_page_asks_for_nothing_but_itself(browser: Browser, page: Path) -> None:
    asked = [url for url in browser.requests() if not url.startswith(OWN)]
    assert [url.partition("#")[0] for url in asked] == [page.as_uri()]
    assert browser.ask("performance.getEntriesByType('resource').length") == 0
    assert browser.ask("document.getElementById('trouble').hidden")


@pytest.mark.parametrize(
    ("yaw", "pitch"),
    [
        (-60.0, 30.0),
        pytest.param(-90.0, 90.0, marks=pytest.mark.slow),
        pytest.param(20.0, -15.0, marks=pytest.mark.slow),
    ],
)
def test_the_cloud_is_where_it_belongs(browser: Browser, yaw: float, pitch: float) -> None:
    """The middle of the cloud's light, weighted by how opaque it is, and the named point."""
    browser.change(yaw=yaw, pitch=pitch, **BARE)
    alpha = browser.picture()[..., 3]
    height, width = alpha.shape
    expected = seen_at(np.array(CLOUD), yaw, pitch, width, height)
    projected = browser.ask("window.dustmap.project(arguments[0])", list(CLOUD))
    assert [projected["x"], projected["y"]] == pytest.approx(expected, abs=1e-6 * width)
    rows, columns = np.mgrid[:height, :width] + 0.5
    weight = alpha / alpha.sum()
    found = np.array([(weight * columns).sum(), (weight * rows).sum()])
    assert 0.001 < (alpha > 0.1).mean() < 0.2
    assert np.linalg.norm(found - expected) < 4.0


@pytest.mark.slow
def test_a_higher_threshold_leaves_less_and_no_opacity_nothing(browser: Browser) -> None:
    light = []
    for part in ({"threshold": 0.1}, {"threshold": 0.6}, {"threshold": 0.9}, {"opacity": 0.0}):
        browser.change(**part, **BARE)
        light.append(browser.picture()[..., 3].sum())
    assert light[0] > 2.0 * light[1] > 4.0 * light[2] > 0.0 == light[3]


@pytest.mark.slow
def test_what_the_prior_made_is_fainter(browser: Browser) -> None:
    """The cloud is well within reach of the data; thin dust beyond is not."""
    browser.change(threshold=0.0, fade=False)
    whole = browser.picture()[..., 3].sum()
    browser.change(fade=True)
    assert browser.picture()[..., 3].sum() < 0.8 * whole


@pytest.mark.parametrize(
    "more", [(), pytest.param(MORE, marks=pytest.mark.slow)], ids=lambda more: f"{len(more)} more"
)
def test_controls_change_the_picture(browser: Browser, more: Controls) -> None:
    browser.change(**BARE)
    pictures = [browser.picture()]
    slices = [browser.picture("slice")]
    for control, value in (*CONTROLS, *more, *LAST):
        browser.ask(SET, control, value)
        browser.change()
        pictures.append(browser.picture())
        slices.append(browser.picture("slice"))
        assert np.abs(pictures[-1] - pictures[-2]).max() > 0.05, control
    assert np.abs(slices[2][..., :3] - slices[3][..., :3]).max() > 0.2
    browser.press("s")
    browser.change()
    assert browser.ask("window.dustmap.state.sample") == 2
    assert np.abs(browser.picture() - pictures[-1]).max() > 0.05
    assert np.abs(browser.picture("slice") - slices[-1]).max() > 0.05


@pytest.mark.slow
def test_keys_do_what_the_help_says(browser: Browser) -> None:
    state = "window.dustmap.state"
    browser.press("1", "u", "x", "]")
    assert (browser.ask(f"{state}.pitch"), browser.ask(f"{state}.show")) == (90, "spread")
    assert browser.ask(f"{state}.planes") == [True, False, False]
    assert browser.ask(f"{state}.levels") == [10, 0, 0]
    browser.press("m", "T", "c", "n")
    assert browser.ask(f"{state}.names") is False
    assert browser.ask(f"{state}.colours") == "viridis"
    browser.press("r")
    assert browser.ask(f"{state}.pitch") == 30
    browser.press("?")
    assert browser.ask("document.getElementById('keys').open")


def test_numbers_of_a_place_are_those_of_the_map(browser: Browser) -> None:
    """To the rounding that the page states; integrals in steps of half a voxel to 2 %."""
    density = blob_map()
    rounding = browser.ask("about.volumes[0].error")
    between = SkyCoord(*_sky((33.0, 21.0, -7.0)), frame="galactic")
    said = browser.ask("window.dustmap.numbersAt([33, 21, -7])")
    assert said["density"] == pytest.approx(density.query(between), rel=rounding)
    for place in (CLOUD, (30.0, 20.0, -10.0), (-70.0, 40.0, 30.0)):
        here = SkyCoord(*_sky(place), frame="galactic")
        said = browser.ask("window.dustmap.numbersAt(arguments[0])", list(place))
        l, b, distance = _sky(place)
        assert said["l"] == pytest.approx(l.to_value(u.deg) % 360)
        assert said["b"] == pytest.approx(b.to_value(u.deg))
        assert said["distance"] == pytest.approx(distance.to_value(u.pc))
        assert said["density"] == pytest.approx(density.query(here), rel=rounding)
        assert said["std"] == pytest.approx(density.query(here, mode="std"), rel=0.03)
        assert said["coverage"] == pytest.approx(density.coverage(here), abs=0.01)
        column = density.query(here, integrated=True)
        assert said["column"] == pytest.approx(column, rel=0.02)
        spread = density.query(here, mode="std", integrated=True)
        assert said["columnStd"] == pytest.approx(spread, rel=0.1)
        assert said["drawn"] == 4


def test_a_click_on_the_cloud_picks_it(browser: Browser) -> None:
    """On its near side, where it is as dense as the threshold."""
    browser.change(threshold=browser.ask("densityScale.part(arguments[0])", 0.25 * PEAK))
    at = browser.ask("window.dustmap.project(arguments[0])", list(CLOUD))
    size = [browser.ask(f"document.getElementById('scene').client{side}") for side in SIDES]
    scene = browser.driver.find_element("id", "scene")
    offset = round(at["x"] - 0.5 * size[0]), round(at["y"] - 0.5 * size[1])
    browser.click(scene, *offset)
    browser.change()
    picked = browser.ask("window.dustmap.state.picked")
    there = browser.ask("window.dustmap.numbersAt(window.dustmap.state.picked).density")
    radius = WIDTH * math.sqrt(2.0 * math.log(4.0))
    assert np.linalg.norm(np.array(picked) - CLOUD) == pytest.approx(radius, abs=5.0)
    assert there == pytest.approx(0.25 * PEAK, rel=0.2)
    words = browser.ask("document.getElementById('picked').innerText")
    assert all(name in words for name in ("l, b", "distance", "× 10⁻³ mag/pc", "± from 4 samples"))
    browser.click(scene, 230, 100)
    browser.change()
    assert browser.ask("window.dustmap.state.picked") is None


@pytest.mark.slow
def test_a_view_is_linked_by_its_address(browser: Browser, page: Path) -> None:
    fragment = (
        "show=sample&theme=light&colours=cividis&sample=3&opacity=0.7&yaw=15&pitch=-20&zoom=2&fade=0"
        "&names=0&threshold=0.002&planes=XZ&x=30&z=-20&flat=X&target=1,2,3&picked=60,40,-10"
    )
    browser.open(page, fragment)
    state = browser.ask("window.dustmap.state")
    assert (state["show"], state["sample"], state["theme"]) == ("sample", 3, "light")
    assert (state["planes"], state["levels"]) == ([True, False, True], [30, 0, -20])
    assert (state["picked"], state["target"], state["flat"]) == ([60, 40, -10], [1, 2, 3], 0)
    assert browser.ask("fragmentOf(window.dustmap.state)") == fragment
    browser.open(page, "show=nothing&zoom=x&threshold=&sample=99&yaw&%20=&x=9000")
    state = browser.ask("window.dustmap.state")
    assert (state["show"], state["zoom"], state["sample"]) == ("mean", 1, 4)
    assert state["levels"][0] == UPPER[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a dot", "a hole", "unknown", "far", "negative"])
def test_odd_maps_are_drawn(shared: Browser, tmp_path: Path, name: str) -> None:
    density = odd_maps()[name]
    view_of(density).save(tmp_path / "odd.html")
    shared.complaints()
    middle = 0.5 * (np.array(density.grid.lower) + np.array(density.grid.upper))
    shared.open(tmp_path / "odd.html", f"planes=XYZ&picked={','.join(map(str, middle))}")
    shared.ask("window.dustmap.draw()")
    assert (shared.picture()[..., 3].max() > 0.5) == (name != "unknown")
    assert "pc" in shared.ask("document.getElementById('picked').innerText")
    assert shared.complaints() == []


@pytest.mark.slow
def test_the_page_is_dark_or_light(browser: Browser) -> None:
    browser.resize(*WINDOW)
    for theme, bounds in (("dark", (0.0, 0.15)), ("light", (0.9, 1.0))):
        browser.change(theme=theme)
        paper = browser.screen()[60:, :, :3]
        assert bounds[0] <= np.median(paper) <= bounds[1]
    for scheme, expected in (("light", "light"), ("dark", "dark")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.change(theme="auto")
        assert browser.ask("document.documentElement.dataset.theme") == expected


@pytest.mark.slow
def test_a_narrow_window_has_all_of_it(browser: Browser) -> None:
    try:
        browser.resize(420, 800)
        browser.change(picked=list(CLOUD))
        wide = browser.ask("document.documentElement.scrollWidth")
        assert wide <= 420
        assert browser.picture()[..., 3].max() > 0.5
    finally:
        browser.resize(*WINDOW)


@pytest.mark.slow
def test_the_frame_of_a_notebook_shows_the_page(shared: Browser, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><body>{blob_map(2).view()._repr_html_()}</body>", "utf-8")
    shared.complaints()
    shared.driver.get(path.as_uri())
    shared.driver.switch_to.frame(0)
    try:
        shared.wait()
        shared.change(yaw=30.0)
        assert shared.picture()[..., 3].max() > 0.5
    finally:
        shared.driver.switch_to.default_content()
    assert shared.complaints() == []
