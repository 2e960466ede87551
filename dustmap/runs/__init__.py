"""Runs: a configuration in, a directory with map, pictures and report out.

`prepare` reads and checks what a configuration names, by its data.kind; the run that it returns has
a `plan`, and `execute_run` executes it. A `RunDirectory` holds what a run made, and `open_run`
brings its posterior back.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.runs._interface import AbstractFinishedRun as AbstractFinishedRun
    from dustmap.runs._interface import AbstractRun as AbstractRun
    from dustmap.runs._interface import Plan as Plan
    from dustmap.runs._machine import choose_threads as choose_threads
    from dustmap.runs._machine import keep_freed_memory as keep_freed_memory
    from dustmap.runs._machine import ranks_of as ranks_of
    from dustmap.runs._run import check_export as check_export
    from dustmap.runs._run import execute_run as execute_run
    from dustmap.runs._run import export_plan as export_plan
    from dustmap.runs._run import open_run as open_run
    from dustmap.runs._run import open_star_map as open_star_map
    from dustmap.runs._run import prepare as prepare
    from dustmap.runs._run import regression_at as regression_at
    from dustmap.runs._run import sky_plan as sky_plan
    from dustmap.runs.checkpoints import RunDirectory as RunDirectory
    from dustmap.runs.checkpoints import RunStatus as RunStatus
    from dustmap.runs.checkpoints import check_free as check_free
    from dustmap.runs.checkpoints import check_resumable as check_resumable
    from dustmap.runs.checkpoints import report_of as report_of
    from dustmap.runs.checkpoints import status_of as status_of
    from dustmap.runs.regression import RegressionResult as RegressionResult
    from dustmap.runs.reports import Check as Check
    from dustmap.runs.reports import LogProgress as LogProgress
    from dustmap.runs.reports import Progress as Progress
    from dustmap.runs.reports import Report as Report
    from dustmap.runs.reports import Stage as Stage
    from dustmap.runs.reports import WatchedField as WatchedField
    from dustmap.runs.stars import StarMap as StarMap
    from dustmap.runs.stars import places_of as places_of
    from dustmap.runs.stars import places_of_map as places_of_map
    from dustmap.runs.stars import prior_sky as prior_sky
    from dustmap.runs.stars import sky_of_tiles as sky_of_tiles
    from dustmap.runs.stars import store_checks as store_checks
    from dustmap.runs.stars import write_in_slabs as write_in_slabs
else:
    __getattr__, __dir__ = on_use(__name__)
