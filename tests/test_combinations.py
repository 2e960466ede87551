"""The combinations that the default suite has."""

import itertools

from tests.combinations import covering

AXES = ("ab", (1, 2, 3), (False, True))


def test_every_value_or_pair_is_among_the_quick_ones() -> None:
    for together, most in ((1, 3), (2, 6)):
        cases = covering(*AXES, together=together)
        assert [case.values for case in cases] == list(itertools.product(*AXES))
        quick = [case.values for case in cases if not case.marks]
        assert len(quick) == most
        for some in itertools.combinations(range(len(AXES)), together):
            wanted = set(itertools.product(*(AXES[axis] for axis in some)))
            assert {tuple(values[axis] for axis in some) for values in quick} == wanted
