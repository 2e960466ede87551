"""q(ε) = N(m, S) from rows of Φ, for any likelihood.

Public names are in `dustmap.inference`.
"""
