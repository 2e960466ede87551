"""Held-out NLL against seconds of training, hyperparameters learned inside the clock."""
