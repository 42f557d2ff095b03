"""Rendezvous: the workers of a view find each other."""
