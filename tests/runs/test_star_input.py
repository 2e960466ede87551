"""What a run reads of catalogs beside the stars themselves."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import main
from dustmap.config import DataConfig, load
from dustmap.errors import UserError
from dustmap.runs.stars._input import (
    UNKNOWN,
    as_ingested,
    card_for,
    places_of_map,
    read_stars,
    read_truth,
    renumbered,
    system_of_others,
)
from dustmap.sky.catalogs import card_named, ingest
from dustmap.sky.catalogs._rules import CardTable, parse_cut
from dustmap.sky.systems import system_named


def test_noise_free_values_pass_the_cuts_that_the_stars_passed(tmp_path: Path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text(
        "source_id,l,b,distance_pc,av,e_av,true_av\n1,0,0,10,0.1,0.2,0.11\n2,0,0,20,0.2,0.9,0.22\n"
        "3,0,0,30,0.3,0.1,0.33\n"
    )
    cut = parse_cut(CardTable({"column": "extinction_error", "below": 0.5}, "here"), {})
    card = replace(card_named("generic"), presets={"default": (cut,)})
    data, system = DataConfig(catalog=(str(path),)), system_named("A_V")
    read = read_stars(data, card, system)
    assert read.stars.source_id.tolist() == [1, 3]
    truth = read_truth(data, card, read, "true_av")
    assert truth.tolist() == [0.11, 0.33]
    percentiles = tmp_path / "percentiles.csv"
    percentiles.write_text(
        "source_id,l,b,distance_pc,av16,av50,av84,true_av\n1,0,0,10,0.0,0.1,0.2,0.11\n"
    )
    data, card = DataConfig(catalog=(str(percentiles),)), card_named("generic")
    read = read_stars(data, card, system)
    assert read_truth(data, card, read, "true_av").tolist() == [0.11]


def test_other_catalogs_have_the_zero_point_that_a_store_was_ingested_with(tmp_path: Path) -> None:
    """Parallaxes that are 1 mas too low: evaluate and queries of the run know it."""
    rng, n = np.random.default_rng(0), 60
    table = Table({"l": rng.uniform(0, 360, n), "b": rng.uniform(-60, 60, n)})
    table["parallax"] = 1000.0 / rng.uniform(40.0, 100.0, n) - 1.0
    table["parallax_error"], table["extinction_error"] = 0.05, 0.05
    table["extinction"] = rng.uniform(0.0, 0.2, n)
    table.write(tmp_path / "sky.csv")
    store = tmp_path / "sky.zarr"
    how = {"system": system_named("A_V"), "parallax_zero_point": -1.0}
    ingest(tmp_path / "sky.csv", "generic", store, **how)  # type: ignore[arg-type]
    settings = (
        *("grid.size=[200, 200, 200]", "grid.spacing=40", "model.density=gaussian"),
        *("model.learn=[]", "model.kernel=matern32", "export.formats=[]", "export.figures=[]"),
    )
    (tmp_path / "run.toml").write_text(f'[data]\ncatalog = "{store}"\n')
    run = tmp_path / "run"
    command = ["run", str(tmp_path / "run.toml"), "--output", str(run)]
    assert main([*command, *(word for each in settings for word in ("--set", each))]) in (0, 3)
    places = places_of_map(run, tmp_path / "sky.csv", "generic")
    wanted = 1000.0 / (np.asarray(table["parallax"]) + 1.0)
    np.testing.assert_allclose(places.distances.median, wanted, rtol=0.02)
    exact = Table({"l": table["l"], "b": table["b"], "distance": wanted})
    exact.write(tmp_path / "exact.csv")
    found = []
    for name in ("sky", "exact"):
        output = tmp_path / f"{name}_predicted.csv"
        paths = ["--catalog", str(tmp_path / f"{name}.csv"), "--output", str(output)]
        assert main(["predict", str(run), *paths]) == 0
        found.append(np.ma.filled(np.ma.asarray(Table.read(output)["extinction_mean"]), np.nan))
    near = wanted < 80.0  # in the box by either; without the zero point 4 to 9 % farther
    np.testing.assert_allclose(found[0][near], found[1][near], rtol=0.02)


def test_what_a_store_was_ingested_with_is_for_stores_alone(tmp_path: Path) -> None:
    said = {"parallax_zero_point_mas": -0.04, "invalid_rows": "drop"}
    (tmp_path / "run.toml").write_text('[data]\ncatalog = "sky.zarr"\n')
    of_store = load(tmp_path / "run.toml")
    data = as_ingested(of_store, said).data
    assert (data.parallax_zero_point, data.invalid) == (-0.04, "drop")
    of_catalog = replace(of_store, data=replace(of_store.data, catalog=("sky.csv",)))
    assert as_ingested(of_catalog, said) == of_catalog


def test_the_card_of_a_run_is_not_guessed(tmp_path: Path) -> None:
    path, card = tmp_path / "sky.csv", tmp_path / "mine.toml"
    path.write_text("l,b,distance,extinction,extinction_error\n0,0,10,0.1,0.1\n")
    card.write_text('inherits = "generic"\n[columns.distance]\nnames = ["d"]\nunit = "kpc"\n')
    data = DataConfig(schema=str(card))
    assert card_for(data, path, "", False).name == "generic"  # the catalog has no such column
    card.unlink()
    with pytest.raises(UserError, match=r"the card of the run: name another by --schema"):
        card_for(data, path, "", False)


def test_groups_that_a_run_does_not_know_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert renumbered(["1", "2.0"], ["1.0", "2"]).tolist() == [0, 1]
        assert not caplog.records
        assert renumbered(["1", "new", ""], ["1", "2"]).tolist() == [0, UNKNOWN, UNKNOWN]
    assert "such as 'new', have no zero points: it has '1', '2'" in caplog.text


@pytest.mark.parametrize(
    ("catalog", "files", "name"),
    [
        ("mine.zarr", ("E(B-V)",), "E(B-V)"),
        ("mine.zarr", ("E(B-V)", "A_V"), "A_V"),
        ("mine.zarr", (), "A_V"),
        ("mine.csv", ("E(B-V)",), "A_V"),
    ],
)
def test_catalogs_without_a_label_are_in_the_system_of_what_was_ingested(
    catalog: str, files: tuple[str, ...], name: str
) -> None:
    """data.system is that of the run, to which the store was converted."""
    data = DataConfig(catalog=(catalog,), system="A_V")
    provenance = {"files": [{"extinction_system": each} for each in files]}
    found = system_of_others(data, provenance)
    assert found is not None
    assert found.name == name
    named = system_of_others(data, provenance, "A_G")
    assert named is not None
    assert named.name == "A_G"
