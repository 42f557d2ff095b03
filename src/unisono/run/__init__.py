"""A run: spec, directory, settings, start of its processes, a worker's main loop, result."""
