"""Measurements of this machine and this engine: what is timed, how, and how it is reported (docs/benchmarks)."""
