"""Stands here so that pytest finds the package ``tests`` from wherever it is started."""
