"""What talks to PyTorch: dispatcher, autograd, autocast, tracing, vmap, FLOP counters, private names."""

import torch

from flash_cute import _C  # noqa: F401  importing it registers the operators

# What Python adds to them.
library = torch.library.Library("flash_cute", "IMPL")
