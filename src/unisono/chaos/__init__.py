"""A run under injected faults beside a run without, and the comparison of both."""
