"""Posterior mean and pathwise draws from products of Φ.

Public names are in `dustmap.inference`.
"""
