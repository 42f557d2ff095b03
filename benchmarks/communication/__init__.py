"""Messages between workers: links, actors, compressors, simulation."""
