"""dustmap builds 3D dust maps; the dustmaps package queries published ones."""

__version__ = "0.1.0"
