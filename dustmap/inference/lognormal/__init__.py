"""Positive fields, ρ = exp(μ + R ε).

`_lognormal` is the model and its posterior, `_lognormal_energy` the energy of one field and the
steps down it, `_tangent` the response linearised at a place and its metric from the data's side,
with preconditioners of `_gram_preconditioner`. `_mgvi` is the fit: it runs the phases of
`_mgvi_phases` over the complete state of `_mgvi_state`, with draws of `_mgvi_draws` (straight) and
`_mgvi_curves` (along the curvature, many at once) and hyperparameters by `_mgvi_hyper`.

Public names are in `dustmap.inference`.
"""
