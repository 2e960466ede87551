"""What a run leaves on disk: its directory, its lock, and the states that it goes on from."""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.runs.kept._directory import RunDirectory as RunDirectory
    from dustmap.runs.kept._file import UnusableState as UnusableState
    from dustmap.runs.kept._journal import Notice as Notice
    from dustmap.runs.kept._journal import Undisturbed as Undisturbed
    from dustmap.runs.kept._life import check_free as check_free
    from dustmap.runs.kept._life import check_resumable as check_resumable
    from dustmap.runs.kept._life import finish as finish
    from dustmap.runs.kept._life import going_on as going_on
    from dustmap.runs.kept._life import refuse_unfinished as refuse_unfinished
    from dustmap.runs.kept._life import starting as starting
    from dustmap.runs.kept._opening import opening as opening
    from dustmap.runs.kept._rank_journal import following as following
    from dustmap.runs.kept._rank_journal import led as led
    from dustmap.runs.kept._reopened import reopened_config as reopened_config
    from dustmap.runs.kept._status import RunStatus as RunStatus
    from dustmap.runs.kept._status import status_of as status_of
    from dustmap.runs.kept._written import CONFIG as CONFIG
    from dustmap.runs.kept._written import REPORT as REPORT
    from dustmap.runs.kept._written import report_of as report_of
else:
    __getattr__, __dir__ = on_use(__name__)
