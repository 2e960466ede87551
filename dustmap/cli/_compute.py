"""--device, --dtype, --threads and --memory of commands that work on what is finished."""

import argparse
import os
from pathlib import Path

from dustmap import config as configuration
from dustmap.cli._parser import compute_overrides

#: More threads a core than this are a slip, and by the thousand they end the process.
_PER_CORE = 4


def computing(options: argparse.Namespace, path: Path) -> list[str]:
    """Sets the threads; the overrides of [compute] with which to open the run at `path`."""
    overrides, own = compute_overrides(options), path / "config.toml"
    if own.is_file():
        threads = configuration.load(own, overrides).compute.threads
        # The run's own number may be that of a larger machine.
        use_threads(threads if options.threads is not None else min(threads, _most_threads()))
    return overrides


def computing_on_map(options: argparse.Namespace, path: Path) -> configuration.ComputeConfig:
    """The same for a map in a file, which has float32 numbers on no device."""
    for name in ("device", "dtype"):
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name} is for runs, and {path} is a map: leave it out")
    compute = compute_alone(options)
    use_threads(compute.threads)
    return compute


def compute_alone(options: argparse.Namespace) -> configuration.ComputeConfig:
    """What the options say where no configuration is at hand."""
    anything = {"data": {"catalog": "stars.fits"}}
    return configuration.from_mapping(anything, compute_overrides(options)).compute


def use_threads(threads: int) -> None:
    """0: as many as torch takes."""
    most = _most_threads()
    if threads > most:
        raise ValueError(
            f"compute.threads = {threads} (--threads): expected at most {most}, {_PER_CORE} for "
            "each core of this machine, or 0 for as many as torch takes"
        )
    if threads:
        import torch

        torch.set_num_threads(threads)


def _most_threads() -> int:
    return _PER_CORE * (os.cpu_count() or 1)
