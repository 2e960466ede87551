"""Steps of conjugate gradients with and without the circulant preconditioner.

HIP-GP paper, section 5.1, figure 1 and appendix C.1, and two systems in three dimensions. All
solves are in float64, of standard normal right-hand sides, and a column has converged when its
*true* residual satisfies ‖b − K x‖ ≤ rtol ‖b‖. Five methods:

    cg         no preconditioner
    pcg        upper-left block of C⁻¹, C the wrapped kernel on a torus with 4 ℓ of padding or,
               where that is much smaller, 1 ℓ: what all engines use
    pcg wide   the same with 6 ℓ: where ℓ < h, 4 ℓ are three cells, one step too few
    minimal    the same of the paper's 2M − 2 embedding, indefinite spectra floored at 2 |λ_min|
    published  that embedding as the published code has it: jitter 1e-3 on a kernel of variance
               0.1, the spectrum clamped at 1e-6 for the preconditioner *and* for the products (it
               then solves another system), no true residuals on the way
"""

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52, SquaredExponential
from dustmap.linalg import AbstractOperator, CirculantOperator, SolveResult, SolveStatus, pcg
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, Value, number
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.preconditioner import _figure as figure

log = logging.getLogger(__name__)

#: Padding of the preconditioned methods in ℓ; the first is the default of the engines.
PADDINGS = {"pcg": 4.0, "pcg wide": 6.0}
SEED = 0
MAX_STEPS = 3000
#: Jitter and spectrum floor of the published code, as fractions of its variance.
PUBLISHED_JITTER, PUBLISHED_CLAMP = 1e-2, 1e-5
SWEEP_JITTER = 1e-3

#: Nodes per axis, ℓ/h and the wanted fraction of CG's steps.
PLANE = ((25, 0.6, 0.25), (50, 1.2, 0.11), (100, 2.5, 0.05))
PLANE_METHODS = ("cg", "pcg", "pcg wide", "minimal")
KERNELS: dict[str, Callable[[float], AbstractKernel]] = {
    "squared exponential": lambda scale: SquaredExponential(scale, dim=1),
    "Matérn-5/2": lambda scale: Matern52(scale, dim=1),
    "Matérn-3/2": lambda scale: Matern32(scale, dim=1),
    "Matérn-1/2": lambda scale: Matern12(scale, dim=1),
}


@final
@dataclass(frozen=True, eq=False)
class System:
    """K x = b with what defines it, and the row entries that name it.

    rhs: number of right-hand sides.
    """

    kernel: AbstractKernel
    grid: RegularGrid
    rtol: float
    rhs: int
    name: Row

    def right_hand_sides(self) -> Tensor:
        """b (rhs, M)."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(self.rhs, self.grid.size, dtype=torch.float64, generator=generator)


def run(request: Request) -> Outcome:
    """All parts; quick leaves out the large systems."""
    plane = list(plane_part(request.quick))
    box = list(box_part(request.quick))
    sweep = list(sweep_part(request.quick))
    curves = [error_curve(n, ratio) for n, ratio, _ in PLANE[: 1 if request.quick else 3]]
    settings: Row = {
        "dtype": "float64",
        "padding": PADDINGS,
        "published": {"jitter": PUBLISHED_JITTER, "clamp": PUBLISHED_CLAMP},
        "sweep_jitter": SWEEP_JITTER,
        "seed": SEED,
        "max_steps": MAX_STEPS,
        "residual": "true, relative to the right-hand side",
    }
    picture = figure.draw(curves, box, sweep)
    return Outcome(settings, [*plane, *box, *sweep], goals(plane, box), picture)


def plane_part(quick: bool) -> Iterator[Row]:
    """5.1: 25 × 25, 50 × 50 and 100 × 100, Matérn-5/2, to 1e-10."""
    for n, ratio, _ in PLANE[: 2 if quick else 3]:
        yield from compare(plane_system(n, ratio, 5 if quick else 25), PLANE_METHODS)


def plane_system(n: int, ratio: float, rhs: int) -> System:
    """n × n nodes at unit spacing, ℓ = ratio."""
    name: Row = {"part": "plane", "kernel": "Matérn-5/2", "M": n * n, "ell_over_h": ratio}
    grid = RegularGrid((0.0, 0.0), (1.0, 1.0), (n, n))
    return System(Matern52(ratio, dim=2), grid, 1e-10, rhs, name)


def box_part(quick: bool) -> Iterator[Row]:
    """Three dimensions, Matérn-3/2: 15 × 15 × 5, hard for the published code, and 50 × 50 × 25."""
    thin = RegularGrid.from_bounds((0.0, 0.0, 0.0), (0.5, 0.5, 0.1), (15, 15, 5))
    for scale in (0.05, 0.1, 0.2):
        for rtol in (1e-6,) if quick else (1e-6, 1e-10):
            name: Row = {"part": "thin box", "kernel": "Matérn-3/2", "M": thin.size, "ell": scale}
            system = System(Matern32(scale, dim=3), thin, rtol, 3 if quick else 25, name)
            yield from compare(system, ("cg", "pcg", "minimal", "published"))
    if not quick:
        grid = RegularGrid((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (50, 50, 25))
        name = {"part": "box", "kernel": "Matérn-3/2", "M": grid.size, "ell_over_h": 4.0}
        yield from compare(System(Matern32(4.0, dim=3), grid, 1e-6, 3, name), ("cg", "pcg"))


def sweep_part(quick: bool) -> Iterator[Row]:
    """C.1: M points on [0, 2], four kernels, two length scales, to 1e-10; r_pcg per row."""
    sizes = (10, 100, 500) if quick else (10, 20, 35, 50, 75, 100, 150, 200, 300, 400, 500)
    for scale in (0.05, 0.5):
        for kernel, make in KERNELS.items():
            for m in sizes:
                grid = RegularGrid.from_bounds((0.0,), (2.0,), (m,))
                name: Row = {"part": "sweep", "kernel": kernel, "M": m, "ell": scale}
                system = System(make(scale), grid, 1e-10, 5 if quick else 25, name)
                cg, with_pcg = compare(system, ("cg", "pcg"), SWEEP_JITTER)
                yield {**with_pcg, "cg_steps": cg["steps"], "r_pcg": ratio_of(with_pcg, cg)}


def compare(system: System, methods: tuple[str, ...], jitter: float | None = None) -> Iterator[Row]:
    """One row per method."""
    b = system.right_hand_sides()
    for method in methods:
        K, P = operators(method, system, jitter)
        result, seconds = stopwatch(
            lambda K=K, P=P, method=method: solve(system, b, K, P, method)  # type: ignore[misc]
        )
        row: dict[str, Value] = {
            **system.name,
            "rtol": system.rtol,
            "method": method,
            **summary(result),
        }
        if isinstance(P, CirculantOperator):
            row["preconditioner_torus"] = P.torus_shape
        if method == "published":
            row["product_error"] = clamp_error(system, K, b)
        what = f"{row['part']}, M = {row['M']}, {method}"
        log.info("%s: %s steps, %.1f s", what, row["steps"], seconds)
        yield {**row, "seconds": seconds}


def solve(
    system: System, b: Tensor, K: AbstractOperator, P: AbstractOperator | None, method: str
) -> SolveResult:
    """K x = b; the published code never recomputes its residual."""
    refresh = MAX_STEPS + 1 if method == "published" else 50
    return pcg(K, b, preconditioner=P, rtol=system.rtol, max_steps=MAX_STEPS, refresh=refresh)


def operators(
    method: str, system: System, jitter: float | None
) -> tuple[AbstractOperator, AbstractOperator | None]:
    """The matrix K and the preconditioner P of a method."""
    if method == "published":
        return published(minimal(system))
    if method == "minimal":
        prior = minimal(system)
        return prior.covariance(), prior.preconditioner()
    prior = padded(system, PADDINGS.get(method, PADDINGS["pcg"]), jitter)
    return prior.covariance(), prior.preconditioner() if method in PADDINGS else None


def published(prior: GridPrior) -> tuple[AbstractOperator, AbstractOperator]:
    """K and P of the published code: one clamped spectrum for both."""
    clamped = (prior.spectrum.detach() + PUBLISHED_JITTER).clamp_min(PUBLISHED_CLAMP)
    shape, box = prior.torus_shape, prior.grid.shape
    return CirculantOperator(clamped, shape, box, box), CirculantOperator(
        1.0 / clamped, shape, box, box
    )


def clamp_error(system: System, K: AbstractOperator, b: Tensor) -> float:
    """Relative error of the published K b against the covariance with the same jitter."""
    exact = minimal(system).covariance().matmul(b) + PUBLISHED_JITTER * b
    return float((K.matmul(b) - exact).norm() / exact.norm())


def padded(system: System, padding: float, jitter: float | None = None) -> GridPrior:
    """The torus of the wrapped kernel, with `jitter` (a variance) on the diagonal if given."""
    prior = GridPrior.padded(system.kernel, system.grid, padding=padding)
    if jitter is None:
        return prior
    nugget = jitter / float(prior.spectrum.detach().max())
    return GridPrior.padded(system.kernel, system.grid, padding=padding, nugget=nugget)


def minimal(system: System) -> GridPrior:
    """The paper's embedding of the plain kernel."""
    return GridPrior.minimal(system.kernel, system.grid)


def summary(result: SolveResult) -> dict[str, str | int | float]:
    """Steps over the right-hand sides, and how the worst of them ended."""
    steps: list[int] = result.steps.tolist()
    return {
        "rhs": len(steps),
        "steps": float(statistics.median(steps)),
        "steps_min": min(steps),
        "steps_max": max(steps),
        "worst_status": result.worst.name.lower(),
        "worst_residual": float(result.residuals.max()),
    }


def ratio_of(row: Row, reference: Row) -> float | None:
    """Steps over the reference's steps; None unless both converged."""
    converged = SolveStatus.CONVERGED.name.lower()
    if row["worst_status"] != converged or reference["worst_status"] != converged:
        return None
    return number(row, "steps") / number(reference, "steps")


def error_curve(n: int, ratio: float) -> figure.Curve:
    """Figure 1: RMSE of the solution after k steps, for CG and PCG, k spaced geometrically.

    The solver is run again for each k, so that what is drawn is what it does.
    """
    system = plane_system(n, ratio, 3)
    b = system.right_hand_sides()
    prior = padded(system, PADDINGS["pcg wide"])
    K = prior.covariance()
    exact = pcg(K, b, preconditioner=prior.preconditioner(), rtol=1e-13, max_steps=MAX_STEPS).x
    total = int(pcg(K, b, rtol=system.rtol, max_steps=MAX_STEPS).steps.max())

    def errors(P: AbstractOperator | None) -> list[tuple[float, float]]:
        found = []
        for k in checkpoints(total):
            result = pcg(K, b, preconditioner=P, rtol=system.rtol, max_steps=k)
            found.append((k / total, float((result.x - exact).square().mean().sqrt())))
            if result.converged:
                break
        return found

    return figure.Curve(n * n, ratio, errors(None), errors(prior.preconditioner()))


def checkpoints(total: int, count: int = 28) -> list[int]:
    """About `count` step numbers from 1 to total, in geometric progression."""
    grid = torch.logspace(0, torch.log10(torch.tensor(float(total))).item(), count)
    return sorted({round(k) for k in grid.tolist()})


def goals(plane: list[Row], box: list[Row]) -> list[Goal]:
    """What was wanted of the systems that were solved."""
    found = []
    for n, ratio, limit in PLANE:
        rows = {str(row["method"]): row for row in plane if row["M"] == n * n}
        if rows:
            name = f"PCG / CG steps at M = {n * n}, ell/h = {ratio}, padding 6 ell"
            found.append(Goal.at_most(name, limit, ratio_of(rows["pcg wide"], rows["cg"])))
    for part, scale, limit in (("thin box", 0.1, 80), ("box", None, 160)):
        wanted = (part, scale, "pcg", 1e-6)
        for row in box:
            if (row["part"], row.get("ell"), row["method"], row["rtol"]) == wanted:
                name = f"PCG steps to 1e-6, {part}, M = {row['M']}, padding 4 ell"
                found.append(Goal.at_most(name, limit, number(row, "steps")))
    return found
