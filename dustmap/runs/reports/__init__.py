"""Stages and progress of a run, calibration of its predictions, and reports (json, md, html)."""

from dustmap.linalg import Progress as Progress
from dustmap.runs.reports._page import VIEW as VIEW
from dustmap.runs.reports._page import page as page
from dustmap.runs.reports._progress import LogProgress as LogProgress
from dustmap.runs.reports._progress import Stage as Stage
from dustmap.runs.reports._progress import Stopwatch as Stopwatch
from dustmap.runs.reports._progress import WatchedField as WatchedField
from dustmap.runs.reports._progress import peak_memory as peak_memory
from dustmap.runs.reports._report import Check as Check
from dustmap.runs.reports._report import CoverageAdvice as CoverageAdvice
from dustmap.runs.reports._report import Picture as Picture
from dustmap.runs.reports._report import Report as Report
from dustmap.runs.reports._report import coverage_checks as coverage_checks
from dustmap.runs.reports._report import factor_check as factor_check
from dustmap.runs.reports._scores import MEASURED as MEASURED
from dustmap.runs.reports._scores import NOISE_FREE as NOISE_FREE
from dustmap.runs.reports._scores import Predictions as Predictions
from dustmap.runs.reports._scores import by_distance as by_distance
from dustmap.runs.reports._scores import calibration as calibration
from dustmap.runs.reports._scores import comparison_of as comparison_of
from dustmap.runs.reports._scores import correlation as correlation
from dustmap.runs.reports._scores import held_out_by_distance as held_out_by_distance
from dustmap.runs.reports._scores import held_out_sections as held_out_sections
from dustmap.runs.reports._scores import labelled as labelled
from dustmap.runs.reports._scores import quality_proxies as quality_proxies
