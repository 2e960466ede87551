"""Positive fields, ρ = exp(μ + R ε).

`_lognormal` is the model and its posterior, `_lognormal_problem` the model with its data and solves
with its metric, `_lognormal_energy` the energy of one field, `_lognormal_descent` the steps down it
(of means with samples by `_sampled_metric`), `_tangent` the response linearised at a place and its
metric with preconditioners, from the data's side or, where many data see few nodes and nothing but
the field is learned, among these (`SeenNodes`, which has the rule). `_mgvi` is the fit: it runs the
phases of `_mgvi_phases` over the complete state of `_mgvi_state`, with the samples of
`_mgvi_samples`, which divides them among ranks (straight draws; `_mgvi_curves` makes those along
the curvature, many at once), and hyperparameters by `_mgvi_hyper`.
`_unresolved` is what a grid leaves out.

Public names are in `dustmap.inference`.
"""
