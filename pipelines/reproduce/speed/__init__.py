"""How long runs take, beside an earlier version and beside what their products need at least."""
