"""Kernels that stars choose, on simulated skies of three kinds that no kernel has drawn."""
