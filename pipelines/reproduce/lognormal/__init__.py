"""Positive densities: metric Gaussian inference beside NIFTy.re on simulated skies."""
