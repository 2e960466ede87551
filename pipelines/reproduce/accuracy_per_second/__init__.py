"""Error against time: how accurate each method is for the seconds it takes."""
