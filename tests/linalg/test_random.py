import math

import pytest
import scipy.stats
import torch

from dustmap.linalg import KeyedNormal

MASK = 2**64 - 1


def _mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _reference(seed: int, stream: int, sample: int, position: int) -> float:
    """One number, in Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = 0
    for part in (seed, stream, sample):
        key = _mixed((key + part + golden) & MASK)
    even = position - position % 2
    u, v = (((_mixed((key + i * golden) & MASK) >> 11) + 0.5) * 2.0**-53 for i in (even, even + 1))
    turn = math.sin if position % 2 else math.cos
    return math.sqrt(-2 * math.log(u)) * turn(2 * math.pi * v)


def test_mixer_is_splitmix64() -> None:
    """The generator's published first output for seed 1234567."""
    assert _mixed(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317


@pytest.mark.parametrize("position", [0, 1, 2, 777, 16_383, 16_384, 70_001])
def test_equals_the_definition(position: int) -> None:
    for seed, stream, sample in ((0, 0, 0), (5, 2, 31), (2**63 + 11, 7, 1)):
        value = KeyedNormal(seed, stream).draw(sample, 1, start=position)
        expected = _reference(seed, stream, sample, position)
        torch.testing.assert_close(float(value), expected, rtol=1e-12, atol=1e-13)


def test_chunks_do_not_change_a_bit() -> None:
    normal = KeyedNormal(3, 1)
    whole = normal.draw(4, 50_000)
    for size in (1_237, 16_384, 20_001):
        chunks = [
            normal.draw(4, min(size, 50_000 - start), start=start)
            for start in range(0, 50_000, size)
        ]
        assert torch.equal(torch.cat(chunks), whole)
    for size in (1, 2, 3, 511, 513, 1_000, 16_000):
        assert torch.equal(normal.draw(4, size), whole[:size])
    for start in (0, 1, 16_383, 33_000):
        assert torch.equal(normal.draw(4, 1, start=start), whole[start : start + 1])


def test_single_precision_is_rounded_double() -> None:
    normal = KeyedNormal(3, 1)
    single = normal.draw(0, 1000, torch.float32)
    assert single.dtype == torch.float32
    assert torch.equal(single, normal.draw(0, 1000).float())


def test_numbers_are_standard_normal() -> None:
    z = KeyedNormal(0, 0).draw(0, 400_000)
    assert scipy.stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    count = len(z)
    # Moments within 4 of their standard errors.
    assert abs(float(z.mean())) < 4 / math.sqrt(count)
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / count)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / count)
    for lag in (1, 2, 3, 16_384):
        assert abs(float((z[lag:] * z[:-lag]).mean())) < 4 / math.sqrt(count - lag)


def test_streams_samples_and_seeds_are_independent() -> None:
    count = 50_000
    draws = torch.stack(
        [
            KeyedNormal(seed, stream).draw(sample, count)
            for seed in (0, 1)
            for stream in (0, 1, 2)
            for sample in (0, 1, 2)
        ]
    )
    correlation = draws @ draws.mT / count
    off = correlation[~torch.eye(len(draws), dtype=torch.bool)]
    assert float(off.abs().max()) < 5 / math.sqrt(count)
    assert not bool(
        (draws[:, :100].unsqueeze(0) == draws[:, :100].unsqueeze(1)).all(2).triu(1).any()
    )


def test_empty_and_bad_requests() -> None:
    normal = KeyedNormal(0, 0)
    assert normal.draw(0, 0).shape == (0,)
    with pytest.raises(ValueError, match="expected sample, size and start >= 0, got"):
        normal.draw(0, -1)
    with pytest.raises(ValueError, match="start=-2"):
        normal.draw(0, 1, start=-2)
