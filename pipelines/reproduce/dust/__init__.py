"""Section 5.5: the interstellar dust map by HIP-GP, beside SVGP and the exact Gaussian process."""
