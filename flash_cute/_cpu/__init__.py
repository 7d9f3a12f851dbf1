"""What Python computes: the CPU's kernels, and the rules of masks and sinks that others share."""
