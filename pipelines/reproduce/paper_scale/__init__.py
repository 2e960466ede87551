"""The size of the HIP-GP paper's largest map, on a laptop: 500,000 stars, 62,500 grid points."""
