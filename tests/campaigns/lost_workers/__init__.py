"""Runs that lose several workers in quick succession."""
