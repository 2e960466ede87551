"""How figures are written, scaled and labelled; and what they leave alone."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.colors import AsinhNorm, LogNorm
from PIL import Image

from dustmap import __version__
from dustmap.sky import figures
from dustmap.sky.figures import check_picture, projection_figure, save_figure, slice_figure
from dustmap.sky.figures._style import (
    _asinh_ticks,
    density_scale,
    signed,
    signed_scale,
    spread_scale,
    symbol_of,
    unit_of,
)
from dustmap.sky.systems import system_named
from tests.sky.figures.clouds import cloud, posterior


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF")])
def test_pictures_are_written_by_their_ending(tmp_path: Path, name: str, magic: bytes) -> None:
    figure = slice_figure(cloud(0.0, 0.0, 0.0))
    save_figure(figure, tmp_path / "plots" / name)
    assert (tmp_path / "plots" / name).read_bytes().startswith(magic)
    with pytest.raises(FileExistsError, match="exists already"):
        save_figure(figure, tmp_path / "plots" / name)
    save_figure(figure, tmp_path / "plots" / name, overwrite=True)


def test_pictures_say_where_they_come_from(tmp_path: Path) -> None:
    figure, history = slice_figure(posterior()), ("dustmap plot run1", "catalog: stars.fits")
    save_figure(figure, tmp_path / "a.png", history=history)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.info["Software"] == f"dustmap {__version__}"
        assert picture.info["Description"] == "\n".join(history)
    save_figure(figure, tmp_path / "a.pdf", history=history)
    written = (tmp_path / "a.pdf").read_bytes()
    assert f"dustmap {__version__}".encode() in written
    assert b"catalog: stars.fits" in written


def test_text_of_a_pdf_stays_text(tmp_path: Path) -> None:
    save_figure(slice_figure(posterior()), tmp_path / "a.pdf")
    written = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in written
    assert b"/Type3" not in written


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    figure = slice_figure(cloud(0.0, 0.0, 0.0))
    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        save_figure(figure, tmp_path / "a.png")
    assert not any(tmp_path.iterdir())


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.bmp: expected a picture that ends in \.png or \.pdf"):
        check_picture(tmp_path / "a.bmp")


def test_drawing_touches_no_global_state(tmp_path: Path) -> None:
    """Neither settings nor windows: pyplot keeps every figure alive that it knows."""
    before = dict(mpl.rcParams)
    save_figure(projection_figure(posterior()), tmp_path / "a.png")
    assert dict(mpl.rcParams) == before
    assert not Gcf.figs
    package = Path(figures.__file__).parent
    assert not any("pyplot" in path.read_text("utf-8") for path in package.glob("_[a-z]*.py"))


def test_the_users_settings_do_not_change_the_picture(tmp_path: Path) -> None:
    density = cloud(0.0, 0.0, 0.0)
    save_figure(slice_figure(density), tmp_path / "a.png")
    with mpl.rc_context({"font.size": 20.0, "image.cmap": "jet", "image.origin": "upper"}):
        save_figure(slice_figure(density), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_scales_end_at_percentiles_and_arrows_say_so() -> None:
    values = np.concatenate([np.geomspace(1.0, 10.0, 1000), [1e-3, 1e4]])
    scale = density_scale(values)
    assert isinstance(scale.norm, LogNorm)
    assert 1.0 <= (scale.norm.vmin or 0.0) < (scale.norm.vmax or 0.0) <= 10.0
    assert scale.extend == "both"
    assert signed_scale(3.0, np.array([0.0, 4.0])).extend == "max"
    assert signed_scale(3.0, np.array([-4.0, 3.0])).extend == "min"
    assert signed_scale(3.0, np.array([-1.0, 1.0])).extend == "neither"
    assert spread_scale(np.linspace(0.0, 1.0, 100)).norm.vmin == 0.0
    assert spread_scale(0.3 + 1e-8 * np.arange(100.0)).norm.vmin == 0.0
    assert (spread_scale(np.linspace(0.3, 0.4, 100)).norm.vmin or 0.0) > 0.29


@pytest.mark.parametrize(
    "values", [np.zeros(4), np.full(4, 2.0), np.full(4, np.nan), np.array([-1.0, 1.0]), np.empty(0)]
)
def test_scales_of_odd_values_are_sound(values: np.ndarray) -> None:
    for scale in (density_scale(values), spread_scale(values), signed_scale(3.0, values)):
        assert scale.norm.vmin is not None
        assert scale.norm.vmax is not None
        assert scale.norm.vmin < scale.norm.vmax


@pytest.mark.parametrize("low", [-1.0, -0.001, -40.0, 0.0])
def test_densities_that_may_be_negative_are_linear_about_zero(low: float) -> None:
    norm = density_scale(np.linspace(low, 5.0, 100)).norm
    assert isinstance(norm, AsinhNorm)
    ticks = _asinh_ticks(norm)
    assert 0.0 in ticks
    assert 3 <= len(ticks) <= 10
    assert np.diff(np.asarray(norm(ticks))).min() > 0.09


@pytest.mark.parametrize(
    ("name", "symbol", "unit"),
    [
        ("A_V", "$A_V$", "mag"),
        ("A_BP", r"$A_\mathrm{BP}$", "mag"),
        ("A0", "A0", "mag"),
        ("E(ZGR23)", "E(ZGR23)", "mag"),
        ("custom:my_band", "my band", "mag"),
        ("E(B-V)_SFD", "E(B−V) SFD", "mag"),
        ("custom:E(BP-RP)", "E(BP−RP)", "mag"),
        ("e-folding_G", "e-folding G", "e-folds"),
    ],
)
def test_systems_are_named_with_their_unit(name: str, symbol: str, unit: str) -> None:
    assert symbol_of(system_named(name)) == symbol
    assert unit_of(system_named(name)) == unit
    assert [signed(v) for v in (5.0, -5.0, 0.0)] == ["+5", "−5", "0"]


def test_a_scale_reaches_the_only_value_that_differs() -> None:
    values = np.zeros(10_000)
    values[7] = 0.01
    for scale in (density_scale(values), spread_scale(values)):
        assert (scale.norm.vmin, scale.norm.vmax) == (0.0, 0.01)
        assert scale.extend == "neither"
