"""Hyperparameters and outlier weights from posterior moments.

Start at `_learn_evidence`: Newton steps up the evidence, each at a point of `_newton_point`, with
the gradient of `_evidence` and the metric of `_information`; `_learn_values` are its settings and
results. `_robust` has the turns with Student-t noise, whose formulae are in `_student_t_noise`.

Public names are in `dustmap.inference`.
"""
