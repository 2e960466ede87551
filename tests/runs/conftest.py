"""The sky of the tests of runs that end, go on and are fitted again."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def sky(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 stars in a box of 80 × 80 × 40 pc, and the CONFIG of the module in run.toml."""
    from tests.skies import plain_sky, write_plain_sky

    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(60, 2, (80.0, 80.0, 40.0)))
    (path / "run.toml").write_text(request.module.CONFIG)
    return path
