"""The sky: star catalogs in, maps of the dust density out."""
