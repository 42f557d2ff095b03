"""A simulated network of hosts: namespaces on a bridge, links of a given rate and delay, limited CPUs."""

from benchmarks.netlab.errors import Failed, Unavailable
from benchmarks.netlab.network import Host, Netlab, Rate, netlab
from benchmarks.netlab.workers import Finished, run_workers

__all__ = ["Failed", "Finished", "Host", "Netlab", "Rate", "Unavailable", "netlab", "run_workers"]
