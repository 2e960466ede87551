"""What fits claim (scales of noise, lengths, standard deviations, memory) against references that
share no code with them: dense algebra, quadrature, Gibbs sampling, brute force."""

import functools
import logging

from pipelines.reproduce._experiment import Outcome, Request, Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.calibration import (
    _distances,
    _figure,
    _learning,
    _regression,
    _student_t,
)
from pipelines.reproduce.calibration._case import Claim, Part

_log = logging.getLogger(__name__)

PARTS: dict[str, Part] = {
    "student-t": _student_t.claims,
    "regression": _regression.claims,
    "learning": _learning.claims,
    "distances": _distances.claims,
}


def run(request: Request) -> Outcome:
    """All parts, or those of `--only`; rows of the others are kept."""
    parts = request.wanted(tuple(PARTS))
    rows: list[Row] = [row for row in request.earlier if row["part"] not in parts]
    for part in parts:
        claims, seconds = stopwatch(functools.partial(PARTS[part], request.quick))
        _log.info("%s: %d claims in %.0f s", part, len(claims), seconds)
        rows += [{"part": part, **claim.row(), "part_seconds": seconds} for claim in claims]
    claims = [Claim.of(row) for row in rows]
    goals = [claim.goal() for claim in claims]
    return Outcome({"before": "release 0.1"}, rows, goals, _figure.draw(claims))
