"""One fit to 100 values and 20 derivatives: HIP-GP, SVGP and the exact GP."""
