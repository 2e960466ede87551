"""Peak memory of runs beside what their plans had said: each run in a process of its own."""
