"""Runs that many tests read: one of a kind for each session, in a folder with its sky.

A test that changes a run works on a copy (`shutil.copytree`). Fixtures import what they need, for
the process that hands tests to others needs none of it.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Files that take the most seconds, the longest first.
LONGEST = (
    "test_regression.py",
    "distributed/test_ranks.py",
    "test_regression_cli.py",
    "runs/test_resume.py",
    "runs/test_hip.py",
    "contracts/test_engines.py",
    "runs/test_engines.py",
    "sky/maps/test_commands.py",
    "contracts/test_features.py",
    "test_regression_kernel.py",
    "inference/test_equivalence.py",
    "inference/test_checkpoints_evidence.py",
    "inference/test_variational.py",
    "runs/test_stars.py",
    "runs/test_zero_points.py",
    "test_plot_cli.py",
    "inference/test_seen_nodes.py",
    "test_start.py",
    "test_regression_global.py",
    "runs/test_group_scales.py",
    "inference/test_mgvi_curves.py",
    "runs/test_refit.py",
    "runs/test_global.py",
    "test_regression_student_t.py",
    "inference/test_global_solve.py",
    "inference/test_mgvi_start.py",
    "runs/test_unresolved.py",
    "test_regression_svgp.py",
    "test_cli.py",
    "inference/test_svi_likelihoods.py",
    "runs/test_resume_cli.py",
    "test_bad_input.py",
    "distributed/test_export.py",
    "runs/test_star_kernel.py",
    "test_regression_means.py",
    "test_optimised.py",
    "sky/figures/test_sky_slices.py",
    "test_regression_models.py",
    "test_regression_memory.py",
    "test_regression_sgpr.py",
)
#: The number of places of tables of residual covariances.
_STEPS = "dustmap.gp.features._stencil._LATTICE_STEPS"
#: Dots per inch of pictures.
_DPI = "dustmap.sky.figures._style._DPI"
#: Where tests look at their accuracy, at numbers of an earlier version or of another process.
ACCURATE = (
    "gp/",
    "pipelines/",
    "contracts/test_features.py",
    "distributed/test_run.py",
    "inference/test_equivalence.py",
    "inference/test_shared_residuals.py",
    "inference/test_unresolved.py",
    "runs/test_earlier_versions.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order below, where xdist would begin with the files of many tests.

    Name a number of threads, where none is: runs that tests compare are of the same one.
    """
    config.option.loadscopereorder = False
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: none is left to one process while others have nothing to do."""
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Take all that is imported by now for permanent: a collection of garbage looks at what a test
    made, not at the objects of torch, scipy and 7,000 tests, which takes it most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def small_tables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tables of residual covariances at few places, which are quick, but where their accuracy is
    looked at: what all else asserts is far coarser than these tables, and compares what comes from
    the same ones. No test compares them with those of another process."""
    if request.path.relative_to(HERE).as_posix().startswith(ACCURATE):
        yield
        return
    from tests.distributed.cases import SMALL_TABLES

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_STEPS, SMALL_TABLES)
        yield


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> Iterator[None]:
    """Pictures of few dots, which are quick: no test counts them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_DPI, 60)
        yield


@pytest.fixture
def few_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic engine asks the kernel from `FEW` rows on, in place of 2,000."""
    from tests.regression_cases import FEW

    monkeypatch.setattr("dustmap.engines._automatic._QUICK", FEW)


@pytest.fixture(scope="session")
def positive_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log-normal density from 60 stars, 15 of them held out, with four samples.

    The folder has sky.fits, truth.zarr, run.toml and run/, whose box is 200 × 240 × 160 pc.
    """
    from tests.skies import plain_sky, write_plain_sky

    folder = tmp_path_factory.mktemp("positive")
    write_plain_sky(folder, plain_sky(60, 3, (200.0, 240.0, 160.0)))
    (folder / "run.toml").write_text(
        "data = {catalog = 'sky.fits', holdout = 0.25}\n"
        "grid = {size = [200, 240, 160], spacing = 40}\n"
        "model = {length = 60, std = 0.8, learn = []}\n"
        "fit = {samples = 4}\n"
        "export = {formats = ['zarr'], figures = []}\n"
    )
    _finish(folder)
    return folder


@pytest.fixture(scope="session")
def exact_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gaussian density by the exact engine, in seconds from start to end, and a star store.

    The folder has sky.fits, truth.zarr, stars.zarr, run.toml and run/ with maps in both formats
    and a slice.
    """
    from dustmap.cli import DONE, main
    from tests.skies import plain_sky, write_plain_sky

    folder = tmp_path_factory.mktemp("exact")
    write_plain_sky(folder, plain_sky(60, 2, (200.0, 200.0, 120.0)))
    (folder / "run.toml").write_text(
        "data = {catalog = 'sky.fits', holdout = 0.2}\n"
        "grid = {size = [200, 200, 120], spacing = 40}\n"
        "model = {length = 60, std = 0.002, learn = []}\n"
        "fit = {engine = 'exact'}\n"
        "export = {figures = ['slice']}\n"
    )
    _finish(folder)
    store = ["--output", str(folder / "stars.zarr")]
    assert main(["ingest", str(folder / "sky.fits"), *store]) == DONE
    return folder


def _finish(folder: Path) -> None:
    from dustmap.cli import CHECK_FAILED, DONE, main

    run = ["run", str(folder / "run.toml"), "--output", str(folder / "run")]
    assert main(run) in (DONE, CHECK_FAILED)
