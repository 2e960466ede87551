"""q(ε) = N(m, S) from rows of Φ, for any likelihood.

Start at `_model`: the model, its rows, its posterior of any functional, and the optimum where it
has a closed form. Elsewhere `_natural_step` has the steps, on minibatches (`_svi`) or with all
data; `_collapsed` fits with q integrated out.

Public names are in `dustmap.inference`.
"""
