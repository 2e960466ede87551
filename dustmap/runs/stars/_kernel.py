"""The smoothness of the kernel, and its length before a fit, by the covariances of stars.

model.kernel = "auto" is chosen by patches of the sky, HEALPix pixels in shells of distances,
wider than the length where learning starts, whose stars have no neighbours left to be
predicted by. Of many stars a random part is compared, and on a grid coarser than a fine one.
"""

import itertools
import json
import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from dustmap import engines
from dustmap.config import Boxes, Config
from dustmap.engines import FALLBACK, KernelChoice, RayData, Watch
from dustmap.gp import whole_batch
from dustmap.gp.functionals import gathered, own_rays
from dustmap.inference import StateReader, state_of
from dustmap.linalg import AbstractWorld
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.stars import _grids, _model
from dustmap.runs.stars._distance_rounds import first_added
from dustmap.sky.observations import Observations, sky_patches

log = logging.getLogger(__name__)

#: From rough to smooth. The Gaussian engines weigh rays by tables for which Matérn-1/3 has no
#: closed form: its fits take them ten times as long.
CANDIDATES = ("matern13", "matern12", "matern32")
GAUSSIAN_CANDIDATES = CANDIDATES[1:]
#: The chosen kernel of a run, with the scores of all.
CHOICE = "checkpoint/kernel.json"
#: Stars that take part: all of few, a fifth of many, so that a choice costs less than a fit.
_FEWEST, _MOST = 500, 1_000
#: Nodes of the grid of a comparison.
MOST_NODES = 60_000
#: Width of a patch in lengths where learning starts, its stars, and the part of all stars in such.
_WIDTH, _LEAST_STARS, _IN_PATCHES = 2.0, 5, 0.7
#: What widens patches that hold too few stars; patches that a choice needs, and those of a sky of
#: the widest.
_WIDER, _LEAST_PATCHES, _PIXELS = 1.5, 8, 12
#: The name of the state of a choice.
_STATE = "choose_kernel"


def is_open(config: Config) -> bool:
    """Whether the data choose the kernel."""
    return config.model.kernel == "auto"


def candidates(config: Config) -> tuple[str, ...]:
    """Kernels to choose from, from rough to smooth."""
    return CANDIDATES if _model.is_lognormal(config) else GAUSSIAN_CANDIDATES


def with_kernel(config: Config, name: str) -> Config:
    """The configuration with a kernel by name."""
    return replace(config, model=replace(config.model, kernel=name))


def config_of_run(directory: RunDirectory, config: Config) -> Config:
    """The configuration of a finished run with the kernel that it has chosen, if it has."""
    if not is_open(config):
        return config
    choice = KernelChoice.of_plain(directory.read_json(CHOICE))
    return with_kernel(config, choice.name)


def compared_stars(n: int) -> int:
    """How many of n stars take part in a choice."""
    return min(n, _MOST, max(_FEWEST, n // 5))


def boxes_to_compare(config: Config) -> Boxes:
    """Boxes with their spacings, from that of the map to that of the fit, of which a choice takes
    the first that has stars enough."""
    around = config.grid.around
    return (config.grid.boxes[0], *(() if isinstance(around, str) else reversed(around)))


def compared_on(config: Config, box: _grids.Box | None = None) -> Config:
    """The configuration of a choice: its one grid, at least as wide as the box, that of the map by
    default, is coarser than a fine one, and no scatter is guessed."""
    size, spacing = box or config.grid.boxes[0]
    grid = replace(config.grid, size=size, spacing=spacing, levels=(), around=())
    cells = [round(side / spacing) for side in size]
    for factor in itertools.count(1):
        fewer = [math.ceil(count / factor) for count in cells]
        if math.prod(count + 1 for count in fewer) <= MOST_NODES or max(fewer) == 1:
            break
    size = tuple(count * factor * spacing for count in fewer)
    model = _model.without_relative_scatter(config.model)
    return replace(config, model=model, grid=replace(grid, size=size, spacing=factor * spacing))


def choose_kernel(
    config: Config, observed: Observations, train: Tensor, watch: Watch, world: AbstractWorld
) -> KernelChoice:
    """Choose the kernel of the density by held-out patches of the stars `train`.

    The checkpointer of `watch` has the choice.
    """
    state = watch.checkpointer.load()
    if state is not None:
        return StateReader.of(state, _STATE).read(KernelChoice)
    choice = _choice(config, observed, train, watch)
    # Every rank has computed the same; the first has the last word.
    choice = KernelChoice.of_plain(json.loads(world.texts(json.dumps(choice.as_plain()))[0]))
    watch.checkpointer.finish(state_of(_STATE, choice, finished=True))
    for line in choice.candidates:
        log.info("kernel %s, length %.3g pc", line.in_words(), line.learned["length"])
    log.info("kernel: %s%s", choice.name, f" ({choice.remark})" if choice.remark else "")
    return choice


def _choice(config: Config, observed: Observations, train: Tensor, watch: Watch) -> KernelChoice:
    compared, train = _compared(config, observed, train)
    generator = torch.Generator().manual_seed(config.fit.seed)
    shuffled = torch.randperm(len(train), generator=generator)
    some = train[shuffled[: compared_stars(len(train))].sort().values]
    patches = _patches(observed, some, _WIDTH * config.model.length)
    if len(patches) < _LEAST_PATCHES:
        remark = (
            f"{len(some)} stars fill fewer than {_LEAST_PATCHES} patches of at least "
            f"{_WIDTH * config.model.length:g} pc: too few to compare kernels"
        )
        return KernelChoice(FALLBACK, remark=remark)
    return engines.choose_ray_kernel(
        _ray_data(compared, observed, some),
        patches,
        candidates(config),
        config.model.length,
        outliers=config.model.noise == "student-t",
        progress=watch.progress,
    )


def _compared(config: Config, observed: Observations, train: Tensor) -> tuple[Config, Tensor]:
    """The configuration of a choice, and the stars of `train` that may take part in it.

    Of nodes around the box those are left out that have structure too coarse to tell, if there are
    stars enough whose rays end before.
    """
    rays, (*inner, whole) = observed.batch.functional, boxes_to_compare(config)
    own = own_rays(rays)
    ends = own.at(own.edges[:, -1:])[:, 0]
    for box in inner:
        compared = compared_on(config, box)
        grid = _grids.grid_of(replace(compared.grid, size=box[0], spacing=box[1]))
        within = gathered(rays, grid.contains(ends).double())[train] > 0.0
        has_sun = bool(grid.contains(torch.zeros_like(ends[:1])).all())
        if has_sun and int(within.sum()) >= _FEWEST:
            return compared, train[within]
    return compared_on(config, whole), train


def length_of_stars(config: Config, observed: Observations) -> float:
    """The length of the density by the covariances of all stars observed, on the grid of config."""
    config = compared_on(with_kernel(config, FALLBACK) if is_open(config) else config)
    return engines.ray_length(
        _ray_data(config, observed, torch.arange(len(observed))),
        config.model.kernel_name,
        config.model.length,
        outliers=config.model.noise == "student-t",
    )


def _ray_data(config: Config, observed: Observations, some: Tensor) -> RayData:
    """What the stars `some` say, at the nodes of the grid of config, before any fit."""
    noisy = observed if observed.exact else observed.with_added(first_added(config, observed)[0])
    noisy = replace(noisy, column=None)  # patches are of stars
    if noisy.shared is not None:
        # Of the stars behind the same dust beyond the box so many are among some at random.
        noisy = replace(noisy, shared=noisy.shared * (len(some) / len(noisy)))
    data, relative = whole_batch(noisy.training(some)), None
    model = _model.model_of(config, _model.start_for(config, data), data)
    if _model.is_lognormal(config):
        relative = _model.profile_of(config.model, 1.0).to(data.y.device)
    return RayData.of(model, data, _grids.grid_of(config.grid), relative)


def _patches(observed: Observations, some: Tensor, width: float) -> list[Tensor]:
    """Places in `some` (n,) of the stars of each patch but those of few stars; wider patches where
    these are too many."""
    rays = observed.batch.functional[some]
    while True:
        labels = sky_patches(rays, width)
        counts = torch.bincount(labels)
        large = (counts >= _LEAST_STARS).nonzero().squeeze(-1)
        enough = int(counts[large].sum()) >= _IN_PATCHES * len(some)
        if enough or len(counts) <= _PIXELS:
            return [(labels == patch).nonzero().squeeze(-1) for patch in large]
        width *= _WIDER
