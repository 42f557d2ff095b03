"""Figures behind the claims: one module per claim, each runnable as ``python -m benchmarks.<name>``."""
