"""Training over links of 25 Mbit/s to 1 Gbit/s, between the hosts of `benchmarks.netlab`."""
