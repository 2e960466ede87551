"""What the fuzz tests share: one set of valid inputs, a place to break copies of them, a watch."""

from pathlib import Path

import pytest

from tests.fuzz.oracle import Watch
from tests.fuzz.samples import make_samples


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid input of every kind; tests copy what they break."""
    folder = tmp_path_factory.mktemp("fuzz") / "samples"
    make_samples(folder)
    return folder


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch().install()
