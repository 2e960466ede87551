"""How a log-normal fit scales: over ranks and threads, with stars and nodes, and beyond."""
