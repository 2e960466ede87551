"""Catalogs larger than memory, and millions of stars in one fit."""
