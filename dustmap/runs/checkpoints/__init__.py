"""A run on disk: its directory, its lock and status, and the states that it is resumed from."""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.runs.checkpoints._directory import RunDirectory as RunDirectory
    from dustmap.runs.checkpoints._directory import check_free as check_free
    from dustmap.runs.checkpoints._directory import check_resumable as check_resumable
    from dustmap.runs.checkpoints._directory import finish as finish
    from dustmap.runs.checkpoints._directory import finished_run as finished_run
    from dustmap.runs.checkpoints._directory import joined_run as joined_run
    from dustmap.runs.checkpoints._directory import new_run as new_run
    from dustmap.runs.checkpoints._directory import resumed_run as resumed_run
    from dustmap.runs.checkpoints._directory import threads_of as threads_of
    from dustmap.runs.checkpoints._state_file import Notice as Notice
    from dustmap.runs.checkpoints._state_file import Undisturbed as Undisturbed
    from dustmap.runs.checkpoints._state_file import translating_damage as translating_damage
    from dustmap.runs.checkpoints._status import CONFIG as CONFIG
    from dustmap.runs.checkpoints._status import REPORT as REPORT
    from dustmap.runs.checkpoints._status import STATES as STATES
    from dustmap.runs.checkpoints._status import RunStatus as RunStatus
    from dustmap.runs.checkpoints._status import report_of as report_of
    from dustmap.runs.checkpoints._status import status_of as status_of
else:
    __getattr__, __dir__ = on_use(__name__)
