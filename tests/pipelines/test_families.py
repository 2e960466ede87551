"""What the experiment on families rests on, small."""

from pathlib import Path

import pytest
import torch

from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from pipelines.reproduce import Row, number
from pipelines.reproduce.families import _figure, _steps
from pipelines.reproduce.families import experiment as families
from pipelines.reproduce.families._scene import SEEN, STD, SURVEYED, Reference, Scene

SCENE = Scene((10, 8), 30)


def test_exact_deviations_fall_where_stars_have_been() -> None:
    reference = Reference.of(SCENE)
    x = reference.places.x[:, 0]
    surveyed = x <= SCENE.half[0] * (2 * SURVEYED - 1)
    assert float(reference.std_places[surveyed].mean()) < float(
        reference.std_places[~surveyed].mean()
    )
    assert bool((reference.std_places < STD).all())
    assert torch.equal(reference.seen, reference.std_places <= SEEN * STD)
    same = dict(reference.ratios(reference.std_places, 2.0 * reference.std_rays))
    assert same["places_median"] == pytest.approx(1.0)
    assert same["rays_p90"] == pytest.approx(2.0)


def test_the_full_family_on_close_nodes_is_the_exact_posterior() -> None:
    reference = Reference.of(Scene((13,), 20, ratio=6.0))
    phi = CholeskyFeatures(reference.scene.model().kernel, reference.scene.grid)
    (row,) = families._rows_of(reference, "cholesky", phi, {"full": FullRankFamily(13)})
    for end in ("places_median", "places_p90", "rays_median", "rays_p90"):
        assert number(row, end) == pytest.approx(1.0, abs=0.02)


def test_a_scene_has_a_row_of_every_family_and_a_picture() -> None:
    rows = families.families_of(SCENE)
    kinds = [str(row["family"]).split()[0] for row in rows]
    assert set(kinds) == {"exact", "auto", "full", "mean-field", "block", "low-rank"}
    automatic = next(row for row in rows if row["family"] == "auto")
    assert (automatic["whitening"], automatic["chosen"]) == ("cholesky", "full")
    assert len(_figure.draw(rows).axes) == 2
    assert [goal.reached for goal in families.goals(rows, quick=True)] == [None] * 10


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    rows: list[Row] = list(_steps.measured(_steps.QUICK, tmp_path))
    assert [row["ranks"] for row in rows] == [1, 2]
    for row in rows:
        assert number(row, "elbo_per_star_last") > number(row, "elbo_per_star_first")
        assert number(row, "mean_apart") < 1e-3
