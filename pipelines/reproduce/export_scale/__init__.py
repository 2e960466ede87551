"""A map of 296 million voxels from 12 samples, to zarr and FITS, in bounded memory."""
