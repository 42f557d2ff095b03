"""Several workers of one run are lost, one soon after the other."""
