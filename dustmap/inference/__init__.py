"""Posterior inference on the features of `dustmap.gp`."""
