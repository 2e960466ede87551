"""Nothing is lost: kill -9 at random moments, and the outputs of runs that went on after it."""
