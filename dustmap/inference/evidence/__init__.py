"""Hyperparameters and outlier weights from posterior moments.

Public names are in `dustmap.inference`.
"""
