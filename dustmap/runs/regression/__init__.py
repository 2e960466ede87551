"""Runs of data.kind = "regression": from a table to a field, and the field reopened."""

from dustmap.runs.regression._run import RegressionResult as RegressionResult
from dustmap.runs.regression._run import open_regression as open_regression
from dustmap.runs.regression._run import prepare_regression as prepare_regression
