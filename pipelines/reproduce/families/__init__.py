"""Standard deviations of the inducing engine's families, and its minibatches on ranks."""
