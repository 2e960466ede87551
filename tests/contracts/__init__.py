"""What every member of a kind must satisfy: a list of cases times a list of checks.

A new operator, kernel, functional, feature map, family, likelihood or export layout joins by one
more case of its module here, and inherits every check of `test_*.py` beside it. What only one of
them promises is tested where the member is (tests/linalg, tests/gp, tests/sky).
"""
