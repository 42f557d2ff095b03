"""A run seen from outside: its spec, directory and settings, the start of processes, a worker's main loop, the result."""
