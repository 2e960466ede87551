"""Natural-gradient steps on minibatches of a large sky, by one process and by ranks.

    python -m pipelines.reproduce.families._steps FOLDER

is one of the ranks that `measured` starts. The sky is that of `paper_scale`, with a smoother field.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import inference
from dustmap.distributed import world_from_environment
from dustmap.gp import Batch, ConstantMean, GridPrior
from dustmap.gp.families import BlockFamily
from dustmap.gp.features import HIPFeatures
from dustmap.gp.functionals import LineIntegrals, Sharded
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.linalg import AbstractWorld, TilePartition
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.paper_scale import _sky as skies

#: Steps that are not timed, and those whose minibatches tell where the bound has come to.
_WARM_UP, _LAST = 3, 20
_SETTINGS, _STARS, _MEAN = "plan.json", "stars", "mean.npy"


@final
@dataclass(frozen=True)
class Plan:
    """A sky of stars, the nodes of a fit (ℓ/h = 2 along x and y) and the steps that are taken.

    block : nodes along a tile
    ranks : counts of processes, one after the other
    """

    stars: int = 500_000
    shape: tuple[int, int, int] = (15, 15, 8)
    length: float = 0.57
    block: int = 6
    batch: int = 1000
    steps: int = 150
    held_out: int = 500
    ranks: tuple[int, ...] = (1, 2)

    def sky(self) -> skies.SkySettings:
        """What is drawn."""
        return skies.SkySettings(self.shape, self.stars, self.held_out, self.length)

    def as_row(self) -> Row:
        """What defines the part."""
        return {f"steps_{name}": value for name, value in asdict(self).items()}


QUICK = Plan(stars=400, shape=(5, 5, 4), length=1.6, block=3, batch=40, steps=6, held_out=20)


def measured(plan: Plan, folder: Path) -> Iterator[Row]:
    """Yield what the steps took, a row for each count of ranks."""
    sky = skies.draw(plan.sky())
    for name in ("positions", "y", "sigma", "test_positions", "test_extinction"):
        np.save(folder / f"{_STARS}-{name}.npy", getattr(sky, name).numpy())
    (folder / _SETTINGS).write_text(json.dumps(asdict(plan)))
    alone: NDArray[np.float32] | None = None
    for count in plan.ranks:
        _started(folder, count)
        found = [json.loads((folder / f"{count}-{rank}.json").read_text()) for rank in range(count)]
        mean = np.load(folder / f"{count}-{_MEAN}")
        alone = mean if alone is None else alone
        yield {
            **found[0],
            "cpu_s_a_step": max(each["cpu_s_a_step"] for each in found),
            "peak_gib": max(each["peak_gib"] for each in found),
            "mean_apart": float(np.abs(mean - alone).max() / np.abs(alone).max()),
        }


def _started(folder: Path, ranks: int) -> None:
    """Run this module in so many processes of one thread."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command += ["-m", "pipelines.reproduce.families._steps", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{ranks} ranks: {done.stderr[-2000:]}")


def _be_rank(folder: Path, world: AbstractWorld) -> None:
    """Take the steps, and leave what they took."""
    plan = Plan(**json.loads((folder / _SETTINGS).read_text()))
    batch = _data(folder, plan, world)
    sky = plan.sky()
    prior = GridPrior.padded(sky.kernel().fixed(), sky.grid(), dtype=torch.float32)
    tile = (plan.block,) * 3
    model = inference.VariationalModel(
        HIPFeatures(prior),
        ConstantMean(sky.mean).fixed(),
        GaussianLikelihood(),
        BlockFamily(TilePartition(prior.torus_shape, tile)),
    )
    source = inference.RowSource(model.features, batch.functional, memory=0)
    settings = inference.SVISettings(plan.batch, epochs=1_000, one_pass=False)
    generator = torch.Generator().manual_seed(0)
    elbos, clocks = [], []
    for state in inference.svi(model, batch, source, settings, generator):
        clocks.append((time.perf_counter(), time.process_time()))
        elbos.append(state.taken.elbo / plan.stars)
        if state.step == plan.steps:
            break
    steps = plan.steps - _WARM_UP
    wall, cpu = ((clocks[-1][i] - clocks[_WARM_UP - 1][i]) / steps for i in (0, 1))
    row = {
        "ranks": world.size,
        "M_w": model.features.n_features,
        "seconds_a_step": wall,
        "cpu_s_a_step": cpu,
        "elbo_per_star_first": elbos[0],
        "elbo_per_star_last": sum(elbos[-_LAST:]) / len(elbos[-_LAST:]),
        "peak_gib": _peak_gib(),
        **_held_out(folder, model, state),
    }
    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(row))
    if world.rank == 0:
        np.save(folder / f"{world.size}-{_MEAN}", state.posterior.mean.numpy())


def _data(folder: Path, plan: Plan, world: AbstractWorld) -> Batch:
    """The stars, of which this rank reads the places of its own."""
    places = np.load(folder / f"{_STARS}-positions.npy", mmap_mode="r")
    own = LineIntegrals.from_observer(torch.from_numpy(places[world.share(plan.stars)].copy()))
    y, sigma = (_tensor(folder, name).float() for name in ("y", "sigma"))
    rays = own if world.size == 1 else Sharded.of(own, world)
    return Batch(rays, y, sigma.square())


def _held_out(
    folder: Path, model: inference.VariationalModel, state: inference.SVIState
) -> dict[str, float]:
    """Scores of noise-free extinctions of stars that took no part."""
    rays = LineIntegrals.from_observer(_tensor(folder, "test_positions"))
    found = inference.VariationalPosterior(model, state.posterior).predict(rays)
    scores = inference.scores(_tensor(folder, "test_extinction"), found.mean, found.variance)
    return {f"held_out_{name}": scores.as_dict()[name] for name in ("rmse", "chi2")}


def _tensor(folder: Path, name: str) -> Tensor:
    return torch.from_numpy(np.load(folder / f"{_STARS}-{name}.npy"))


def _peak_gib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world_from_environment(gpu=False) as this:
        _be_rank(Path(sys.argv[1]), this)
