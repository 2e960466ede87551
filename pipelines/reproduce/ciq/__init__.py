"""SVGP whitened by Cholesky, by contour integral quadrature, and on a grid."""
