"""How a command ends: its exit code, and the error that means bad input."""

#: 3: finished, but a solver or a calibration check failed; outputs are written.
DONE, FAILED, BAD_INPUT, CHECK_FAILED = 0, 1, 2, 3


class BadInput(Exception):
    """What the user gave cannot be used, and nothing has been written."""
