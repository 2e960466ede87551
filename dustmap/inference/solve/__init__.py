"""Posterior mean and pathwise draws from products of Φ.

Start at `_global_solve`: one block solve for the mean and all draws of a `_grid_model`.
`_solution` solves for its columns, as many at a time as the memory allows, and has the result,
`_pathwise` answers for any functional from it, and `_data_space` is the same solve from the side
of the data.

Public names are in `dustmap.inference`.
"""
