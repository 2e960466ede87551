"""What a run reads of catalogs beside the stars themselves."""

from dataclasses import replace
from pathlib import Path

from dustmap.config import DataConfig
from dustmap.runs.stars._input import read_stars, read_truth
from dustmap.sky.catalogs import card_named
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
    stars = read_stars(data, card, system).stars
    assert stars.source_id.tolist() == [1, 3]
    truth = read_truth(data, card, stars, "true_av")
    assert truth.tolist() == [0.11, 0.33]
