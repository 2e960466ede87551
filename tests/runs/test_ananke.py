"""pipelines/ananke.toml on a table of its format: kpc, a system of its own, bare rows predicted."""

import json
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap import config
from dustmap.cli import CHECK_FAILED, DONE, main

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
DENSITY = 7e-5  # mag/pc, everywhere


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_pipeline_reads(path: Path) -> None:
    assert config.load(path).data.catalog


def table(n: int, seed: int) -> Table:
    """Stars within 50 pc behind uniform dust, as the sample has them."""
    rng = np.random.default_rng(seed)
    xyz = rng.uniform(-0.05, 0.05, (n, 3)) * [1.0, 1.0, 0.6]
    distance = np.linalg.norm(xyz, axis=1)
    return Table(
        {
            "id": np.arange(n) + 1,
            **dict(zip("xyz", xyz.T, strict=True)),
            "distance": distance,
            "extinction": 1e3 * DENSITY * distance + 2e-4 * rng.standard_normal(n),
            "extinction_error": np.full(n, 2e-4),
        }
    )


def test_bare_rows_are_predicted_in_the_units_of_the_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(150, 0).write(tmp_path / "train.csv")
    unseen = table(40, 1)
    bare = unseen["id", "x", "y", "z", "distance"]
    bare.write(tmp_path / "bare.csv")
    settings = [
        f"data.catalog={tmp_path / 'train.csv'}",
        "grid.size=[120, 120, 80]",
        "model.learn=['mean']",
        "model.std=3e-5",
        "fit.samples=32",
        "export.figures=[]",
        "data.refit=false",
    ]
    run = ["run", str(PIPELINES / "ananke.toml"), "--output", str(tmp_path / "run")]
    assert main([*run, *(w for s in settings for w in ("--set", s))]) in (DONE, CHECK_FAILED)
    rows = ["--catalog", str(tmp_path / "bare.csv"), "--schema", "ananke"]
    output = tmp_path / "predicted.csv"
    assert main(["predict", str(tmp_path / "run"), *rows, "--output", str(output)]) == DONE
    found = Table.read(output)
    assert found.colnames[:5] == bare.colnames
    assert list(found["id"]) == list(unseen["id"])
    error = found["extinction_mean"] - 1e3 * DENSITY * unseen["distance"]
    assert float(np.sqrt(np.mean(error**2))) < 1e-4
    assert float(np.mean((error / found["extinction_std"]) ** 2)) < 3.0
    np.testing.assert_allclose(found["density_mean"], DENSITY, rtol=0.5)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["data"]["system"] == "custom:ananke"
    assert "quality_proxies" not in report or report["quality_proxies"] == {}
    capsys.readouterr()
