"""The configuration of a finished run, with what a later command says of where it computes."""

from collections.abc import Sequence

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.runs.checkpoints._directory import RunDirectory
from dustmap.runs.checkpoints._written import CONFIG


def reopened_config(directory: RunDirectory, overrides: Sequence[str]) -> Config:
    """The run's own, but for device, threads and memory as the overrides of [compute] say.

    The dtype stays: what the fit has left is of that precision, and more digits than it has would
    promise what is not there.
    """
    own = directory.config()
    config = configuration.load(directory.path / CONFIG, overrides)
    if config.compute.dtype != own.compute.dtype:
        raise UserError(
            f"--dtype {config.compute.dtype}: {directory.path} was fitted in {own.compute.dtype}, "
            f"and so is all that it is asked for; leave --dtype out, or fit it again"
        )
    return config
