"""How long a fit is said to take: timed with the rows that it will have, on its own device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from astropy.table import Table

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.engines import InducingEngine, Problem
from dustmap.gp import Batch, features
from dustmap.gp.features import _dense_covariance
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.linalg import _toeplitz
from dustmap.runs import Stage, execute_run, prepare
from dustmap.runs import _machine as timing
from dustmap.runs.stars import _duration
from dustmap.sky.simulation import SkyModel, simulate, write_sky
from tests.cuda.pretended import pretended_gpu


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seconds") / "sky.fits"
    model = SkyModel(size=(200.0, 200.0, 120.0), spacing=20.0)
    write_sky(path, simulate(model, 150, 1), True)
    return path


def seconds(catalog: Path, *overrides: str) -> float:
    given = {
        "data": {"catalog": str(catalog), "refit": False},
        "grid": {"size": [200, 200, 120], "spacing": 20},
        "model": {"kernel": "matern32"},
        "fit": {"samples": 4},
    }
    return prepare(configuration.from_mapping(given, overrides)).seconds()


def test_beams_are_timed_where_the_fit_has_them(
    catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []

    def seen(rows: torch.Tensor, vectors: int) -> float:
        assert vectors > 1
        shapes.append((rows.shape[0], rows.shape[1]))
        return 1.0

    monkeypatch.setattr(_duration, "_product_seconds", seen)
    monkeypatch.setattr(_duration, "_prior_seconds", lambda config, device: 1.0)
    seconds(catalog)
    own, one = shapes
    nodes = own[1]
    assert one == (1, nodes)
    shapes.clear()
    seconds(catalog, "fit.beams=4")
    rows, expansion = shapes
    assert rows[0] == own[0]
    assert rows[1] == expansion[0] > expansion[1] == nodes


@pytest.mark.parametrize("engine", ["exact", "hip"])
def test_covariances_are_timed_by_few_rays_and_counted_where_something_is_learned(
    catalog: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rays of uncertain distances have parts whose covariances go by the square; learning takes
    rays to the mean distance."""
    parts, rows = list[int](), list[int]()

    def seen(config: Config, rays: LineIntegrals) -> float:
        parts.append(rays.weights.shape[1])
        rows.append(len(rays))
        return once(config, rays)

    once = _duration._pair_seconds
    monkeypatch.setattr(_duration, "_pair_seconds", seen)
    monkeypatch.setattr(timing, "seconds_per_operation", lambda device: 0.0)
    monkeypatch.setattr(_duration, "rounded", float)
    pairs: list[int] = []

    def counted(work: Callable[[], Any], device: torch.device) -> float:
        pairs.append(work().numel())
        return 1.0

    monkeypatch.setattr(timing, "measured_seconds", counted)
    monkeypatch.setattr(_duration, "inducing_seconds", lambda config, data: 0.0)
    table = Table.read(catalog)
    table["distance_error"] = 0.1 * table["distance_pc"]
    table.write(catalog.with_name("uncertain.fits"), overwrite=True)
    given = (catalog.with_name("uncertain.fits"), f"fit.engine={engine}", "data.holdout=0.2")
    held, learned = seconds(*given, "model.learn=[]"), seconds(*given)
    weighted = {"exact": True, "hip": False}[engine]
    assert (max(parts) > 1) == weighted
    assert 1 in parts
    assert max(pairs) <= _duration.TRIAL_RAYS**2
    assert min(pairs) < 1000 or not weighted
    # Every trial takes a second.
    rounds = 1.0 + _duration._ROUND_SHARE["gaussian"]
    conditioned = rounds * rows[-1] ** 2 / min(pairs) if weighted else 0.0
    assert held == pytest.approx(_duration._OVERHEAD + conditioned)
    assert learned > held + 0.8 * _duration.DENSE_COVARIANCES


def test_rows_of_inducing_points_are_counted_by_passes_and_steps_by_epochs(
    catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that takes a second, and a step that takes ten, of 120 stars in parts of 50."""

    def seen(work: Callable[[], Any], device: torch.device) -> float:
        made = work()
        return float(made.phi.shape[0]) if isinstance(made, features.Features) else 10.0

    monkeypatch.setattr(timing, "measured_seconds", seen)
    monkeypatch.setattr(_duration, "estimated_seconds", lambda config, rays: 0.0)
    monkeypatch.setattr(_duration, "rounded", lambda total: total - _duration._OVERHEAD)
    given = "fit.engine=hip", "model.learn=[]", "data.holdout=0.2", "fit.distance_rounds=0"
    assert seconds(catalog, *given) == pytest.approx(120 + 10)
    many = (*given, "fit.epochs=7", "fit.batch=50")
    assert seconds(catalog, *many) == pytest.approx(120 + 7 * 3 * 10)
    prepared = InducingEngine.prepared

    def without_room(engine: InducingEngine, problem: Problem) -> Any:
        model, plan = prepared(engine, problem)
        return model, replace(plan, max_memory=0)

    monkeypatch.setattr(InducingEngine, "prepared", without_room)
    assert seconds(catalog, *many) == pytest.approx(10 * 120 + 7 * 3 * 10)


def test_keys_without_effect_are_named_before_a_run(
    catalog: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seconds(catalog, "fit.whitening=ciq")
    assert 'fit.whitening is for fit.engine = "hip": it has no effect' in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "overrides", [("fit.beams=4",), ("model.density=gaussian",), ("fit.engine=exact",)]
)
def test_a_gpu_is_timed_on_the_gpu(
    catalog: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: set[str] = set()
    timed = timing.measured_seconds

    def watched(work: Callable[[], torch.Tensor], device: torch.device) -> float:
        devices.update((device.type, work().device.type))
        return timed(work, device)

    monkeypatch.setattr(timing, "measured_seconds", watched)
    monkeypatch.setattr(timing, "TRIAL_SIZE", {"cpu": 20, "cuda": 20})
    with pretended_gpu():
        waited: list[object] = []
        monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
        assert seconds(catalog, "compute.device=cuda", *overrides) >= 0.0
    assert devices == {"cuda"}
    assert waited
    monkeypatch.undo()


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Transforms back to the grid, one for each product with a field, and covariances as matrices,
    as they are made."""
    counted: Counter[str] = Counter()
    transform, covariance = _toeplitz.cropped_irfftn, _dense_covariance.dense_covariance

    def transformed(spectrum: torch.Tensor, *shapes: tuple[int, ...]) -> torch.Tensor:
        counted["products"] += spectrum.shape[:-3].numel()
        return transform(spectrum, *shapes)

    def covariances(*arguments: Any) -> torch.Tensor:
        counted["covariances"] += 1
        return covariance(*arguments)

    monkeypatch.setattr(_toeplitz, "cropped_irfftn", transformed)
    for module in (_dense_covariance, features):
        monkeypatch.setattr(module, "dense_covariance", covariances)
    return counted


def fitted(folder: Path, stars: int, learn: bool, density: str) -> Config:
    """The configuration of a fit that has been made."""
    model = SkyModel(size=(400.0, 400.0, 240.0), spacing=20.0)
    write_sky(folder / "sky.fits", simulate(model, stars, 1), True)
    tables = {
        "data": {"catalog": str(folder / "sky.fits")},
        "grid": {"size": [400, 400, 240], "spacing": 20},
        "model": {"kernel": "matern32", "density": density, **({} if learn else {"learn": []})},
    }
    config = configuration.from_mapping(tables)
    execute_run(prepare(config), folder / "run", config, False, Stage.FIT)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("stars", [1000, 3000])
@pytest.mark.parametrize("learn", [True, False], ids=["learned", "held"])
def test_fits_need_as_many_products_as_the_estimate_says(
    stars: int, learn: bool, tmp_path: Path, count: Counter[str]
) -> None:
    """Within a factor of two."""
    expected = _duration.expected_products(fitted(tmp_path, stars, learn, "lognormal"))
    assert 0.5 * expected <= count["products"] <= 2.0 * expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stars", "learn", "factor"),
    [(1000, False, 1.0), (3000, False, 1.0), (1000, True, 2.5), (2000, True, 2.5)],
)
def test_fits_by_matrices_need_as_many_as_the_estimate_says(
    stars: int, learn: bool, factor: float, tmp_path: Path, count: Counter[str]
) -> None:
    """Within a factor of 2.5 where they learn, by the turns of kernel and noise."""
    config = fitted(tmp_path, stars, learn, "gaussian")
    assert _duration.takes_matrices(config, 9 * stars // 10, 21 * 21 * 13)
    expected = _duration.expected_covariances(config, 9 * stars // 10)
    assert expected / factor <= count["covariances"] <= factor * expected


@pytest.mark.parametrize(("error", "share"), [(0.1, 1.0), (1.0, 1 / 18**0.5), (100.0, 60**-0.5)])
def test_data_that_say_little_take_fewer_steps(error: float, share: float) -> None:
    """As the root of their (y/σ)², between bounds."""
    y = torch.ones(5, dtype=torch.float64)
    points = PointValues(torch.zeros(5, 3, dtype=torch.float64))
    batch = Batch(points, y, torch.full_like(y, error**2))
    assert _duration._weakness(batch) == pytest.approx(share)
