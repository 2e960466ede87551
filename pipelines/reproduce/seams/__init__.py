"""A sky fitted in 12 tiles beside the same sky fitted in one piece."""
