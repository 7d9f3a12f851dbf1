"""flash_cute: exact attention for PyTorch, written in C++/CUDA on CuTe.

    out, lse = flash_cute.forward(q, k, v, causal=True)

forward and attention compute, forward_varlen and attention_varlen the same of packed sequences, merge makes
one result of those for parts of the keys, softmax the probabilities alone, supported and explain tell with
what, flash_cute.reference checks.
flash_cute.integrations and flash_cute.compat, to be imported by themselves, are faces under other names.
"""

from pkgutil import extend_path

# A checkout's folder hides the installed package's, where the native library is: look there as well.
__path__ = extend_path(__path__, __name__)

from flash_cute import reference
from flash_cute.interface import attention, attention_varlen, explain, forward, forward_varlen, supported
from flash_cute.partial import merge
from flash_cute.row_softmax import softmax

__version__ = "0.1.0"
__all__ = [
    "attention",
    "attention_varlen",
    "explain",
    "forward",
    "forward_varlen",
    "merge",
    "reference",
    "softmax",
    "supported",
]
