"""Steps of conjugate gradients with and without the circulant preconditioner."""
