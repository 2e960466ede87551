"""What version 0.1 has written still opens, and answers what it answered then."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dustmap import HIPGPClassifier, HIPGPRegressor
from dustmap.runs import open_run, open_star_map, regression_at

ARCHIVE = Path(__file__).parent / "data" / "runs_0_1.tar.xz"
#: float32 maps are answered to their rounding; that of hip was on a torus, whose kernel is wrapped,
#: and is computed again on the nodes alone: standard deviations 0.2 % from it.
RTOL = {"lognormal": 1e-5, "global": 1e-4, "exact": 1e-6, "hip": 2e-3}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every engine on 60 simulated stars, a regression, and saved estimators."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        # `filter=` came with Python 3.11.4; before, this says nothing.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / "runs_0_1"


@pytest.fixture(scope="module")
def expected(earlier: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((earlier / "expected.json").read_text())
    return content


@pytest.mark.parametrize("engine", RTOL)
def test_a_map_of_every_engine(engine: str, earlier: Path, expected: dict[str, Any]) -> None:
    opened = open_star_map(earlier / engine)
    for place, values in zip(expected["places"], expected["runs"][engine], strict=True):
        found = dict(opened.query(*place))
        if engine == "lognormal":
            # The deviation of four samples then, now that of a log-normal distribution.
            assert found.pop("density_std") > values["density_std"]
            # That of an integral has no mean of four that would be estimated.
            assert found.pop("extinction_std") < values["extinction_std"]
            stds = "density_std", "extinction_std"
            values = {name: value for name, value in values.items() if name not in stds}
        assert found == pytest.approx(values, rel=RTOL[engine])


def test_a_regression(earlier: Path, expected: dict[str, Any]) -> None:
    opened = regression_at(earlier / "regression")
    assert opened is not None
    assert type(opened) is type(open_run(earlier / "regression"))
    check(opened.model, expected["X"], expected["runs"]["regression"])


@pytest.mark.parametrize("engine", ["exact", "hip", "global", "svgp", "sgpr", "student"])
def test_a_regressor_of_every_engine(engine: str, earlier: Path, expected: dict[str, Any]) -> None:
    model = HIPGPRegressor.load(earlier / f"estimator_{engine}")
    check(model, expected["X"], expected["estimators"][engine])


def test_a_classifier(earlier: Path, expected: dict[str, Any]) -> None:
    found = HIPGPClassifier.load(earlier / "classifier").predict_proba(np.array(expected["X"]))
    np.testing.assert_allclose(found, expected["estimators"]["classifier"], rtol=1e-9)


def check(model: HIPGPRegressor, X: list[list[float]], values: dict[str, list[float]]) -> None:
    """Places beyond the nodes of "global" had images of the opposite face, and have none now."""
    places = np.array(X)
    mean, std = model.predict(places, return_std=True)
    wanted, width = np.array(values["mean"]), np.array(values["std"])
    inside = np.ones(len(places), dtype=bool)
    if model.engine_ == "global":
        assert model.grid_ is not None
        inside = model.grid_.contains(torch.from_numpy(places)).numpy()
        assert inside.any()
    np.testing.assert_allclose(mean[inside], wanted[inside], rtol=1e-8)
    np.testing.assert_allclose(std[inside], width[inside], rtol=1e-8)
    np.testing.assert_array_less(np.abs(mean - wanted), 0.1 * width)
    np.testing.assert_allclose(std, width, rtol=0.05)
