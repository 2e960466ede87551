"""The command `dustmap`. Each of its commands has an `add` (its parser) and an `execute`.

Exit codes: 0 done; 2 bad input or configuration, nothing written; 3 finished, but a check failed
(outputs written, named in report.json); 75 a run was asked to end by SIGTERM or SIGUSR1, and goes
on with --resume; 1 anything else.

torch and astropy take seconds to import, which help and configurations need not wait for: the
modules here import what computes inside `execute`, never at their top.
"""

import argparse
import errno
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from dustmap import __version__
from dustmap.cli import _analysis, _catalogs, _export, _options, _plot, _query, _run
from dustmap.cli._console import BAD_INPUT as BAD_INPUT
from dustmap.cli._console import CHECK_FAILED as CHECK_FAILED
from dustmap.cli._console import DONE as DONE
from dustmap.cli._console import FAILED as FAILED
from dustmap.cli._console import PREEMPTED as PREEMPTED
from dustmap.cli._console import STDOUT, Preempted, Terminated, chained, terminating
from dustmap.cli._options import Commands
from dustmap.errors import UserError

DESCRIPTION = """\
dustmap builds 3D dust maps; the dustmaps package queries published ones.

usage: dustmap COMMAND ...          dustmap COMMAND --help tells more of each"""
EPILOG = """\
Lengths accept 300pc and 0.3kpc; bare numbers are pc, degrees and mag.
Exit codes: 0 done; 2 bad input or configuration, nothing written; 3 finished, but a check failed
(see report.json); 75 pre-empted, to go on with run --resume; 1 anything else.

Example:
  dustmap simulate --stars 2000 --seed 1 --output sky.fits
  dustmap config --example > run.toml
  dustmap run run.toml --output run1 --set data.catalog=sky.fits --set 'grid.size=[400, 400, 240]'
  dustmap query run1 --l 30 --b 5 --distance 150pc"""


#: Commands in the order of a project: the function that adds the parser of each, and the one that
#: runs it on options and returns its exit code.
COMMANDS: dict[str, tuple[Callable[[Commands], None], Callable[[argparse.Namespace], int]]] = {
    "run": (_run.add_run, _run.execute_run),
    "status": (_run.add_status, _run.execute_status),
    "config": (_run.add_config, _run.execute_config),
    "catalogs": (_catalogs.add_catalogs, _catalogs.execute_catalogs),
    "simulate": (_catalogs.add_simulate, _catalogs.execute_simulate),
    "ingest": (_catalogs.add_ingest, _catalogs.execute_ingest),
    "evaluate": (_analysis.add_evaluate, _analysis.execute_evaluate),
    "predict": (_query.add_predict, _query.execute_predict),
    "export": (_export.add_export, _export.execute_export),
    "merge": (_export.add_merge, _export.execute_merge),
    "query": (_query.add_query, _query.execute_query),
    "plot": (_plot.add_plot, _plot.execute_plot),
    "view": (_plot.add_view, _plot.execute_view),
    "clouds": (_analysis.add_clouds, _analysis.execute_clouds),
    "compare": (_analysis.add_compare, _analysis.execute_compare),
    "completion": (_options.add_completion, _options.execute_completion),
}

log = logging.getLogger(__name__)

#: Errors of a machine, not of what it was given: a full disk, a quota or a limit of file sizes, a
#: disk that is broken or was mounted anew, and a server of files that is gone.
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
#: What numpy says where the disk takes a part of an array.
_CUT = re.compile(r"\d+ requested and \d+ written")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. What the user can mend is one line on stderr, a fault its traceback, too."""
    missing = _missing()
    if missing:
        return _fail(missing, BAD_INPUT)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser().parse_args(_values(typed), argparse.Namespace(arguments=typed))
    except OSError as error:  # the help could not be written
        return _fail(error, FAILED)
    except KeyboardInterrupt as error:
        return _fail("interrupted", FAILED, error)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of a locale that lacks ν and ±
            stream.reconfigure(errors="backslashreplace")
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("dustmap").setLevel(level)
    try:
        with terminating():
            _, execute = COMMANDS[options.command]
            return execute(options)
    except (UserError, OSError, MemoryError) as error:
        return _fail(_said(error), FAILED if _is_of_machine(error) else BAD_INPUT, error)
    except KeyboardInterrupt as error:
        return _fail("interrupted", FAILED, error)
    except Terminated:
        return _fail("terminated (SIGTERM)", FAILED)
    except Preempted:
        if getattr(options, "dry_run", False):  # which keeps nothing to go on with
            return _fail("terminated (SIGTERM)", FAILED)
        sys.stderr.write("dustmap: pre-empted: go on with --resume\n")
        return PREEMPTED
    except Exception as error:
        if _of_memory(error):
            return _fail(_said(error), FAILED, error)
        if not options.verbose:  # which shows that of every error
            traceback.print_exc()
        words = f"a fault of dustmap, please report it with the lines above: {error!r}"
        return _fail(words, FAILED, error)


def _missing() -> str:
    """Name the required packages that cannot be imported; empty where all can."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the very end
    if sys.stdout is None:
        return "stdout is closed, and answers go there: send it to a file or to /dev/null"
    if sys.flags.optimize > 1:
        return "python -OO takes the docstrings away that healpy reads: unset PYTHONOPTIMIZE"
    try:
        os.getcwd()
    except OSError as error:
        return f"the working directory is gone ({error.strerror}): cd to one that is there"
    return ""


def _values(arguments: Sequence[str]) -> list[str]:
    """Negative lengths for argparse, which takes -40pc for an option and " -40pc" for a value."""
    return [f" {a}" if re.fullmatch(r"-[\d.]+(e[-+]?\d+)?k?pc", a) else a for a in arguments]


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = _options.Command(
        prog="dustmap",
        usage=argparse.SUPPRESS,  # the description is to be the first line
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"dustmap {__version__}")
    commands = root.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="dustmap"
    )
    for add, _ in COMMANDS.values():
        add(commands)
    return root


def _said(error: Exception) -> str:
    """Return the message of an error; for a lack of memory also the remedy."""
    said = str(error) or type(error).__name__
    if _of_memory(error) and "--memory" not in said:
        return (
            f"out of memory: set a smaller --memory, fit.samples or box, or a larger grid.spacing; "
            f"`dustmap run --dry-run` tells what takes how much ({said[:200]})"
        )
    if isinstance(error, OSError) and error.filename and not _is_of_machine(error):
        return f"{error.filename}: {(error.strerror or said).lower()}"
    return said


def _is_of_machine(error: Exception) -> bool:
    """Whether it is an error of the machine, or of another rank, and not of what was given."""
    if isinstance(error, ConnectionError):
        return True
    if isinstance(error, OSError) and error.filename == STDOUT:
        return True
    # Those of astropy have the words of others, and not their numbers; those of numpy have words.
    return any(
        isinstance(each, OSError) and (each.errno in _LOST or _CUT.search(str(each)))
        for each in chained(error)
    )


def _of_memory(error: Exception) -> bool:
    return type(error).__name__.startswith("OutOfMemory") or "can't allocate memory" in str(error)


def _fail(what: object, code: int, error: BaseException | None = None) -> int:
    if error is not None:
        log.debug("the error in full:", exc_info=error)
    # An error is one line, whatever the library that raised it had to say, with the notes that were
    # added to it, such as how to go on.
    text = "; ".join((str(what), *getattr(error, "__notes__", ())))
    sys.stderr.write(f"dustmap: error: {' '.join(text.split())}\n")
    return code
