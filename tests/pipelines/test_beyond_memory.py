"""The beyond_memory experiment, reduced."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.reproduce import MissingData, Request, Row
from pipelines.reproduce.beyond_memory import _sky as skies
from pipelines.reproduce.beyond_memory import experiment as beyond_memory
from pipelines.reproduce.beyond_memory._sky import Sky

BOX = (200.0, 200.0, 100.0)


def test_a_sky_is_the_same_whatever_its_parts_are_made_by(tmp_path: Path) -> None:
    sky = Sky(500, BOX, spacing=20.0, margin=0.2, files=2)
    first = [pq.read_table(path) for path in skies.write(sky, tmp_path / "one", processes=1)]
    again = [pq.read_table(path) for path in skies.write(sky, tmp_path / "two", processes=1)]
    assert [len(table) for table in first] == [250, 250]
    for one, two in zip(first, again, strict=True):
        assert one.equals(two)
    columns = {name: np.concatenate([t[name].to_numpy() for t in first]) for name in ("l", "b")}
    assert len(np.unique(columns["l"])) == 500
    quality = np.concatenate([table["quality"].to_numpy() for table in first])
    assert 0 < quality.sum() < 50


INGESTED: Row = {
    "part": "ingest",
    "stars": 7,
    "stars_per_s_and_core": 1.0,
    "peak_gib": 0.5,
    "seconds": 60.0,
}


def test_goals_of_what_was_measured_alone() -> None:
    reached = {goal.name: goal.reached for goal in beyond_memory.goals([INGESTED])}
    assert reached.pop("peak of ingest and pass, GiB") == 0.5
    assert reached.pop("minutes of the longest ingest or pass") == 1.0
    assert set(reached.values()) == {None}


@pytest.mark.slow
def test_rows_of_other_parts_are_kept() -> None:
    earlier = [INGESTED]
    request = Request(quick=True, data=Path(), only=("sharing",), earlier=earlier)
    outcome = beyond_memory.run(request)
    assert outcome.rows[0] == earlier[0]
    assert [row["part"] for row in outcome.rows[1:]] == 6 * ["sharing"]
    assert outcome.goals[0].reached == 0.5
    with pytest.raises(MissingData, match="no part is called 'nothing'"):
        beyond_memory.run(Request(quick=True, data=Path(), only=("nothing",)))


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = beyond_memory.run(Request(quick=True, data=Path()))
    parts = [row["part"] for row in outcome.rows]
    assert parts == ["ingest", *(3 * ["pass"]), *(6 * ["sharing"]), "fit"]
    assert all(goal.reached is not None for goal in outcome.goals)
    by_name = {goal.name: goal for goal in outcome.goals}
    assert by_name["difference of a pass from memory"].met
