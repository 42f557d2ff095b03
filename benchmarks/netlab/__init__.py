"""A network of several hosts on this machine: namespaces on a bridge, links of a given rate and delay, limited CPUs."""

from benchmarks.netlab.network import Host, Netlab, Rate, Unavailable, netlab
from benchmarks.netlab.workers import Finished, run_workers

__all__ = ["Finished", "Host", "Netlab", "Rate", "Unavailable", "netlab", "run_workers"]
