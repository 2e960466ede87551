"""Clouds at known places in a turbulent medium: how well their distances are recovered."""
