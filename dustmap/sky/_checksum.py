"""CHECKSUM and DATASUM of a FITS unit whose data are too large to hold, from its bytes in pieces.

Both follow appendix J of the FITS standard 4.0: a sum of 32-bit words in ones' complement, and its
complement written in sixteen letters and digits, so that the whole unit sums to zero.
"""

from typing import BinaryIO

import numpy as np

_MODULUS = 2**32 - 1  # a carry out of 32 bits is added back at the right
_PIECE = 2880 * 4096  # bytes read at once
# Punctuation between the digits, the capitals and the small letters of ASCII.
_EXCLUDED = frozenset(range(0x3A, 0x41)) | frozenset(range(0x5B, 0x61))


def words_sum(data: bytes, start: int = 0) -> int:
    """Sum of the big-endian words of `data`, of a length divisible by 4, on top of `start`."""
    return folded(int(np.frombuffer(data, ">u4").sum(dtype=np.uint64)) + start)


def folded(total: int) -> int:
    """What a plain sum of words, or of sums of parts, is in ones' complement."""
    # Not a plain remainder: all ones stands for zero only where every word is.
    return (total - 1) % _MODULUS + 1 if total else 0


def file_sum(file: BinaryIO, offset: int, length: int) -> int:
    """`words_sum` of `length` bytes of an open file from `offset`."""
    total = 0
    file.seek(offset)
    while length:
        piece = file.read(min(length, _PIECE))
        if not piece:
            raise OSError(f"{file.name} ends {length} bytes before the end of its data")
        total = words_sum(piece, total)
        length -= len(piece)
    return total


def encoded(total: int) -> str:
    """The value of CHECKSUM that brings a unit of sum `total`, with sixteen zeros there, to zero.

    Each byte of the complement is shared by four characters, which stand four apart; one is
    raised as another is lowered until none is punctuation; the whole turns right by one, as the
    value starts in the last byte of a word.
    """
    columns = [_four_characters(byte) for byte in (_MODULUS - total).to_bytes(4, "big")]
    text = "".join(chr(columns[i][j]) for j in range(4) for i in range(4))
    return text[-1] + text[:-1]


def _four_characters(byte: int) -> list[int]:
    quarter, rest = divmod(byte, 4)
    codes = [quarter + rest + 0x30, quarter + 0x30, quarter + 0x30, quarter + 0x30]
    for i in (0, 2):
        while codes[i] in _EXCLUDED or codes[i + 1] in _EXCLUDED:
            codes[i] += 1
            codes[i + 1] -= 1
    return codes
