"""The experiments of the papers, each as one command with goals to reach.

`python -m pipelines.reproduce NAME` runs an experiment and writes `NAME.json` (settings, table,
goals, environment) and `NAME.png`. An experiment is a function from a `Request` to an `Outcome`,
entered once in the table of `_table.py`; it draws through `_figures`, times through `_timing`
and states what it set out to reach as `Goal`s. Files, printing and exit codes are left to
`__main__`.
"""

from pipelines.reproduce._experiment import Experiment as Experiment
from pipelines.reproduce._experiment import Goal as Goal
from pipelines.reproduce._experiment import MissingData as MissingData
from pipelines.reproduce._experiment import Outcome as Outcome
from pipelines.reproduce._experiment import Request as Request
from pipelines.reproduce._experiment import Row as Row
from pipelines.reproduce._experiment import number as number
from pipelines.reproduce._timing import Timing as Timing
from pipelines.reproduce._timing import stopwatch as stopwatch
from pipelines.reproduce._timing import time_call as time_call
from pipelines.reproduce._timing import time_together as time_together
