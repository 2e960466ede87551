"""Hyperparameters and outlier weights from posterior moments.

Start at `_newton`: Newton steps up the evidence, each at a point of `_newton_point`, with gradient
and metric of `_evidence`. `_robust` has the rounds with Student-t noise, whose law is fitted in
`_student_t_noise`.

Public names are in `dustmap.inference`.
"""
