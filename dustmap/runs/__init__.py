"""Runs: a configuration in, a directory with map, pictures and report out.

`prepare` reads and checks what a configuration names, by its data.kind; the run it returns says
what it would do (`plan`) and does it (`execute_run`). A `RunDirectory` keeps what a run made, and
`open_run` brings its posterior back.
"""

from dustmap.runs._directory import RunDirectory as RunDirectory
from dustmap.runs._dispatch import execute_run as execute_run
from dustmap.runs._dispatch import open_run as open_run
from dustmap.runs._dispatch import open_star_map as open_star_map
from dustmap.runs._dispatch import prepare as prepare
from dustmap.runs._dispatch import regression_at as regression_at
from dustmap.runs._kept_file import UnusableState as UnusableState
from dustmap.runs._life import check_free as check_free
from dustmap.runs._life import check_resumable as check_resumable
from dustmap.runs._life import report_of as report_of
from dustmap.runs._memory import Component as Component
from dustmap.runs._memory import During as During
from dustmap.runs._memory import MemoryPlan as MemoryPlan
from dustmap.runs._plans import export_plan as export_plan
from dustmap.runs._plans import sky_plan as sky_plan
from dustmap.runs._prior_sky import prior_sky as prior_sky
from dustmap.runs._progress import LogProgress as LogProgress
from dustmap.runs._progress import Progress as Progress
from dustmap.runs._progress import WatchedField as WatchedField
from dustmap.runs._ranks import ranks_of as ranks_of
from dustmap.runs._regression_result import RegressionResult as RegressionResult
from dustmap.runs._report import Check as Check
from dustmap.runs._report import Report as Report
from dustmap.runs._run import AbstractFinishedRun as AbstractFinishedRun
from dustmap.runs._run import AbstractRun as AbstractRun
from dustmap.runs._run import Plan as Plan
from dustmap.runs._stages import Stage as Stage
from dustmap.runs._star_export import write_in_slabs as write_in_slabs
from dustmap.runs._star_input import places_of as places_of
from dustmap.runs._star_map import StarMap as StarMap
from dustmap.runs._status import RunStatus as RunStatus
from dustmap.runs._status import status_of as status_of
from dustmap.runs._tile_merge import sky_of_tiles as sky_of_tiles
