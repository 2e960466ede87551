"""Random numbers that do not disturb each other: one stream for each thing that is drawn."""

import enum
from typing import final

import numpy as np


@final
class Stream(enum.IntEnum):
    """What is drawn, each from numbers of its own, so that more stars see the same dust."""

    FIELD = 0
    SHELLS = 1
    STARS = 2
    NOISE = 3

    def generator(self, seed: int, block: int = 0) -> np.random.Generator:
        """The stream of a seed; stars and their noise have one for each block of candidates."""
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(self.value, block)))
