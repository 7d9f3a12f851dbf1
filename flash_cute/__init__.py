"""flash_cute: exact attention for PyTorch and JAX, written in C++/CUDA on CuTe.

    out, lse = flash_cute.forward(q, k, v, causal=True)

forward and attention compute, forward_varlen and attention_varlen the same of packed sequences, append_kv
writes new keys and values into a cache, merge makes one result of those for parts of the keys,
attention_weights computes the probabilities of a call, softmax those of scores that there are, softmax_matmul
these times v, dropout_mask tells which weights dropout keeps, supported and explain with what a call runs,
flash_cute.masks says which keys queries see, flash_cute.reference checks. These are for PyTorch,
flash_cute.jax is for JAX. flash_cute.integrations and flash_cute.compat, to be imported by themselves, are
faces under other names.

As flash_cute.jax works without torch, an import that comes before torch's leaves torch.ops.flash_cute empty
until one of the functions is touched, say by `from flash_cute import forward`: touch one, or import torch
first, before torch.export.load of a program that has these operators.
"""

import sys
from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING

# A checkout's folder hides the installed package's, where the native library is: look there as well.
__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from flash_cute import masks, reference
    from flash_cute.dot_product_attention import attention, attention_varlen, forward, forward_varlen
    from flash_cute.dropout import dropout_mask
    from flash_cute.explanation import explain, supported
    from flash_cute.kv_cache import append_kv
    from flash_cute.merging import merge
    from flash_cute.softmax_matmul_op import softmax_matmul
    from flash_cute.softmax_op import softmax
    from flash_cute.weights import attention_weights

__version__ = "0.1.0"
__all__ = [
    "append_kv",
    "attention",
    "attention_varlen",
    "attention_weights",
    "dropout_mask",
    "explain",
    "forward",
    "forward_varlen",
    "masks",
    "merge",
    "reference",
    "softmax",
    "softmax_matmul",
    "supported",
]


def _load_torch_face() -> None:
    """Makes the functions for PyTorch, and registers its operators."""
    # A module with the name of a function would take its place when it is imported.
    modules = {"append_kv": "kv_cache", "merge": "merging", "softmax": "softmax_op"}
    modules |= {"dropout_mask": "dropout", "explain": "explanation", "supported": "explanation"}
    modules |= {"attention_weights": "weights", "softmax_matmul": "softmax_matmul_op"}
    modules |= {"masks": None, "reference": None}
    for name in __all__:
        module = modules.get(name, "dot_product_attention")
        found = import_module(f"flash_cute.{module or name}")
        globals()[name] = getattr(found, name) if module else found


def __getattr__(name: str):
    if name == "jax":
        return import_module("flash_cute.jax")
    if name not in __all__:
        raise AttributeError(f"module 'flash_cute' has no attribute {name!r}")
    _load_torch_face()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# flash_cute.jax works without torch, and does not load it.
if "torch" in sys.modules:
    _load_torch_face()
