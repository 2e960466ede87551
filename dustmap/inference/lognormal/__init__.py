"""Positive fields, ρ = exp(μ + R ε).

Public names are in `dustmap.inference`.
"""
