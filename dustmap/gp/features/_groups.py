"""Rows of Φ a group at a time."""

from collections.abc import Iterator

import torch

from dustmap.gp.features._base import Features, SolveSummary

#: Bytes of one array of a group. What rows are made of then stays near the processor, and its
#: memory is reused: arrays of more than 32 MB go back to the system, which hands out empty pages
#: each time, and that takes longer than the arithmetic.
GROUP_BYTES = 16 * 2**20


def rows_together(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows of `width` numbers make a group: any number on an accelerator."""
    if device.type != "cpu":
        return 2**62
    return max(1, GROUP_BYTES // (width * dtype.itemsize))


def gathered(groups: Iterator[Features], count: int) -> Features:
    """Consecutive groups as one, of `count` rows.

    Without a graph every group is written to its place as it comes, so that no row is held twice.
    """
    first = next(groups, None)
    if first is None:
        raise ValueError("the functional is empty: rows need at least one datum")
    if len(first.phi) == count:
        return first
    if first.phi.requires_grad:
        return _concatenated([first, *groups])
    phi = first.phi.new_empty(count, first.phi.shape[1])
    variance = first.residual_variance.new_empty(count)
    solves, start, clamped = SolveSummary(), 0, 0
    for group in _following(first, groups):
        stop = start + len(group.phi)
        phi[start:stop], variance[start:stop] = group.phi, group.residual_variance
        solves, start, clamped = solves.merged(group.solves), stop, clamped + group.clamped
    return Features(phi, variance, solves, clamped)


def _following(first: Features, groups: Iterator[Features]) -> Iterator[Features]:
    yield first
    yield from groups


def _concatenated(groups: list[Features]) -> Features:
    solves = SolveSummary()
    for group in groups:
        solves = solves.merged(group.solves)
    return Features(
        torch.cat([group.phi for group in groups]),
        torch.cat([group.residual_variance for group in groups]),
        solves,
        sum(group.clamped for group in groups),
    )
