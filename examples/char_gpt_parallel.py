"""The GPT of char_gpt.py on several processes, with flash_cute: the losses must be those of one process.

    torchrun --nproc-per-node 2 examples/char_gpt_parallel.py [--parallel data fsdp tensor]

data is DistributedDataParallel, fsdp FSDP2 (fully_shard), tensor shares out heads and the MLP's columns. One
GPU a process, or CPUs. Every process trains the model alone as well, on the whole batch. Exits with 1 where
losses are further apart than --tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import GPT, SIZES, Text, count, cut, even, ours
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

NAMES = ("layers", "heads", "kv_heads", "head_dim", "batch", "context")


class Loss(nn.Module):
    """The model's loss as a forward, which DDP and FSDP2 watch."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.model = GPT(options.layers, options.heads, options.kv_heads, options.head_dim)

    def forward(self, text: Text) -> torch.Tensor:
        return self.model.loss(text, ours)


def data(module: Loss, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def fsdp(module: Loss, mesh: DeviceMesh) -> nn.Module:
    for block in module.model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def tensor(module: Loss, mesh: DeviceMesh) -> nn.Module:
    """Each process has some of the heads, of K and V, too, and some of the MLP's columns."""
    by_columns = {f"qkv.{index}": ColwiseParallel() for index in range(3)} | {"mlp.0": ColwiseParallel()}
    by_rows = {"project": RowwiseParallel(), "mlp.2": RowwiseParallel()}
    for block in module.model.blocks:
        parallelize_module(block, mesh, by_columns | by_rows)
    return module


PARALLEL = {"data": data, "fsdp": fsdp, "tensor": tensor}


def train(
    options: argparse.Namespace,
    text: torch.Tensor,
    mesh: DeviceMesh,
    share_out: Callable[[Loss, DeviceMesh], nn.Module] | None,
) -> torch.Tensor:
    """The losses of all steps, alone or shared out."""
    torch.manual_seed(0)
    module: nn.Module = Loss(options).to(options.device)
    if share_out:
        module = share_out(module, mesh)
    by_batch = share_out in (data, fsdp)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch,))
        if by_batch:
            starts = starts.chunk(mesh.size())[mesh.get_local_rank()]
        loss = module(cut(text, starts, options.context, options.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    result = torch.stack(losses)
    if by_batch:
        dist.all_reduce(result)
        result /= mesh.size()
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parallel", choices=PARALLEL, nargs="+", default=list(PARALLEL), help="default: all"
    )
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="nats per byte; default: 1e-2")
    parser.add_argument("--steps", type=count, default=20, metavar="N")
    for name in NAMES:
        kind = even if name == "head_dim" else count
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    parser.set_defaults(**dict(zip(NAMES, SIZES[parser.parse_args().device], strict=False)))
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node 2 examples/char_gpt_parallel.py")
    world = int(os.environ["WORLD_SIZE"])
    shared = {"data": ("batch",), "fsdp": ("batch",), "tensor": ("heads", "kv_heads")}
    for name in (name for parallel in options.parallel for name in shared[parallel]):
        if getattr(options, name) % world:
            parser.error(
                f"{name} is {getattr(options, name)}; a multiple of the {world} processes is accepted"
            )
    return options


def main() -> int:
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    options.device = torch.device(options.device)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    alone = train(options, text, mesh, None)
    say = print if dist.get_rank() == 0 else lambda line: None
    say(f"{mesh.size()} processes; first and last loss alone: {alone[0]:.5f}, {alone[-1]:.5f}")
    agree = True
    for name in options.parallel:
        together = train(options, text, mesh, PARALLEL[name])
        apart = (alone - together).abs().max().item()
        agree &= apart <= options.tolerance
        say(f"{name}: {together[0]:.5f}, {together[-1]:.5f}; at most {apart:.1e} apart")
    say(f"the losses {'agree' if agree else 'DO NOT AGREE'}")
    dist.destroy_process_group()
    return not agree


if __name__ == "__main__":
    sys.exit(main())
