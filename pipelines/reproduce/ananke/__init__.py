"""The Ananke stars by the global engine, against the dense exact Gaussian process."""
