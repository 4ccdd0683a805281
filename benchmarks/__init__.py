"""Benchmarks of the operators against their peers: ``python -m benchmarks --help``."""
