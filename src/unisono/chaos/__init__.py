"""A training under faults beside an undisturbed one: what is promised of both, tried out."""
