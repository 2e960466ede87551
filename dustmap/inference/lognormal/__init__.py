"""Positive fields, ρ = exp(μ + R ε).

`_lognormal` is the model and its posterior, `_lognormal_energy` the energy of one field and the
steps down it. `_mgvi` is the fit: it runs the phases of `_mgvi_phases` over the complete state of
`_mgvi_state`, with draws of `_mgvi_draws` and hyperparameters by `_mgvi_hyper`.

Public names are in `dustmap.inference`.
"""
