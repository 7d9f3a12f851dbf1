"""flash_cute for JAX: attention and softmax through XLA's foreign function interface, without torch.

On CUDA GPUs the library's kernels compute, elsewhere plain jax.numpy with the same semantics. docs/jax.md
shows its use.
"""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError("flash_cute.jax needs jax; pip install 'flash_cute[jax]'", name="jax") from None

from flash_cute.jax.dot_product_attention import attention
from flash_cute.jax.softmax_matmul_op import softmax_matmul
from flash_cute.jax.softmax_op import softmax

__all__ = ["attention", "softmax", "softmax_matmul"]
