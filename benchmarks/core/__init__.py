"""Parts of benchmarks/cache_core.py: workloads, peers behind one protocol, what is measured."""
