"""Sharded replicas while workers join and leave."""
