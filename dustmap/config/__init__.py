"""Run configurations: read from TOML, checked, echoed and hashed.

The sections and their keys are declared in `dustmap.config._data` and `_schema`; they must agree as
`_agreement` says. `_values` parses values, `_config` reads and writes the whole.

Examples
--------
>>> config = from_mapping({"data": {"catalog": "stars.fits"}}, ["grid.spacing=0.02kpc"])
>>> config.grid.spacing, config.engine, config.resolved().model.noise
(20.0, 'lognormal', 'student-t')
>>> from pathlib import Path
>>> Path("run.toml").write_text(echo(config)) > 0  # as TOML, defaults included
True
>>> sha256(load("run.toml")) == sha256(config)  # what provenance has of it
True
>>> example().splitlines()[0]  # every key and what it is for
'# Where the data come from.'
"""

from dustmap.config._agreement import check_scatter_of_means as check_scatter_of_means
from dustmap.config._config import Config as Config
from dustmap.config._config import echo as echo
from dustmap.config._config import example as example
from dustmap.config._config import from_mapping as from_mapping
from dustmap.config._config import load as load
from dustmap.config._config import parsecs as parsecs
from dustmap.config._config import sha256 as sha256
from dustmap.config._data import DataConfig as DataConfig
from dustmap.config._idle import idle_keys as idle_keys
from dustmap.config._schema import STAR_FIGURES as STAR_FIGURES
from dustmap.config._schema import Boxes as Boxes
from dustmap.config._schema import ComputeConfig as ComputeConfig
from dustmap.config._schema import ExportConfig as ExportConfig
from dustmap.config._schema import FitConfig as FitConfig
from dustmap.config._schema import GridConfig as GridConfig
from dustmap.config._schema import ModelConfig as ModelConfig
from dustmap.config._values import AUTO as AUTO
