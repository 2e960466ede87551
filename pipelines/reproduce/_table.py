"""The table of experiments: an entry here is all that makes one."""

from dataclasses import replace
from typing import final

from pipelines.reproduce import growth
from pipelines.reproduce._experiment import Experiment
from pipelines.reproduce.accuracy_per_second import experiment as accuracy_per_second
from pipelines.reproduce.ananke import experiment as ananke
from pipelines.reproduce.around import experiment as around
from pipelines.reproduce.between_nodes import experiment as between_nodes
from pipelines.reproduce.beyond_memory import experiment as beyond_memory
from pipelines.reproduce.calibration import experiment as calibration
from pipelines.reproduce.ciq import _full as _ciq_full
from pipelines.reproduce.ciq import experiment as ciq
from pipelines.reproduce.clouds import experiment as clouds
from pipelines.reproduce.clusters import experiment as clusters
from pipelines.reproduce.defaults import experiment as defaults
from pipelines.reproduce.derivatives import experiment as derivatives
from pipelines.reproduce.dust import experiment as dust
from pipelines.reproduce.engines import experiment as engines
from pipelines.reproduce.export_scale import experiment as export_scale
from pipelines.reproduce.families import experiment as families
from pipelines.reproduce.fine_skies import experiment as fine_skies
from pipelines.reproduce.flights import experiment as flights
from pipelines.reproduce.fuzz import experiment as fuzz
from pipelines.reproduce.gpu import experiment as gpu
from pipelines.reproduce.groups import experiment as groups
from pipelines.reproduce.heaton import experiment as heaton
from pipelines.reproduce.kernels import experiment as kernels
from pipelines.reproduce.kills import experiment as kills
from pipelines.reproduce.lengths import experiment as lengths
from pipelines.reproduce.levels import experiment as levels
from pipelines.reproduce.local_bubble import experiment as local_bubble
from pipelines.reproduce.lognormal import experiment as lognormal
from pipelines.reproduce.masses import experiment as masses
from pipelines.reproduce.memory import experiment as memory
from pipelines.reproduce.nll_per_second import experiment as nll_per_second
from pipelines.reproduce.paper_scale import experiment as paper_scale
from pipelines.reproduce.preconditioner import experiment as preconditioner
from pipelines.reproduce.prices import experiment as prices
from pipelines.reproduce.roads import experiment as roads
from pipelines.reproduce.scaling import experiment as scaling
from pipelines.reproduce.seams import experiment as seams
from pipelines.reproduce.selection import experiment as selection
from pipelines.reproduce.skies import experiment as skies
from pipelines.reproduce.spatial import experiment as spatial
from pipelines.reproduce.speed import experiment as speed
from pipelines.reproduce.ten_million import experiment as ten_million
from pipelines.reproduce.whitening import experiment as whitening

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "preconditioner",
        "CG and PCG steps on Toeplitz systems (HIP-GP paper, 5.1 and C.1)",
        preconditioner.run,
    ),
    Experiment(
        "whitening",
        "seconds to whiten 200 observations, M = 10³ to 10⁶, beside Cholesky and CIQ (5.2, C.2)",
        whitening.run,
    ),
    Experiment(
        "derivatives",
        "values and derivatives in one fit: HIP-GP, SVGP and the exact GP (5.3)",
        derivatives.run,
    ),
    Experiment(
        "spatial",
        "house prices and land temperature: error and time against M (5.4)",
        spatial.run,
    ),
    Experiment(
        "roads",
        "altitudes of roads: HIP-GP, SGPR, SVGP, the exact GP and the global engine (C.3)",
        roads.run,
    ),
    Experiment(
        "dust",
        "the interstellar dust map against SVGP and the exact GP (5.5)",
        dust.run,
    ),
    Experiment(
        "families",
        "standard deviations of the inducing engine's families; minibatches of ranks",
        families.run,
    ),
    Experiment(
        "ananke",
        "the global engine on 4,000 stars, learning included, against the dense exact GP",
        ananke.run,
    ),
    Experiment(
        "accuracy_per_second",
        "error against time: exact GP, HIP-GP, SVGP, KISS-GP and the global engine",
        accuracy_per_second.run,
    ),
    Experiment(
        "nll_per_second",
        "held-out NLL against seconds, learning included: grids beside SVGP, SGPR and the exact GP",
        nll_per_second.run,
    ),
    Experiment(
        "lognormal",
        "positive densities beside NIFTy.re on simulated skies of 32³ nodes",
        lognormal.run,
    ),
    Experiment(
        "ciq",
        "SVGP whitened by Cholesky, CIQ and on a grid, beside gpytorch's: time and NLL against M",
        ciq.run,
        _ciq_full.run,
    ),
    Experiment(
        "flights",
        "delays of 499,011 flights: SVGP against M, beside GPs of subsets, gpytorch and trees",
        flights.run,
    ),
    Experiment(
        "prices",
        "prices of houses: the regressor's engines beside gpytorch's and scikit-learn's",
        prices.run,
    ),
    Experiment(
        "engines",
        "every engine on nine tables of 500 to 10,000 rows, 1 to 8 columns: what auto takes",
        engines.run,
        engines.run_full,
    ),
    Experiment(
        "clouds",
        "balls of dust at known places in a turbulent medium: distances of clouds of the map",
        clouds.run,
    ),
    Experiment(
        "clusters",
        "a real map: dust from open clusters, judged by held-out ones and by Dias et al. (2021)",
        clusters.run,
    ),
    Experiment(
        "local_bubble",
        "a real map: the Local Bubble from Hipparcos stars, and distances of clouds around it",
        local_bubble.run,
    ),
    Experiment(
        "calibration",
        "what fits claim, beside Gibbs sampling, dense algebra and quadrature; before and after",
        calibration.run,
    ),
    Experiment(
        "defaults",
        "turbulent skies of 20,000 stars with default settings, beside an earlier version's",
        defaults.run,
    ),
    Experiment(
        "levels",
        "near and far: levels of resolution beside one grid and tiles; growth with stars and nodes",
        levels.run,
    ),
    Experiment(
        "ten_million",
        "stars by the million on levels, as means of cells: what that loses, growth, ten million",
        ten_million.run,
    ),
    Experiment(
        "masses",
        "masses of dense clouds in maps over the true ones, against resolution, stars and noise",
        masses.run,
    ),
    Experiment(
        "around",
        "boxes beyond which most stars are, with and without nodes around them",
        around.run,
    ),
    Experiment(
        "fine_skies",
        "dust that is finer than the grid of its starting length, and the grid that stars ask for",
        fine_skies.run,
    ),
    Experiment(
        "kernels",
        "kernels that stars choose, beside kernels by name, on skies that no kernel has drawn",
        kernels.run,
    ),
    Experiment(
        "skies",
        "calibration of extinctions and densities on simulated skies, with parallaxes",
        skies.run,
    ),
    Experiment(
        "between_nodes",
        "skies finer than the grid: extinctions with and without what lies between the nodes",
        between_nodes.run,
    ),
    Experiment(
        "lengths",
        "learned length scales of skies finer than the grid, and of skies on it",
        lengths.run,
    ),
    Experiment(
        "seams",
        "a sky fitted in 12 tiles and merged, beside the same sky fitted in one piece",
        seams.run,
    ),
    Experiment(
        "groups",
        "two surveys 0, 0.05 and 0.1 mag apart, mapped with and without zero points of groups",
        groups.run,
    ),
    Experiment(
        "selection",
        "a magnitude limit before a dense cloud, distances given extinctions, far columns",
        selection.run,
    ),
    Experiment(
        "paper_scale",
        "500,000 stars, 62,500 grid points: time and memory, hyperparameters known or learned",
        paper_scale.run,
    ),
    Experiment(
        "growth",
        "how time and memory grow with stars (to 2·10⁶) and grid points (to 4·10⁶)",
        growth.run,
    ),
    Experiment(
        "gpu",
        "products and fits of up to 2 million stars on a GPU, beside its host (needs one)",
        gpu.run,
    ),
    Experiment(
        "memory",
        "peak memory of runs beside what their plans had said, a process each",
        memory.run,
    ),
    Experiment(
        "export_scale",
        "296 million voxels of 12 samples to zarr and FITS: time, memory, speed of queries",
        export_scale.run,
    ),
    Experiment(
        "beyond_memory",
        "20 million stars ingested and streamed through a pass, 2 million fitted",
        beyond_memory.run,
    ),
    Experiment(
        "scaling",
        "fits over ranks and threads, products against stars and nodes, and projections",
        scaling.run,
    ),
    Experiment(
        "speed",
        "log-normal runs beside an earlier version, and their products beside the limit",
        speed.run,
    ),
    Experiment(
        "heaton",
        "two scenes of land temperature by the regressor as it comes, beside kriging",
        heaton.run,
    ),
    Experiment(
        "kills",
        "kill -9 at 50 moments of runs and 10 of ingests: what goes on gives the same bits",
        kills.run,
    ),
    Experiment(
        "fuzz",
        "10,000 broken files, stores, maps, runs, configurations and commands: read or refused",
        fuzz.run,
    ),
)


#: What the files of a run with the paper's settings are called, after the experiment's name.
FULL = "-full"


@final
class UnknownExperiment(Exception):
    """No experiment of the table has that name."""


def find(name: str) -> Experiment:
    """The experiment of that name; an error that lists them all when there is none."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    known = ", ".join(experiment.name for experiment in EXPERIMENTS)
    raise UnknownExperiment(f"no experiment is called {name!r}; there are {known}")


def find_full(name: str) -> Experiment:
    """The experiment with its paper's settings; an error that lists which have them."""
    experiment = find(name)
    if experiment.full is None:
        known = ", ".join(e.name for e in EXPERIMENTS if e.full is not None)
        raise UnknownExperiment(
            f"{name} has no settings but its own: leave out --full, which is for {known}"
        )
    return replace(experiment, name=name + FULL, run=experiment.full)
