"""q(ε) = N(m, S) from rows of Φ, for any likelihood.

Start at `_model`: the model, its rows, and its posterior of any functional. `_all_data` fits with
all data at once, `_svi` on minibatches with the steps of `_natural_step`, `_collapsed` with q
integrated out.

Public names are in `dustmap.inference`.
"""
