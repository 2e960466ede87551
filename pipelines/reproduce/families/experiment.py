"""Standard deviations of the inducing engine's families, and its minibatches on ranks.

`families`: rays of 500 to 2,500 stars from the middle of a box, Matérn-3/2, errors of 5 %, two
nodes a length scale and, in the last two scenes, 2.5, which is what star runs take; float32. Every
family at its optimum, beside the dense exact Gaussian process: the standard deviation over the
exact one, of the density at random places and of extinctions along other rays.

    auto        what the engine chooses by itself: up to 3,000 nodes the full family
    full        on K_uu's Cholesky factor: what is not 1 is of the grid, not of the family
    mean-field, block, low-rank      on the padded torus of the "hip" whitening

`ranks`: natural-gradient steps of the block family on minibatches of 500,000 simulated stars, from
the prior on, by one process and by two ranks: rows made anew, statistics and gradients added up.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dustmap import engines, inference
from dustmap.gp import GridPrior
from dustmap.gp.families import (
    AbstractFamily,
    BlockFamily,
    FullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, HIPFeatures
from dustmap.linalg import TilePartition
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.families import _figure as figure
from pipelines.reproduce.families import _steps as steps
from pipelines.reproduce.families._scene import STD, Reference, Scene

log = logging.getLogger(__name__)

PARTS = ("families", "ranks")
SCENES = (
    Scene((200,), 500),
    Scene((30, 30), 1000),
    Scene((12, 12, 10), 1000),
    Scene((15, 15, 7), 2000),
    Scene((15, 15, 8), 2000, ratio=2.5),
    Scene((24, 24, 12), 2500, ratio=2.5),
)
QUICK = (Scene((24,), 60), Scene((6, 6, 5), 80))
#: Nodes along a tile, by dimension: the last but one is what "auto" takes of large grids.
TILES = {1: (4, 16, 64), 2: (2, 4, 16, 24), 3: (2, 4, 6, 8)}
RANKS = (10, 50, 200)
#: Largest standard deviation over the exact one that is wanted.
WIDEST = 1.3
RTOL, STEPS, DTYPE = 1e-4, 3000, torch.float32
#: Bytes of rows, of 2,500 stars and 31,104 variables.
MEMORY = 2**29
#: Nodes whose full covariance is computed.
MOST_FULL = 3000
#: Peak memory of a rank that is wanted, GiB.
GIB = 1.0
#: Wanted of two ranks.
GAIN = 1.5


def run(request: Request) -> Outcome:
    """Both parts; quick is two small scenes, and some steps of few stars."""
    wanted = request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    if "families" in wanted:
        for scene in QUICK if request.quick else SCENES:
            rows += families_of(scene)
            log.info("%s done", scene)
    if "ranks" in wanted:
        plan = steps.QUICK if request.quick else steps.Plan()
        with tempfile.TemporaryDirectory() as folder:
            rows += [{"part": "ranks", **row} for row in steps.measured(plan, Path(folder))]
    settings: Row = {"kernel": "matern32", "rtol": RTOL, "memory": MEMORY, **steps.Plan().as_row()}
    return Outcome(settings, rows, goals(rows, request.quick), figure.draw(rows))


def families_of(scene: Scene) -> list[Row]:
    """All families of one scene."""
    reference, seconds = stopwatch(lambda: Reference.of(scene))
    found = [_exact_row(reference, seconds), _automatic(reference)]
    kernel = scene.model().kernel
    if scene.grid.size <= MOST_FULL:
        nodes = CholeskyFeatures(kernel, scene.grid, rows_dtype=DTYPE)
        found += _rows_of(reference, "cholesky", nodes, {"full": FullRankFamily(nodes.n_features)})
    torus = HIPFeatures(GridPrior.padded(kernel, scene.grid, dtype=DTYPE))
    return [*found, *_rows_of(reference, "hip", torus, dict(_structured(torus)))]


def _structured(phi: HIPFeatures) -> Iterator[tuple[str, AbstractFamily]]:
    """Families of the variables on a torus."""
    torus = phi.prior.torus_shape
    yield "mean-field", MeanFieldFamily(phi.n_features)
    for side in TILES[len(torus)]:
        name = "block " + "x".join([str(side)] * len(torus))
        yield name, BlockFamily(TilePartition(torus, tuple(min(side, n) for n in torus)))
    for rank in RANKS:
        if rank < phi.n_features:
            yield f"low-rank {rank}", LowRankDiagonalFamily(phi.n_features, rank)


def _rows_of(
    reference: Reference,
    whitening: str,
    phi: AbstractFeatureMap,
    families: Mapping[str, AbstractFamily],
) -> Iterator[Row]:
    """The optimum of each family, with rows that are made once."""
    model, data = reference.scene.model(), reference.data
    source, rows_s = stopwatch(lambda: inference.RowSource(phi, data.functional, MEMORY))
    for name, family in families.items():
        variational = inference.VariationalModel(phi, model.mean, model.likelihood, family)
        solution, fit_s = stopwatch(
            lambda model=variational: inference.solve_direct(  # type: ignore[misc]
                model, data, source, rtol=RTOL, max_steps=STEPS
            )
        )
        posterior = inference.VariationalPosterior(variational, solution.state)
        yield {
            "part": "families",
            **reference.scene.as_row(),
            "family": name,
            "whitening": whitening,
            "M_w": phi.n_features,
            "rows_s": rows_s,
            "fit_s": fit_s,
            "cg_steps": int(solution.solve.steps.max()),
            **_ratios(reference, posterior),
        }


def _automatic(reference: Reference) -> Row:
    """What the engine takes where nothing is said."""
    scene, model = reference.scene, reference.scene.model()
    settings = engines.InducingSettings(
        engines.EvidenceSettings(rows=100),
        points_per_length=scene.ratio,
        nugget=0.0,
        dtype=DTYPE,
    )
    problem = engines.Problem(model, reference.data, scene.grid)
    fit, fit_s = stopwatch(
        lambda: engines.InducingEngine(settings).condition(problem, engines.Watch())
    )
    return {
        "part": "families",
        **scene.as_row(),
        "family": "auto",
        "whitening": fit.report["whitening"],
        "chosen": fit.report["family"],
        "M_w": fit.report["n_features"],
        "fit_s": fit_s,
        **dict(
            reference.ratios(
                fit.posterior.predict(reference.places).std,
                fit.posterior.predict(reference.rays).std,
            )
        ),
    }


def _ratios(reference: Reference, posterior: inference.VariationalPosterior) -> Row:
    asked = reference.places, reference.rays
    return dict(reference.ratios(*(posterior.predict(functional).std for functional in asked)))


def _exact_row(reference: Reference, seconds: float) -> Row:
    return {
        "part": "families",
        **reference.scene.as_row(),
        "family": "exact",
        "fit_s": seconds,
        "seen": float(reference.seen.double().mean()),
        "median_std_over_prior": float(reference.std_places.median()) / STD,
    }


def goals(rows: Sequence[Row], quick: bool) -> list[Goal]:
    """Honest widths of what the engine chooses and of the larger structures; ranks that pay."""
    found = []
    parts = [row for row in rows if row["part"] == "families"]
    for family in ("auto", "low-rank 200"):
        for ratio in (2.0, 2.5):
            mine = [row for row in parts if (row["family"], row["ell_over_h"]) == (family, ratio)]
            for key, what in (
                ("places_p90", "density, 90th percentile"),
                ("rays_median", "extinctions, median"),
            ):
                name = f"{family}, ℓ/h = {ratio:g}: std / exact std of {what}, worst scene"
                reached = max((number(row, key) for row in mine), default=None)
                found.append(Goal.at_most(name, WIDEST, None if quick else reached))
    ranks = [row for row in rows if row["part"] == "ranks"]
    peak = max((number(row, "peak_gib") for row in ranks), default=None)
    found.append(Goal.at_most("peak memory of a rank, GiB", GIB, peak))
    cpu = {int(number(row, "ranks")): number(row, "cpu_s_a_step") for row in ranks}
    gain = cpu[1] / cpu[2] if {1, 2} <= cpu.keys() and not quick else None
    found.append(
        Goal.at_least("CPU time of a step, one process's over a rank's of two", GAIN, gain)
    )
    return found
