"""The size of a dense fit, known before anything large is allocated."""

import math

#: The dense engine never takes more rows.
MAX_DENSE = 10_000
#: Matrices of N × N float64: covariance, factor, and one at work.
_MATRICES = 3


def bytes_of_exact(n: int) -> int:
    """Bytes of a dense fit of n rows."""
    return _MATRICES * 8 * n**2


def most_exact(max_memory: int) -> int:
    """Rows of the largest dense fit."""
    return min(MAX_DENSE, math.isqrt(max_memory // (_MATRICES * 8)))


def check_exact(n: int, max_memory: int) -> None:
    """Refuses what does not fit."""
    if bytes_of_exact(n) > max_memory:
        raise MemoryError(
            f"the exact engine needs {bytes_of_exact(n):,} bytes for {n:,} rows; max_memory = "
            f'{max_memory:,}: raise it, use engine="svgp", or fit a random part of the rows'
        )
