"""A run seen from outside: spec, directory, settings, start of processes, a worker's main loop, result."""
