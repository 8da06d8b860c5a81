"""What the benchmarks share: the model, the systems under test, groups of processes, counters, tables and pictures."""
