"""What a run says of itself: calibration, truth by distance, stages, progress, report."""

import logging
import math
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dustmap.cli import COMMANDS, parser
from dustmap.inference import scores_of_normal
from dustmap.linalg import AT_MOST, in_one_part
from dustmap.runs import Check, LogProgress, Report, Stage
from dustmap.runs._machine import rounded
from dustmap.runs.reports._progress import Stopwatch, peak_memory
from dustmap.runs.reports._report import Picture
from dustmap.runs.reports._scores import (
    PIT_BINS,
    Predictions,
    by_distance,
    calibration,
    held_out_by_distance,
    quality_proxies,
)


def predictions(n: int, scale: float) -> Predictions:
    """Normal errors of `scale` promised standard deviations, around means from 0 to 10 mag."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.linspace(0.0, 10.0, n, dtype=torch.float64)
    noise = scale * torch.randn(n, dtype=torch.float64, generator=generator)
    std = torch.ones_like(mean)
    scored = scores_of_normal(mean + noise, mean, std.square())
    return Predictions(mean + noise, mean, std, scored, np.arange(n))


def test_calibrated_predictions_have_flat_histograms_and_nominal_coverage() -> None:
    found = calibration(predictions(20_000, 1.0))
    assert found["coverage68"] == pytest.approx(0.683, abs=0.01)
    assert found["coverage95"] == pytest.approx(0.95, abs=0.006)
    counts = np.array(found["pit_histogram"])
    assert counts.sum() == 20_000
    assert np.abs(counts / 2000 - 1).max() < 5 / math.sqrt(2000)


def test_overconfident_predictions_pile_up_at_the_ends() -> None:
    counts = np.array(calibration(predictions(5000, 2.0))["pit_histogram"])
    assert len(counts) == PIT_BINS
    assert counts[[0, -1]].min() > 2 * counts[1:-1].max()


def test_proxies_are_of_a_v_and_none_is_of_a_custom_system() -> None:
    found = quality_proxies(predictions(1000, 1.0), 1.0)["bins"]
    assert [row["n"] for row in found] == [5, 600]
    assert found[1]["chi2"] == pytest.approx(1.0, abs=0.2)
    assert abs(found[1]["mean_residual"]) < 0.2
    doubled = quality_proxies(predictions(1000, 1.0), 2.0)["bins"]
    assert [row["n"] for row in doubled] == [10, 200]
    assert quality_proxies(predictions(10, 1.0), None) == {}


def test_dust_at_the_wrong_distance_shows_where_all_residuals_cancel() -> None:
    """Residuals that are 0.3 too large up to 50 pc and as much too small behind."""
    scored = predictions(4000, 1.0)
    distance = np.linspace(0.0, 100.0, 4000)[np.random.default_rng(0).permutation(4000)]
    shift = torch.from_numpy(np.where(distance < 50.0, 0.3, -0.3))
    rows = held_out_by_distance(replace(scored, y=scored.y + shift), distance)
    assert [row["n"] for row in rows] == [1000] * 4
    assert [(row["from_pc"], row["to_pc"]) for row in rows] == [
        pytest.approx(ends, abs=0.1) for ends in ((0, 25), (25, 50), (50, 75), (75, 100))
    ]
    for row, expected in zip(rows, (0.3, 0.3, -0.3, -0.3), strict=True):
        assert row["mean_residual"] == pytest.approx(expected, abs=4 * row["mean_residual_error"])
        assert row["mean_residual_error"] == pytest.approx(1 / math.sqrt(1000), rel=0.1)
        assert row["chi2"] == pytest.approx(1.0, abs=0.2)


def test_one_star_is_a_bin_without_a_spread() -> None:
    (row,) = held_out_by_distance(predictions(1, 1.0), np.array([120.0]))
    assert row["n"] == 1
    assert "mean_residual_error" not in row


def test_bins_of_distance_hold_equally_many_places() -> None:
    rng = np.random.default_rng(0)
    distance = rng.uniform(0.0, 100.0, 4000)
    true = rng.standard_normal(4000)
    mean = true + 0.5 * (1 + (distance > 50)) * rng.standard_normal(4000)
    inside = np.abs(true - mean) < 0.5
    rows = by_distance(distance, true, mean, np.full(4000, 0.5), inside)
    assert [row["n"] for row in rows] == [1000] * 4
    assert rows[0]["to_pc"] == rows[1]["from_pc"] == pytest.approx(25.0, abs=2.0)
    assert rows[0]["coverage68"] == pytest.approx(0.683, abs=0.05)
    assert rows[3]["coverage68"] == pytest.approx(0.383, abs=0.05)
    assert rows[0]["correlation"] > rows[3]["correlation"]


def test_stages_come_in_order_with_time_and_memory() -> None:
    assert Stage.FIT.reached_by(Stage.EVALUATE)
    assert not Stage.EXPORT.reached_by(Stage.EVALUATE)
    watch = Stopwatch()
    with watch.stage("first"):
        kept = np.ones(2**20)
    with pytest.raises(RuntimeError, match="stop"), watch.stage("second"):
        raise RuntimeError("stop")
    lines = watch.as_dict()["stages"]
    assert [line["stage"] for line in lines] == ["first", "second"]
    assert kept.nbytes < peak_memory() < 2**36


def test_a_gpu_tells_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    events: list[dict[str, Any]] = []
    watch = Stopwatch(on_stage=lambda **event: events.append(event), device=torch.device("cuda:0"))
    with watch.stage("fit"):
        pass
    (line,) = watch.as_dict()["stages"]
    assert line["peak_device_gib"] == 1.5
    assert events[-1]["peak_device_bytes"] == 3 * 2**29
    on_cpu = Stopwatch(device=torch.device("cpu"))
    on_cpu.add("fit", 1.0)
    assert "peak_device_gib" not in on_cpu.as_dict()["stages"][0]


def test_lines_of_progress_are_few(caplog: pytest.LogCaptureFixture) -> None:
    progress = LogProgress()
    with caplog.at_level(logging.INFO):
        for i in range(1001):
            progress("writing", i, 1000)
    assert len(caplog.records) < 3
    progress("writing", 0, 2)


def test_a_line_of_progress_has_all_that_goes_on_and_the_time_to_go(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = LogProgress()
    with caplog.at_level(logging.INFO):
        for draw in range(32):
            progress("curved draws", draw, 32)
            for step in range(20):
                progress("steps of CG", step, 300)
                now[0] += 0.5
            progress("steps of CG", 300, 300)
        progress("curved draws", 32, 32)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "curved draws 0 of 32, steps of CG 4 of 300: for 2 s so far"
    assert "curved draws 8 of 32, steps of CG 4 of 300: about 4 min to go" in lines
    # 320 s, a line every ten.
    assert 28 <= len(lines) <= 32


def test_what_is_silent_is_told_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = LogProgress()
    with caplog.at_level(logging.INFO), in_one_part(progress, "hyperparameters"):
        for _ in range(100):
            now[0] += 0.5
            progress.beat()
        progress(f"steps of learning{AT_MOST}", 0, 20)
        now[0] += 5.0
        progress(f"steps of learning{AT_MOST}", 2, 20)
        now[0] += 10.0
        progress(f"steps of learning{AT_MOST}", 5, 20)
        now[0] += 10.0
        progress.beat()
        progress(f"steps of learning{AT_MOST}", 20, 20)
    progress.beat()
    now[0] += 60.0
    progress.beat()
    assert [record.getMessage() for record in caplog.records] == [
        "hyperparameters: for 2 s so far",
        "hyperparameters: for 12 s so far",
        "hyperparameters: for 22 s so far",
        "hyperparameters: for 32 s so far",
        "hyperparameters: for 42 s so far",
        "hyperparameters, steps of learning 2 of at most 20: for 5 s so far",
        "hyperparameters, steps of learning 5 of at most 20: at most 45 s to go",
        "hyperparameters, steps of learning 5 of at most 20: at most 75 s to go",
    ]


def test_nothing_is_told_of_what_is_done_soon(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = LogProgress()
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            progress("solves", 0, 2)
            now[0] += 1.9
            progress("solves", 1, 2)
            progress("solves", 2, 2)
            now[0] += 1.0
            progress.beat()
    assert not caplog.records


def test_estimates_have_one_figure() -> None:
    assert rounded(0.0) == 0.0
    assert rounded(347.0) == 300.0
    assert rounded(0.0162) == pytest.approx(0.02)


def test_a_report_is_readable() -> None:
    sections: dict[str, dict[str, Any]] = {
        "hyperparameters": {"length": 60.0},
        "units": {"length": "pc"},
        "truth": {"n": 3, "by_distance": [{"from_pc": 0.0, "n": 1}, {"from_pc": 9.5, "rmse": 2.0}]},
        "empty": {},
    }
    check = Check("wrap_error", 0.5, 0.0, 0.15, "take a larger box")
    report = Report("abc", sections, (check,), (Picture("plots/slice.png", "A slice"),))
    text = report.as_markdown()
    for line in (
        "**A check failed.**",
        "**failed**: take a larger box",
        "![A slice](plots/slice.png)",
        "| length | 60 | pc |",
        "| From pc | N | Rmse |",
        "| 9.5 |  | 2 |",
        "sha256 `abc`",
    ):
        assert line in text
    assert "Empty" not in text
    assert "## Units" not in text
    assert report.as_dict()["figures"] == {"plots/slice.png": "A slice"}
    assert not report.passed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args([command, "--help"])
    assert exited.value.code == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith(f"  dustmap {command} ")


def test_help_and_configurations_wait_for_no_library() -> None:
    code = (
        "import sys; from dustmap.cli import main; main(['config', '--example'])\n"
        "slow = {'torch', 'astropy', 'matplotlib', 'zarr'} & set(sys.modules)\n"
        "sys.exit(str(slow) if slow else 0)"
    )
    called = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert called.returncode == 0, called.stderr
