"""ZeroRedundancyOptimizer: ZeRO stage 1 for a model of which every rank has all parameters."""
