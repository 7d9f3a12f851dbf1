"""What Python computes: the CPU's kernels, and the rules of masks, sinks and results that others share."""
