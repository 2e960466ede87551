"""Division of work: progress, chunks that adapt to the memory, tiles of a grid, random numbers.

These are the same however work is divided: they are addressed by their keys, or drawn in turn.
"""

import ctypes
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from dustmap.errors import UserError

#: The logger of halvings.
HALVED = __name__
log = logging.getLogger(HALVED)

#: Blocks of a processor's cache that make one of an accelerator.
_ACCELERATED = 2**8
#: Times that the chunks of one step may be halved.
HALVINGS = 3
#: Bytes from which on it is worth while to return those that are free.
_WORTH = 2**26
#: What torch's allocator of the CPU says in a RuntimeError when there is nothing left.
_CPU_SAYS = "can't allocate memory"

#: Progress of a long computation, which a command line shows as bars or lines: (what is being
#: done, parts done, parts in all); the last call has as many done as there are. What has no parts
#: is one, and what may end before all of its parts has a name that ends with AT_MOST.
Progress: TypeAlias = Callable[[str, int, int], None]
#: Its parts in solvers: right-hand sides, steps of those at work, products with vectors.
SOLVES, STEPS, PRODUCTS = "solves", "steps of CG", "products for the preconditioner"

#: The end of the name of what may converge before all of its parts are done.
AT_MOST = ", at most"

# Constants of SplitMix64: the increment of its counter and the two multipliers of its mixer.
_GOLDEN = 0x9E3779B97F4A7C15
_MIXER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_WORD = 2**64

# Numbers are made in aligned blocks of this many, each from its start to a multiple of _PART: the
# last bits of torch's log and cos depend on where in a vector an element is. A block is below
# torch's threshold for several threads; a part is whole vectors on every processor.
_BLOCK, _PART = 2**14, 2**9

T = TypeVar("T")


def unwatched(what: str, done: int, total: int) -> None:
    """Ignore progress: the default of whatever reports any."""


@contextmanager
def in_one_part(progress: Progress, what: str) -> Iterator[None]:
    """Report what the block does as one part, whose end is not known before.

    Examples
    --------
    >>> with in_one_part(print, "reading"):
    ...     pass
    reading 0 1
    reading 1 1
    """
    progress(what, 0, 1)
    try:
        yield
    finally:
        progress(what, 1, 1)


def return_memory(joined: int) -> None:
    """Return to the system what the parts of something of `joined` bytes have left behind.

    The C library keeps freed pieces that lie below others: for parts of a matrix as much again as
    three quarters of it (200,000 rows of 180 entries). Nothing where it cannot be asked to.
    """
    if joined < _WORTH:
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(0)


@final
class OutOfMemory(Exception):
    """Memory ran out in the smallest chunks too; the message says in what, and what to set."""


def chunks(n: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` rows covering range(n)."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def watched_chunks(n: int, size: int, what: str, progress: Progress) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` rows covering range(n), and tell the progress."""
    for part in chunks(n, size):
        progress(what, part.start, n)
        yield part
    progress(what, n, n)


def numbers_together(in_cache: int, device: torch.device) -> int:
    """Count the numbers of a block: as many as stay in a processor's cache, or enough to keep an
    accelerator at work beside the start of each of its kernels.

    Examples
    --------
    >>> numbers_together(2**14, torch.device("cpu")), numbers_together(2**14, torch.device("cuda"))
    (16384, 4194304)
    """
    return in_cache if device.type == "cpu" else _ACCELERATED * in_cache


@final
class AdaptiveBatch:
    """The size of the chunks of one step: halved when one runs out of memory, HALVINGS times.

    what: the step, for people; advice: what to set where halving does not help. The size stays
    small for the chunks that follow. Every halving is one warning of the logger of this module,
    which a run counts for its report.
    """

    def __init__(self, what: str, size: int, advice: str) -> None:
        if size < 1:
            raise UserError(f"{what}: expected chunks of at least 1, got {size}")
        self.what, self.size, self.advice = what, size, advice
        self.halvings = 0

    def attempt(self, step: Callable[[int], T]) -> T:
        """step(size), again with half the size where that was too much.

        A step that fails must leave nothing behind that a second one would meet.
        """
        while True:
            try:
                return step(self.size)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                first = " ".join(str(error).split())[:200]
            # Outside of the handler, whose traceback would keep alive what the step had made.
            if self.halvings >= HALVINGS or self.size == 1:
                raise OutOfMemory(
                    f"out of memory in {self.what}, in chunks of {self.size} too: {self.advice} "
                    f"({first})"
                )
            self.size, self.halvings = (self.size + 1) // 2, self.halvings + 1
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            what = self.what
            log.warning("out of memory in %s: again in chunks of %d (%s)", what, self.size, first)

    def in_groups(self, count: int, step: Callable[[slice], T]) -> list[T]:
        """step of one group of items after the other, in their order; of an empty one where there
        are none."""
        results = list[T]()
        first = 0
        while first < count or not results:

            def attempt(size: int, first: int = first) -> tuple[int, T]:
                part = slice(first, min(first + size, count))
                return part.stop, step(part)

            first, made = self.attempt(attempt)
            results.append(made)
        return results


def out_of_memory(error: BaseException) -> bool:
    """Tell whether this is memory that ran out, on a CPU or a GPU, and no other failure."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_SAYS in str(error)


@final
@dataclass(frozen=True)
class TilePartition:
    """The points of a grid (L1, …, LD) in B blocks of at most t1 × … × tD neighbours.

    Blocks and the points in a block are in C order. A tile that is longer than the grid is as
    long as the grid; where tiles do not divide the grid the last ones are filled with zeros.

    Examples
    --------
    >>> tiles = TilePartition(shape=(2, 4), tile=(2, 2))
    >>> tiles.to_blocks(torch.arange(8))
    tensor([[0, 1, 4, 5],
            [2, 3, 6, 7]])
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.tile) or not self.shape:
            raise UserError(
                f"tile: expected one length per grid axis, {len(self.shape)}, got {self.tile}"
            )
        if min(self.shape) < 1 or min(self.tile) < 1:
            raise UserError(
                f"TilePartition: expected lengths >= 1, got shape {self.shape}, tile {self.tile}"
            )

    @property
    def n_blocks(self) -> int:
        """B."""
        return math.prod(self._counts)

    @property
    def block_size(self) -> int:
        """M_b."""
        return math.prod(self._tile)

    def to_blocks(self, x: Tensor) -> Tensor:
        """Return the grid vectors x (..., L) as blocks (..., B, M_b)."""
        if x.ndim == 0 or x.shape[-1] != math.prod(self.shape):
            raise UserError(
                f"x: expected vectors of length {math.prod(self.shape)} on the last axis for grid "
                f"{self.shape}, got shape {tuple(x.shape)}"
            )
        batch = x.shape[:-1]
        excess = [c * t - n for c, t, n in zip(self._counts, self._tile, self.shape, strict=True)]
        padding = [width for axis in reversed(excess) for width in (0, axis)]
        split = torch.nn.functional.pad(x.reshape(-1, *self.shape), padding)
        for axis, length in enumerate(self._tile, start=1):  # to (batch, n1, n2, …, t1, t2, …)
            split = split.unfold(axis, length, length)
        return split.reshape(*batch, self.n_blocks, self.block_size)

    def from_blocks(self, blocks: Tensor) -> Tensor:
        """Return the blocks (..., B, M_b) as grid vectors (..., L): the inverse of `to_blocks`."""
        if tuple(blocks.shape[-2:]) != (self.n_blocks, self.block_size):
            raise UserError(
                f"blocks: expected (..., {self.n_blocks}, {self.block_size}), "
                f"got shape {tuple(blocks.shape)}"
            )
        batch = blocks.shape[:-2]
        dim = len(self.shape)
        order = [0, *(axis for k in range(1, dim + 1) for axis in (k, dim + k))]
        split = blocks.reshape(-1, *self._counts, *self._tile).permute(order)
        lengths = [c * t for c, t in zip(self._counts, self._tile, strict=True)]
        grid = split.reshape(-1, *lengths)[:, *(slice(n) for n in self.shape)]
        return grid.reshape(*batch, math.prod(self.shape))

    @property
    def _tile(self) -> tuple[int, ...]:
        return tuple(min(t, n) for t, n in zip(self.tile, self.shape, strict=True))

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(-(-n // t) for t, n in zip(self._tile, self.shape, strict=True))


@final
@dataclass(frozen=True)
class KeyedNormal:
    """Standard normal numbers z(seed, stream, sample, position), each a function of its key alone.

        h_i = mix(k + i·γ),   k = mix(mix(mix(seed) + stream) + sample),   γ the golden ratio
        z_2j + i z_2j+1 = √(−2 ln u_2j) exp(2π i u_2j+1),   u_i = (h_i / 2¹¹ + ½) / 2⁵³

    SplitMix64 as a counter, then Box–Muller in float64. Whoever asks for positions in whatever
    chunks, on however many processes, gets the same numbers; they are made on the CPU, so every
    device gets the same too, and float32 numbers are rounded float64 ones. Each use of random
    numbers has a stream of its own.

    Reference: Steele, Lea & Flood (2014), "Fast splittable pseudorandom number generators".

    Examples
    --------
    >>> z = KeyedNormal(seed=1, stream=0)
    >>> bool((z.draw(sample=3, size=10)[4:] == z.draw(sample=3, size=6, start=4)).all())
    True
    """

    seed: int
    stream: int

    def draw(
        self,
        sample: int,
        size: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        start: int = 0,
    ) -> Tensor:
        """Return the positions start … start + size − 1 of a sample: (size,)."""
        if size < 0 or start < 0 or sample < 0:
            raise UserError(
                "KeyedNormal.draw: expected sample, size and start >= 0, got "
                f"sample={sample}, size={size}, start={start}"
            )
        key = _mix(_mix(_mix(self.seed % _WORD) + self.stream) + sample)
        result = torch.empty(size, dtype=dtype)
        for first in range(start - start % _BLOCK, start + size, _BLOCK):
            low, high = max(start, first), min(start + size, first + _BLOCK)
            counter = torch.arange(-(-(high - first) // _PART) * _PART) * _signed(_GOLDEN)
            numbers = _normal(counter + _signed(key + first * _GOLDEN))
            result[low - start : high - start] = numbers[low - first : high - first]
        return result.to(device)


@final
class KeptNumbers:
    """Random numbers of samples, kept for the next time as far as `most` bytes go.

    They are the same whether they are kept or not; samples are drawn again and again.

    Examples
    --------
    >>> numbers, like = KeptNumbers(most=2**20), torch.zeros(1, dtype=torch.float64)
    >>> drawn = [numbers.draw(seed=1, stream=0, sample=3, size=n, like=like) for n in (10, 6)]
    >>> bool((drawn[0][:6] == drawn[1]).all())
    True
    """

    def __init__(self, most: int) -> None:
        self._left, self._kept = most, dict[tuple[int, int, int], Tensor]()

    def draw(self, seed: int, stream: int, sample: int, size: int, like: Tensor) -> Tensor:
        """Return the first `size` numbers of a sample, in dtype and on the device of `like`."""
        key = seed, stream, sample
        known = self._kept.get(key)
        if known is not None and len(known) >= size:
            return known[:size]
        made = KeyedNormal(seed, stream).draw(sample, size, like.dtype, like.device)
        more = made.nbytes - (0 if known is None else known.nbytes)
        if more <= self._left:
            self._left -= more
            self._kept[key] = made
        return made


def standard_normal(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """z ~ N(0, I) of this shape, dtype and device of `like`: a generator gives every device the
    same numbers."""
    drawn = torch.randn(
        tuple(shape), dtype=like.dtype, device=generator.device, generator=generator
    )
    return drawn.to(like.device)


def counter_uniform(seed: int, key: Tensor, counter: Tensor) -> Tensor:
    """Return the uniform numbers in [0, 1) as a pure function of (seed, key, counter), float64."""
    golden = _signed(_GOLDEN)
    state = _mixed(torch.full_like(key, _signed(seed)) + golden)
    state = _mixed((_mixed((state ^ key) + golden) ^ counter) + golden)
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def counter_normal(seed: int, key: Tensor, counter: Tensor) -> Tensor:
    """Return the standard normal numbers (...) with the probabilities of `counter_uniform`."""
    normal: Tensor = torch.special.ndtri(counter_uniform(seed, key, counter) + 2.0**-54)
    return normal


def keyed_normal(seed: int, keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers (count, N) as a pure function of (seed, keys (N,), i), float64."""
    draw = torch.arange(count, device=keys.device)
    return counter_normal(seed, keys[None], draw[:, None])


def _normal(state: Tensor) -> Tensor:
    """Standard normal numbers of states (K,) int64, K even, by Box–Muller over neighbours."""
    uniform = (_shifted(_mixed(state), 11).double() + 0.5) * 2.0**-53
    radius = uniform[0::2].log().mul_(-2.0).sqrt_()
    angle = uniform[1::2] * (2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()


def _mixed(state: Tensor) -> Tensor:
    """Apply SplitMix64's mixer to words int64, whose products wrap around."""
    for shift, factor in _MIXER:
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return state ^ _shifted(state, _LAST_SHIFT)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Return word >> bits with zeros coming in: torch has signed integers only."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _mix(word: int) -> int:
    """Apply SplitMix64's mixer to one word, after one step of its counter."""
    word = (word + _GOLDEN) % _WORD
    for shift, factor in _MIXER:
        word = (word ^ (word >> shift)) * factor % _WORD
    return word ^ (word >> _LAST_SHIFT)


def _signed(word: int) -> int:
    """Return the 64 bits of `word` as torch's int64."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
