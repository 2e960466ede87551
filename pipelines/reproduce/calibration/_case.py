"""A claim of a fit beside what an independent computation says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from pipelines.reproduce._experiment import Goal, Row, number


@final
@dataclass(frozen=True)
class Claim:
    """One number that a fit claims.

    case: the data and the model. quantity: what is compared, with its unit. reference: the value
    by an independent method. fitted: the value that the package gives. before: the value that
    release 0.1 gave on the same data. low, high: the range where the fitted value is right.
    """

    case: str
    quantity: str
    reference: float
    fitted: float
    before: float
    low: float
    high: float

    def row(self) -> Row:
        """The row of the table."""
        return {
            "case": self.case,
            "quantity": self.quantity,
            "reference": self.reference,
            "before": self.before,
            "fitted": self.fitted,
            "range": [self.low, self.high],
        }

    @classmethod
    def of(cls, row: Row) -> Self:
        """The claim of a row."""
        bounds = row["range"]
        assert isinstance(bounds, list)
        low, high = (float(bound) for bound in bounds)
        reference, fitted, before = (number(row, n) for n in ("reference", "fitted", "before"))
        return cls(str(row["case"]), str(row["quantity"]), reference, fitted, before, low, high)

    def deviation(self, value: float) -> float:
        """Of a value from the middle of the range, in half widths: right within ±1."""
        return (value - 0.5 * (self.low + self.high)) / (0.5 * (self.high - self.low))

    def goal(self) -> Goal:
        """low ≤ fitted ≤ high."""
        return Goal(
            f"{self.case}: {self.quantity}",
            f"{self.low:.4g} to {self.high:.4g}",
            self.fitted,
            self.low <= self.fitted <= self.high,
        )


#: A part of the experiment: its claims; True asks for a reduced version that takes seconds.
Part = Callable[[bool], Sequence[Claim]]
