"""Seconds to whiten 200 observations: k_n = Rᵀ K_uu⁻¹ k_un."""
