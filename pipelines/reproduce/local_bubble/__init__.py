"""The Local Bubble from Hipparcos stars: held-out stars, the cavity, and distances of clouds."""
