"""A long causal sequence by PyTorch's context_parallel: flash_cute, PyTorch's own kernels, and one GPU.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.context_parallel

Forward and backward, one process a GPU. PyTorch merges partial results, gathers K and V or passes them on
and shares out the causal work. Times are the slowest process's, medians over the repeats. Exits with 1 where
the results of a ring are not those of one GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute.integrations.sdpa  # noqa: F401

from .report import publish

KERNELS = {
    "flash_cute": SDPBackend.FLASH_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
ROTATIONS = "allgather", "alltoall"
APART = 0.02  # root mean square of what a ring rounds elsewhere, of that of the results

Results = list[torch.Tensor]  # out and the gradients of q, k and v
Step = Callable[[], Results]


def timed(step: Step, repeats: int) -> float:
    """Milliseconds of a step, by the slowest process."""
    step()
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times)


def step_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Step:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def step() -> Results:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    return step


def measure(tensors: Results, mesh: DeviceMesh, rotation: str | None, repeats: int) -> tuple[float, Results]:
    """Milliseconds on one GPU, or with a rotation in the ring, and the whole results."""
    if rotation is None:
        step = step_of(*tensors)
        return timed(step, repeats), step()
    set_rotate_method(rotation)
    shards = [x.clone() for x in tensors]
    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4, no_restore_buffers=set(shards)):
        step = step_of(*shards)
        milliseconds, parts = timed(step, repeats), step()
    return milliseconds, context_parallel_unshard(mesh, parts, [2] * 4)


def apart(results: Results, expected: Results) -> float:
    """The largest root mean square of a difference, of that of what is expected."""
    ratios = [
        (mine.float() - other.float()).square().mean().sqrt() / other.float().square().mean().sqrt()
        for mine, other in zip(results, expected, strict=True)
    ]
    return torch.stack(ratios).max().item()


def measure_all(options: argparse.Namespace, mesh: DeviceMesh) -> list[dict]:
    torch.manual_seed(0)  # the same tensors in all processes
    shape = 1, options.heads, options.tokens, options.head_dim
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    rows, expected = [], None
    for name, backend in KERNELS.items():
        if name == "flash_cute":
            attention.activate_flash_attention_impl("flash_cute")
        with sdpa_kernel(backend):
            for rotation in (None, *ROTATIONS):
                milliseconds, results = measure(tensors, mesh, rotation, options.repeats)
                expected = expected or results  # flash_cute's on one GPU
                rows.append(
                    {
                        "kernels": name,
                        "gpus": 1 if rotation is None else mesh.size(),
                        "rotation": rotation,
                        "milliseconds": milliseconds,
                        "apart": apart(results, expected),
                    }
                )
        if name == "flash_cute":
            attention.restore_flash_attention_impl()
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder of results; default: benchmarks/results")
    return parser.parse_args()


def main() -> int:
    options = parse()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    rows = measure_all(options, mesh)
    agree = all(row["apart"] <= APART for row in rows)
    if dist.get_rank() == 0:
        content = {"options": vars(options) | {"output": None}, "rows": rows}
        publish("context_parallel", options, device, content, "context-parallel")
        print("results agree" if agree else "results DO NOT AGREE")
    dist.destroy_process_group()
    return not agree


if __name__ == "__main__":
    sys.exit(main())
