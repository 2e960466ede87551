"""Ordinary regression in the plane: error and time against the number of inducing points.

HIP-GP paper, section 5.4, figures 3 and 4, on two public data sets: prices of houses (the
paper's, of England and Wales, are replaced by those of King County) and a scene of land surface
temperatures. Hyperparameters are learned once by exact evidence on 2,000 data and shared by all
methods; q has blocks of 10 × 10 whitened variables, as in the paper.

    scaling     M = 2,500 ... 10,000: HIP-GP and Cholesky-SVGP, direct solution and, on the
                prices, natural-gradient epochs; gpytorch's SVGP for the time of its steps
    mean        the mean alone by CG on Λ, without rows, up to M = 40,000
    early stop  test error against the number of PCG steps, the same for training and test
"""

from collections.abc import Iterator, Sequence

from dustmap.gp.functionals import PointValues
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.spatial import _figure as figure
from pipelines.reproduce.spatial import _gpytorch as peer
from pipelines.reproduce.spatial import _models as models
from pipelines.reproduce.spatial._problem import Problem, house_prices, land_temperature

SIZES = (50, 75, 100)
MEAN_SIZES = (50, 75, 100, 150, 200)
PCG_STEPS = (2, 5, 10, 20, 50)
#: Nodes per axis and data of the early-stopping part, and of the map.
STOP_NODES, STOP_TRAIN, STOP_TEST = 75, 4000, 1000
MAP_NODES = 80


def run(request: Request) -> Outcome:
    """Both data sets; quick is 2,000 data and at most 400 points."""
    prices, temperature = house_prices(request), land_temperature(request)
    sizes = (10, 20) if request.quick else SIZES
    rows = [*mean_part(prices, sizes if request.quick else MEAN_SIZES)]
    rows += mean_part(temperature, sizes if request.quick else MEAN_SIZES[:-1])
    found = []
    for problem, epochs in ((prices, models.EPOCHS), (temperature, 0)):
        for n in sizes:
            part, best = scaling_part(problem, n, epochs)
            rows += part
        found.append(best)
    if peer.installed():
        rows.append({**peer.measure(prices, sizes[0]), "part": "scaling", "data": prices.name})
    for problem in (prices, temperature):
        rows += early_stop_part(problem, request.quick)
    quantities = {p.name: p.origin.quantity for p in (prices, temperature)}
    picture = figure.draw(posterior_map(found[0]), rows, quantities)
    return Outcome(settings_of([prices, temperature]), rows, goals(rows, sizes), picture)


def scaling_part(problem: Problem, n: int, epochs: int) -> tuple[list[Row], models.Fitted]:
    """HIP-GP and Cholesky-SVGP on n × n points, and HIP-GP's posterior."""
    steps = (models.TRAIN_STEPS, models.TEST_STEPS)
    hip, fitted = models.measure(problem, lambda: models.hip(problem, n, *steps), epochs)
    svgp, _ = models.measure(problem, lambda: models.cholesky(problem, n), epochs)
    name: Row = {"part": "scaling", "data": problem.name}
    return [{**name, **with_total(row)} for row in (hip, svgp)], fitted


def mean_part(problem: Problem, sizes: Sequence[int]) -> Iterator[Row]:
    """HIP-GP's mean alone."""
    for n in sizes:
        row = models.mean_by_cg(problem, n)
        yield {"part": "mean", "data": problem.name, **with_total(row)}


def early_stop_part(problem: Problem, quick: bool) -> Iterator[Row]:
    """HIP-GP with truncated PCG, and with converged PCG (pcg_steps None)."""
    n = 20 if quick else STOP_NODES
    part = problem.subset(STOP_TRAIN, STOP_TEST)
    name: Row = {"part": "early stop", "data": problem.name}
    for steps in PCG_STEPS[:2] if quick else PCG_STEPS:
        row, _ = models.measure(part, lambda s=steps: models.hip(part, n, s, s))  # type: ignore[misc]
        yield {**name, **row, "pcg_steps": steps}
    row, _ = models.measure(part, lambda: models.hip(part, n, 300, 300, rtol=1e-5))
    yield {**name, **row, "pcg_steps": None}


def with_total(row: Row) -> Row:
    """The row with total_s: from nothing to the direct solution."""
    total = sum(number(row, key) for key in ("build_s", "rows_s", "direct_s") if key in row)
    return {**row, "total_s": total}


def posterior_map(fitted: models.Fitted) -> figure.Map:
    """HIP-GP's posterior over the box."""
    problem = fitted.problem
    grid = problem.map_grid(MAP_NODES)
    found = fitted.predict(PointValues(grid.points()))
    (west, south), (east, north) = grid.lower, grid.upper
    return figure.Map(
        problem.name,
        problem.origin.quantity,
        (west, east, south, north),
        found.mean.reshape(grid.shape),
        found.std.reshape(grid.shape),
        problem.x,
    )


def settings_of(problems: Sequence[Problem]) -> Row:
    """Everything that defines the experiment."""
    return {
        "family": f"blocks of {models.BLOCK[0]} × {models.BLOCK[1]}",
        "pcg_steps": {"train": models.TRAIN_STEPS, "test": models.TEST_STEPS},
        "pcg_rtol": models.RTOL,
        "cholesky_nugget": models.CHOLESKY_NUGGET,
        "svi": {"batch": models.BATCH, "epochs": models.EPOCHS},
        "dtype": {"scaling": "float32", "mean": "float64"},
        "mean": {"inner_rtol": models.INNER_RTOL, "outer_rtol": models.OUTER_RTOL},
        "hyperparameters": "exact evidence on half random, half central training data",
        "data": {problem.name: problem.as_row() for problem in problems},
    }


def goals(rows: Sequence[Row], sizes: Sequence[int]) -> list[Goal]:
    """HIP-GP as good as SVGP at equal M, better with M, and indifferent to 20 PCG steps."""
    found = []
    for data in dict.fromkeys(str(row["data"]) for row in rows):
        scaling = [row for row in rows if row["data"] == data and row["part"] == "scaling"]
        hip, svgp = (column(scaling, method, "rmse") for method in ("HIP-GP", "Cholesky-SVGP"))
        worst = max(abs(a / b - 1.0) for a, b in zip(hip, svgp, strict=True))
        found.append(Goal.at_most(f"RMSE, HIP-GP against SVGP at equal M, {data}", 0.01, worst))
        name = f"RMSE at M = {sizes[-1] ** 2} over RMSE at M = {sizes[0] ** 2}, {data}"
        found.append(Goal.at_most(name, 1.0, hip[-1] / hip[0]))
        found += early_stop_goal([row for row in rows if row["data"] == data])
    return found


def early_stop_goal(rows: Sequence[Row]) -> list[Goal]:
    """20 PCG steps are as good as convergence; nothing where 20 were not tried."""
    stop = {row["pcg_steps"]: row for row in rows if row["part"] == "early stop"}
    if 20 not in stop:
        return []
    change = abs(number(stop[20], "rmse") / number(stop[None], "rmse") - 1.0)
    name = f"RMSE with 20 PCG steps against converged, {stop[20]['data']}"
    return [Goal.at_most(name, 0.01, change)]


def column(rows: Sequence[Row], method: str, key: str) -> list[float]:
    """A column of one method."""
    return [number(row, key) for row in rows if row["method"] == method]
