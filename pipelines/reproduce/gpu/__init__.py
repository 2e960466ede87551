"""A GPU beside the processor of its own machine: products, and whole fits."""
