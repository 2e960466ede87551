"""Runs of data.kind = "regression": from a table to a field, and the field reopened."""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.runs.regression._run import RegressionResult as RegressionResult
    from dustmap.runs.regression._run import open_regression as open_regression
    from dustmap.runs.regression._run import prepare_regression as prepare_regression
else:
    __getattr__, __dir__ = on_use(__name__)
