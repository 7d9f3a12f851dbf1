"""Measurements: speed beside peers, accuracy against float64, host overhead, and a profiler's entry."""
