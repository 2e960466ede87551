"""Selection of stars and their distances: magnitude limits, refined distances, far columns."""
