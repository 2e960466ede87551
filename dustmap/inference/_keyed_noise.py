"""Standard normal numbers keyed by position."""

from typing import final

import torch
from torch import Tensor


@final
class KeyedNormal:
    """Numbers that depend only on (seed, stream, sample, position)."""

    def __init__(self, seed: int, stream: int) -> None:
        self._key = seed * 1_000_003 + stream

    def draw(self, sample: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size,) standard normal numbers."""
        generator = torch.Generator().manual_seed(self._key * 1_000_033 + sample)
        return torch.randn(size, dtype=torch.float64, generator=generator).to(device, dtype)
