"""Seconds to whiten 200 observations: k_n = Rᵀ K_uu⁻¹ k_un.

HIP-GP paper, section 5.2, table 1 and C.2, tables S1 to S3. Evenly spaced inducing points on
[0, 2], ℓ = 2 / M (one cell), variance 0.1, four kernels, observations at random points. Methods:

    hip        HIP-GP: everything from the kernel and the points to k_n and the residual variances
    torus      every point of the padded torus as inducing point: one FFT pair, no solve; likewise
    cholesky   factorisation of K_uu and triangular solve; evaluating K_uu and K_fu is left out
    ciq        contour integral quadrature (linear_operator, Toeplitz products), K_fu left out
    fft pair   rfft and irfft of 200 rows of the torus' length, in batches that stay in cache

Accuracy is judged in float64 against a banded Cholesky factor, on the first observations:
`explained_error` is the largest relative error of k_nᵀ k_n = k_unᵀ K_uu⁻¹ k_un (the torus
conditions on more points: none), `root_error` the largest ‖R k_n − k_un‖ / ‖k_un‖ with the exact
R of the method (CIQ's is a dense matrix: none), `residual` the largest true residual of PCG.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._timing import Timing, time_call, time_together
from pipelines.reproduce.whitening import _figure as figure
from pipelines.reproduce.whitening import _methods as methods
from pipelines.reproduce.whitening._methods import Problem
from pipelines.reproduce.whitening._reference import Judge

log = logging.getLogger(__name__)

SEED = 0
OBSERVATIONS = 200
SIZES = (1_000, 10_000, 100_000, 1_000_000)
#: Observations whose accuracy is judged.
JUDGED = 20
#: Largest M of a dense matrix.
DENSE = 10_000
#: Observations given to CIQ by M; its time is proportional to their number.
CIQ_OBSERVATIONS = {1_000: 200, 10_000: 200, 100_000: 20, 1_000_000: 2}
ERRORS = {"explained_error", "root_error"}
#: The kernel of the paper's table 1, measured most carefully and also in float64.
CALIBRATING = "Matérn-5/2"
DOUBLE_OBSERVATIONS = {1_000_000: 50}


@final
@dataclass(frozen=True)
class Plan:
    """What is measured on one problem.

    repeats: of hip, torus and the bare pair, timed in turns; peer_repeats: of the others.
    with_ciq: whether CIQ takes part.
    """

    problem: Problem
    repeats: int
    peer_repeats: int
    with_ciq: bool


def run(request: Request) -> Outcome:
    """The tables in float32, and float64 rows of one kernel; quick stays at M = 1,000."""
    rows: list[Row] = []
    with torch.no_grad():
        for plan in plans(request.quick):
            rows += measure(plan)
    settings: Row = {
        "observations": OBSERVATIONS,
        "domain": [0.0, methods.EXTENT],
        "lengthscale": "2 / M",
        "variance": methods.VARIANCE,
        "padding": methods.PADDING,
        "rtol": {"float32": 1e-6, "float64": 1e-10},
        "ciq": {"Q": methods.QUADRATURE_POINTS, "minres_tolerance": methods.MINRES_TOLERANCE},
        "included": "hip, torus: all from the kernel and the points; cholesky, ciq: no covariances",
        "judged_observations": JUDGED,
        "seed": SEED,
        "scaled_to": "all observations: rows with fewer in `timed` are extrapolated in proportion",
    }
    return Outcome(settings, rows, goals(rows, request.quick), figure.draw(rows))


def plans(quick: bool) -> Iterator[Plan]:
    """Fewer repeats where one run takes seconds."""
    for m in SIZES[:1] if quick else SIZES:
        count = 20 if quick else OBSERVATIONS
        for name in methods.KERNELS:
            main = name == CALIBRATING
            problem = Problem.drawn(name, m, count, torch.float32, SEED)
            repeats = 5 if m <= 100_000 else 3 if main else 2
            peer_repeats = 5 if m <= 1_000 else 3 if main and m <= DENSE else 1
            yield Plan(problem, repeats, peer_repeats, with_ciq=main or m <= 100_000)
        double = Problem.drawn(
            CALIBRATING, m, DOUBLE_OBSERVATIONS.get(m, count), torch.float64, SEED
        )
        yield Plan(double, 5 if m <= 1_000 else 3 if m <= 100_000 else 1, 1, m <= DENSE)


def measure(plan: Plan) -> Iterator[Row]:
    """One row per method: time and accuracy."""
    problem = plan.problem
    judge = Judge.of(problem.of(JUDGED))
    own: dict[str, Row] = {"fft pair": {}, "hip": judge.hip(), "torus": judge.torus()}
    for method, timing in own_times(plan).items():
        yield row_of(problem, method, len(problem.x), timing, own[method])
    if problem.M <= DENSE:
        K_uu, K_fu = methods.dense_covariance(problem.lags()), problem.cross()
        timing, phi = peer_time(plan, lambda: methods.cholesky(K_uu, K_fu))
        yield row_of(problem, "cholesky", len(phi), timing, judge.cholesky(phi[:JUDGED]))
        del K_uu
    if plan.with_ciq and methods.has_ciq():
        few = problem.of(CIQ_OBSERVATIONS[problem.M])
        lags, cross = few.lags(), few.cross()
        timing, phi = peer_time(plan, lambda: methods.ciq(lags, cross))
        yield row_of(problem, "ciq", len(phi), timing, judge.ciq(phi[:JUDGED]))


def own_times(plan: Plan) -> dict[str, Timing]:
    """Of hip, torus and the bare pair, in turns."""
    problem = plan.problem
    length = problem.of(0).prior().n_white
    noise = torch.Generator().manual_seed(SEED)
    x = torch.randn(len(problem.x), length, dtype=problem.dtype, generator=noise)
    calls: dict[str, Callable[[], object]] = {
        "fft pair": lambda: methods.transform_pairs(x),
        "hip": lambda: methods.hip(problem),
        "torus": lambda: methods.torus(problem),
    }
    return time_together(calls, repeats=plan.repeats, warmup=1 if problem.M <= 100_000 else 0)


def peer_time(plan: Plan, call: Callable[[], Tensor]) -> tuple[Timing, Tensor]:
    """Time of a call without warm-up, and its last result."""
    results: list[Tensor] = []

    def keep() -> None:
        results[:] = [call()]

    return time_call(keep, repeats=plan.peer_repeats, warmup=0), results[0]


def row_of(problem: Problem, method: str, timed: int, timing: Timing, accuracy: Row) -> Row:
    """A line of the table; times are scaled to all observations."""
    scale = OBSERVATIONS / timed
    row: Row = {
        "kernel": problem.name,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "M": problem.M,
        "method": method,
        "timed": timed,
        "seconds": scale * timing.median,
        "min_s": scale * timing.minimum,
        "max_s": scale * timing.maximum,
        "repeats": timing.repeats,
        **accuracy,
    }
    log.info("%s", "  ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    return row


def goals(rows: Sequence[Row], quick: bool) -> list[Goal]:
    """Of the float32 rows: times over all kernels at 10⁴ and 10⁵, growth of one, accuracy.

    A quick run names only what it measured.
    """
    medium, large = 10_000, 100_000
    found = [
        Goal.at_least(
            f"Cholesky / HIP-GP at M = {medium:,}, worst kernel",
            35.0,
            worst(rows, "cholesky", "hip", medium),
        ),
        Goal.at_least(
            f"CIQ / HIP-GP at M = {medium:,}, worst kernel", 18.0, worst(rows, "ciq", "hip", medium)
        ),
        Goal.at_most(f"HIP-GP seconds at M = {medium:,}", 0.25, seconds(rows, "hip", medium)),
        Goal.at_most(
            f"HIP-GP / FFT pair at M = {large:,} (4.5 s / 0.17 s)",
            4.5 / 0.17,
            ratio(rows, "hip", "fft pair", large),
        ),
    ]
    for m in (medium, large):
        name = f"HIP-GP / torus at M = {m:,}, worst kernel"
        found.append(Goal.at_least(name, 5.0, worst(rows, "hip", "torus", m)))
    growth = quotient(
        ratio(rows, "hip", "fft pair", 1_000_000), ratio(rows, "hip", "fft pair", large)
    )
    found.append(Goal.at_most("growth of HIP-GP / growth of FFT pair, 1e5 to 1e6", 1.3, growth))
    errors = [number(row, key) for row in rows if is_single_hip(row) for key in ERRORS & set(row)]
    name = "errors of HIP-GP in float32, all M and kernels"
    found.append(Goal.at_most(name, 1e-6, max(errors, default=None)))
    return [goal for goal in found if goal.reached is not None] if quick else found


def is_single_hip(row: Row) -> bool:
    """Whether this is HIP-GP in float32."""
    return (row["method"], row["dtype"]) == ("hip", "float32")


def worst(rows: Sequence[Row], slow: str, fast: str, m: int) -> float | None:
    """Smallest ratio of times over the kernels."""
    ratios = [ratio(rows, slow, fast, m, kernel) for kernel in methods.KERNELS]
    known = [value for value in ratios if value is not None]
    return min(known) if len(known) == len(ratios) else None


def ratio(
    rows: Sequence[Row], slow: str, fast: str, m: int, kernel: str = CALIBRATING
) -> float | None:
    """Time of one method over another's."""
    return quotient(seconds(rows, slow, m, kernel), seconds(rows, fast, m, kernel))


def seconds(rows: Sequence[Row], method: str, m: int, kernel: str = CALIBRATING) -> float | None:
    """Median time in float32, if it was measured."""
    return entry(rows, method, m, "seconds", kernel)


def entry(rows: Sequence[Row], method: str, m: int, key: str, kernel: str) -> float | None:
    """A float32 number of the table, if it is there."""
    wanted = (method, m, kernel, "float32")
    for row in rows:
        if (row["method"], row["M"], row["kernel"], row["dtype"]) == wanted and key in row:
            return number(row, key)
    return None


def quotient(a: float | None, b: float | None) -> float | None:
    """a / b where both are known."""
    return None if a is None or b is None else a / b
