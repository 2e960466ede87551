"""The table of experiments: an entry here is all that makes one."""

from pipelines.reproduce import derivatives, preconditioner
from pipelines.reproduce._experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "preconditioner",
        "CG and PCG steps on Toeplitz systems (HIP-GP paper, 5.1 and C.1)",
        preconditioner.run,
    ),
    Experiment(
        "derivatives",
        "values and derivatives in one fit: HIP-GP, SVGP and the exact GP (5.3)",
        derivatives.run,
    ),
)


def find(name: str) -> Experiment:
    """The experiment of that name; an error that lists them all when there is none."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    known = ", ".join(experiment.name for experiment in EXPERIMENTS)
    raise KeyError(f"no experiment is called {name!r}; there are {known}")
