"""Measurements: speed beside peers, accuracy against float64, host overhead, and an entry for the profilers."""
