"""Whole runs under layouts: models of every kind, on real processes, against one worker that computes the same."""
