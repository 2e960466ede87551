"""Random numbers: addressed by their keys, or drawn in turn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError

# Constants of SplitMix64: the increment of its counter and the two multipliers of its mixer.
_GOLDEN = 0x9E3779B97F4A7C15
_MIXER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_WORD = 2**64

# Numbers are made in aligned blocks of this many, each from its start to a multiple of _PART: the
# last bits of torch's log and cos depend on where in a vector an element is. A block is below
# torch's threshold for several threads; a part is whole vectors on every processor.
_BLOCK, _PART = 2**14, 2**9


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


def keyed_normal(seed: int, keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers (count, N) as a pure function of (seed, keys (N,), i), float64."""
    draw = torch.arange(count, device=keys.device)
    uniform = counter_uniform(seed, keys[None], draw[:, None])
    normal: Tensor = torch.special.ndtri(uniform + 2.0**-54)
    return normal


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
