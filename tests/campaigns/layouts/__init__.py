"""Runs under layouts on real processes: models of every kind, compared with one worker on the same micro-batches."""
