"""Delays of flights: stochastic variational inference against the number of inducing points."""
