"""Run configurations and the experiments of the papers."""
