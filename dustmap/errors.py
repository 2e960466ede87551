"""The one error that is the user's to mend."""

from typing import final


@final
class UserError(ValueError):
    """A value, a file or a configuration that cannot be used.

    The message says what was expected, what came instead, and what to do. Parsers and checks raise
    it; every other error but OSError and MemoryError is a fault of this package.
    """
