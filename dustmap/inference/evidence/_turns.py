"""Turns of noise and field, each at the other: lengths of their steps, and when they rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from dustmap.inference.evidence._student_t_noise import StudentTModel, noise_nats

#: Evidence that further turns are expected to gain, in nats, below which none follows.
_NATS_OF_TURNS = 0.25
#: Least share of a whole step.
_LEAST_SHARE = 0.05


def nats_left(nats: Sequence[float]) -> float:
    """Extrapolate the gain that remains to an iteration whose k-th step was of nats[k] = ½ Δᵀ I Δ.

    A step of length d_k ∝ √nats_k that shrinks by ρ each time leaves d_k ρ/(1 − ρ): creeping is not
    taken for rest. Infinite before there are two.

    Examples
    --------
    >>> nats_left([1.0, 0.25])  # every step half as long as the one before
    0.25
    """
    if len(nats) < 2:
        return float("inf")
    last, before = nats[-1], nats[-2]
    rate = min((last / before) ** 0.5, 0.95) if before > 0 else 0.0
    return last * (rate / (1.0 - rate)) ** 2


@final
@dataclass(frozen=True)
class LawStep:
    """A step of the noise. whole: of `StudentTModel.logs`, to the best law for the present field;
    share: the part of it that was gone."""

    whole: tuple[float, ...]
    share: float


def relaxed(
    before: StudentTModel, best: StudentTModel, last: LawStep | None
) -> tuple[StudentTModel, LawStep]:
    """The law on the way from `before` to the best one for the field, and the step to it.

    The field follows the noise, so that a whole step d may overshoot, and few data then go to and
    fro between two laws without end. After one of which the share α was gone, a linear iteration
    rests at the share α/(1 − q) of the next, q = d·d_last/|d_last|² (Irons and Tuck 1969).

    Examples
    --------
    >>> from dustmap.gp.likelihoods import GaussianLikelihood
    >>> from dustmap.inference import StudentTNoise
    >>> here, there = (
    ...     StudentTModel.of(StudentTNoise(nu), GaussianLikelihood(), True, False) for nu in (1, 4)
    ... )
    >>> back = LawStep(tuple(a - b for a, b in zip(here.logs(), there.logs())), share=1.0)
    >>> law, step = relaxed(here, there, back)  # there and back again: halfway is best
    >>> round(law.noise.nu, 6), step.share
    (2.0, 0.5)
    """
    whole = tuple(b - a for a, b in zip(before.logs(), best.logs(), strict=True))
    share = 1.0
    if last is not None and any(last.whole):
        pairs = list(zip(whole, last.whole, strict=True))
        q = sum(d * e for d, e in pairs) / sum(e * e for _, e in pairs)
        share = min(max(last.share / (1.0 - q), _LEAST_SHARE), 1.0) if q < 1.0 else 1.0
    step = LawStep(whole, share)
    if share == 1.0:
        return best, step
    pairs_of = zip(before.parameters(), best.parameters(), strict=True)
    return best.with_parameters([b.at(a.value.lerp(b.value, share)) for a, b in pairs_of]), step


@final
@dataclass(frozen=True)
class Turns:
    """The turns so far. nats: ½ Δᵀ I Δ of what kernel and noise changed by in each; noise: logs of
    the last one's."""

    nats: tuple[float, ...] = ()
    noise: tuple[float, ...] | None = None

    def after(self, kernel: float, noise: tuple[float, ...], n: int) -> "Turns":
        """With one more: noise of n data at a fixed kernel, then the kernel at fixed sites, which
        changed by so many nats."""
        moved = 0.0 if self.noise is None else noise_nats(self.noise, noise, n)
        return Turns((*self.nats, kernel + moved), noise)

    @property
    def settled(self) -> bool:
        """Whether kernel and noise rest together."""
        return nats_left(self.nats) <= _NATS_OF_TURNS
