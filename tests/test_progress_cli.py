"""What a terminal shows of long computations, and how often it is looked at."""

import io
import sys
import threading

import pytest

from dustmap.cli import _console


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Put in the place of stderr a terminal on which bars are shown at once."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(_console, "DELAY", 0.0)
    return shown


def test_a_bar_has_parts_and_what_has_none_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with _console.progress() as told:
        told("posterior", 0, 1)
        told("draws", 0, 4)
        told("draws", 2, 4)
        assert isinstance(told, _console._Bars)
        told.beat()
        assert "posterior: 00:0" in shown.getvalue()
        assert "posterior:   0%" not in shown.getvalue()
        assert "draws:  50%" in shown.getvalue()
        told("draws", 4, 4)
        told("posterior", 1, 1)
        assert not told._bars


def failing() -> None:
    with _console.progress() as told:
        told("draws", 1, 4)
        raise ValueError("no factor")


def test_a_computation_that_fails_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with pytest.raises(ValueError, match="no factor"):
        failing()
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    assert shown.getvalue().endswith("\r")


def test_silent_parts_are_looked_at_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console, "BEAT", 0.001)
    beats = threading.Semaphore(0)
    with _console._beating(beats.release):
        for _ in range(3):
            assert beats.acquire(timeout=60.0)
    assert "progress" not in [thread.name for thread in threading.enumerate()]
