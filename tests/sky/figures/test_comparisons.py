"""Residuals, calibration and extinctions of stars that a map has not seen."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from dustmap.inference import scores
from dustmap.sky.agreement import Pairs, Score
from dustmap.sky.figures import (
    Comparison,
    agreement_figure,
    calibration_figure,
    extinction_figure,
    residual_figure,
)
from dustmap.sky.figures._comparisons import coverage_curve
from dustmap.sky.figures._sky_images import SkyCells
from dustmap.sky.systems import system_named
from tests.sky.figures.clouds import bar_labels, every_text, shown, titled


def compared(n: int = 300, seed: int = 0) -> Comparison:
    rng = np.random.default_rng(seed)
    predicted = rng.exponential(1.0, n)
    return Comparison(
        l=rng.uniform(0.0, 360.0, n),
        b=np.degrees(np.arcsin(rng.uniform(-1.0, 1.0, n))),
        measured=predicted + 0.1 * rng.standard_normal(n),
        predicted=predicted,
        std=np.full(n, 0.1),
        system=system_named("A_V"),
    )


def test_transforms_of_a_true_model_are_uniform_and_its_intervals_hold_their_share() -> None:
    pit = compared(20_000).pit
    counts, _ = np.histogram(pit, bins=10, range=(0.0, 1.0))
    assert np.abs(counts - 2000.0).max() < 5 * np.sqrt(2000.0)
    found = coverage_curve(pit, np.array([0.0, 0.68, 0.95, 1.0]))
    np.testing.assert_allclose(found, [0.0, 0.68, 0.95, 1.0], atol=0.02)


def test_coverage_counts_central_intervals() -> None:
    pit = np.array([0.5, 0.3, 0.9, 0.02])  # of widths 0, 0.4, 0.8 and 0.96
    np.testing.assert_array_equal(
        coverage_curve(pit, np.array([0.5, 0.8, 0.95])), [0.5, 0.75, 0.75]
    )


def test_residuals_are_drawn_at_minus_l() -> None:
    stars = compared(40)
    axis = titled(residual_figure(stars))["40 stars"]
    drawn = np.asarray(axis.collections[0].get_offsets())
    np.testing.assert_allclose(np.degrees(drawn[:, 0]) % 360.0, (-stars.l) % 360.0, atol=1e-9)
    np.testing.assert_allclose(np.degrees(drawn[:, 1]), stars.b, atol=1e-9)
    np.testing.assert_allclose(shown(axis.collections[0]), stars.standardised)


def test_a_cell_shows_the_sum_of_its_residuals_over_the_root_of_their_number() -> None:
    one = np.ones(16)
    stars = Comparison(30.0 * one, 10.0 * one, 1.2 * one, one, 0.1 * one, system_named("A_V"))
    figure = residual_figure(stars)
    mesh = titled(figure)["cells of about 16 (grey: no stars)"].collections[0]
    np.testing.assert_allclose(np.unique(shown(mesh)[np.isfinite(shown(mesh))]), [2.0 * 4.0])
    assert bar_labels(figure)[0] == "(measured − predicted) / std. deviation"


def test_cells_are_of_like_area_and_hold_every_place() -> None:
    cells = SkyCells(12)
    rng = np.random.default_rng(1)
    n = 200_000
    counts = np.bincount(
        cells.of(rng.uniform(-360, 720, n), np.degrees(np.arcsin(rng.uniform(-1, 1, n)))),
        minlength=len(cells),
    )
    assert len(counts) == len(cells)
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.4 * counts.mean()
    assert cells.of(np.array([0.0, 360.0, 5.0]), np.array([-90.0, 90.0, 90.0])).tolist() == [
        0,
        len(cells) - cells.per_row[-1],
        len(cells) - cells.per_row[-1],
    ]


def test_calibration_tells_shares_in_numbers() -> None:
    """The shares are those of the scores: 3 of 400 more are within 1 σ than within 68 %."""
    stars = compared(400)
    normal = torch.from_numpy(np.concatenate([np.full(3, 0.9972), stars.standardised[3:]]))
    found = scores(normal, torch.zeros(400), torch.ones(400))
    figure = calibration_figure(ndtr(normal.numpy()))
    told = every_text(figure)
    assert f"68% intervals hold {found.coverage68:.1%}" in told
    assert f"95% intervals hold {found.coverage95:.1%}" in told
    assert "Calibration of predicted measurements: 400 held-out stars" in told
    assert "probability integral transform" in told
    figure.draw_without_rendering()


@pytest.mark.parametrize("pit", [[], [0.5, 1.5], [np.nan], [[0.5]]])
def test_calibration_wants_probabilities(pit: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pit: expected one or more numbers \(N,\) in 0 to 1"):
        calibration_figure(np.array(pit))


@pytest.mark.parametrize("n", [1, 200, 4000])
def test_extinctions_are_drawn_for_any_number_of_stars(n: int) -> None:
    figure = extinction_figure(compared(n))
    left, right = figure.axes[:2]
    assert left.get_xlabel() == "predicted $A_V$ [mag]"
    assert left.get_ylabel() == "measured $A_V$ [mag]"
    assert left.get_xlim() == left.get_ylim()
    assert right.get_ylabel() == "(measured − predicted) / std. deviation"
    assert bar_labels(figure) == (["stars", "stars"] if n > 3000 else [])
    figure.draw_without_rendering()


def test_residuals_beyond_the_frame_are_counted() -> None:
    stars = compared(50)
    off = replace(stars, measured=stars.measured + np.where(np.arange(50) < 3, 5.0, 0.0))
    assert "3 beyond" in every_text(extinction_figure(off))


def test_impossible_comparisons_are_refused() -> None:
    stars = compared(5)
    with pytest.raises(ValueError, match="std: expected standard deviations > 0"):
        replace(stars, std=np.zeros(5))
    with pytest.raises(ValueError, match="expected columns of one length"):
        replace(stars, l=np.zeros(4))


def test_scores_are_drawn_where_their_segments_are() -> None:
    """Every point stands at the mean distance of its pairs and has their score."""
    rng, cut = np.random.default_rng(0), 40.0 * np.arange(6.0)
    middles = np.repeat(0.5 * (cut[1:] + cut[:-1]), 30)
    theirs = rng.exponential(1e-3, len(middles))
    ours = theirs + middles * 1e-6 * rng.standard_normal(len(middles))
    pairs = Pairs(
        "other", "differential", system_named("A_V"), theirs, ours, middles, 0.0 * middles, cut
    )
    spread, line = agreement_figure([pairs]).axes[1:3]
    for axis, name in ((spread, "RMSE"), (line, "slope")):
        drawn = next(each for each in axis.lines if each.get_label() == name)
        x, y = np.asarray(drawn.get_data(), np.float64)
        np.testing.assert_allclose(x, [20.0, 60.0, 100.0, 140.0, 180.0])
        for at, value in zip(x, y, strict=True):
            here = middles == at
            score = Score.of(theirs[here], ours[here])
            expected = 1e3 * score.rmse if name == "RMSE" else score.slope
            assert value == pytest.approx(expected)
