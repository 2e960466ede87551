"""Ten million stars with uncertain distances on levels; `experiment` runs it."""
