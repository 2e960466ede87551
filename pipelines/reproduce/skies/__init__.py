"""Calibration on simulated skies: drawn from the prior, and structured as the Galaxy's dust."""
