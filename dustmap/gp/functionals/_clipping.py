"""Rays against a box: where they enter and leave it, and what to do with those that leave."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

FACE_SLACK = 1e-6  # of the box: a ray that ends on a face but for round-off has not left it


@final
class OutsidePolicy(enum.Enum):
    """What happens to a ray that carries weight outside the box.

    PRIOR and TRUNCATE both keep the part inside: PRIOR expects of the rest what the prior expects,
    TRUNCATE nothing.
    """

    PRIOR = "prior"
    TRUNCATE = "truncate"
    DROP = "drop"
    ERROR = "error"


@final
@dataclass(frozen=True)
class Counts:
    """How many rays lost the part outside the box, and how many were left out."""

    truncated: int
    dropped: int


def chord(
    origin: Tensor, direction: Tensor, lower: Sequence[float], upper: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """First and last track coordinate of every ray inside the box: (N,); leave < enter if none."""
    dim = origin.shape[-1]
    if not len(lower) == len(upper) == dim:
        raise ValueError(
            f"lower and upper must have {dim} entries, got {len(lower)} and {len(upper)}."
        )
    low, high = (torch.tensor(v, dtype=torch.float64, device=origin.device) for v in (lower, upper))
    if not bool((high > low).all()):
        raise ValueError(f"upper must exceed lower on every axis, got {lower} and {upper}.")
    slack = FACE_SLACK * (high - low)
    moving = direction != 0
    speed = torch.where(moving, direction, torch.ones_like(direction))
    faces = torch.stack([(low - origin) / speed, (high - origin) / speed])
    within = (origin >= low - slack) & (origin <= high + slack)
    always = torch.full_like(speed, torch.inf)
    never = -always
    enter = torch.where(moving, faces.amin(0), torch.where(within, never, always))
    leave = torch.where(moving, faces.amax(0), torch.where(within, always, never))
    return enter.amax(-1), leave.amin(-1)
