"""What test_distributed.py runs in each of two processes: DTensors, and a ring, beside float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.cases import (
    BATCHES,
    MASKS,
    Ranged,
    Sequence,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
)
from support.tolerance import assert_attention, assert_gradients, assert_ragged, assert_ragged_gradients
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import flash_cute.integrations.dtensor
import flash_cute.integrations.sdpa

DTYPE = torch.bfloat16
ALL, BATCH, HEADS, ROWS, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
# heads of q and k, how q, k and v are sharded, how out and LSE come out, and the gradients
DENSE = {
    "replicated": ((4, 2), (ALL, ALL, ALL), ALL, (ALL, ALL, ALL)),
    "batch": ((4, 2), (BATCH, BATCH, BATCH), BATCH, (BATCH, BATCH, BATCH)),
    "heads": ((4, 4), (HEADS, HEADS, HEADS), HEADS, (HEADS, HEADS, HEADS)),
    "grouped heads": ((4, 2), (HEADS, HEADS, HEADS), HEADS, (HEADS, HEADS, HEADS)),
    "as many heads, unevenly": ((3, 3), (HEADS, HEADS, HEADS), HEADS, (HEADS, HEADS, HEADS)),
    "heads of q": ((4, 1), (HEADS, ALL, ALL), HEADS, (HEADS, SUM, SUM)),
    # redistributed: these cannot be computed as they are
    "grouped heads, unevenly": ((6, 3), (HEADS, HEADS, HEADS), ALL, None),
    "rows": ((4, 2), (ROWS, ROWS, ROWS), ALL, None),
}
PADDED = tuple(Sequence(30, 40, used_q, used_k, leftpad) for used_q, used_k, leftpad in
               ((30, 40, 0), (7, 20, 5), (0, 0, 0), (12, 33, 1)))  # fmt: skip


def leaves(tensors, placements, mesh):
    return [
        distribute_tensor(x, mesh, [placement]).requires_grad_()
        for x, placement in zip(tensors, placements, strict=True)
    ]


def whole(tensors, like) -> list[torch.Tensor]:
    return [torch.empty_like(x).copy_(tensor.full_tensor()) for x, tensor in zip(like, tensors, strict=True)]


def shared(seed: int):
    """The same random tensors in all processes."""
    torch.manual_seed(seed)
    return seed


def dense(name: str, mesh) -> None:
    heads, placements, of_results, of_gradients = DENSE[name]
    inputs = make_inputs(Shape(4, *heads, 37, 61, 32, 24), DTYPE, "cpu", seed=shared(1))
    dout, dlse = make_gradients(inputs[0][..., :24], seed=2)
    given = leaves(inputs, placements, mesh)
    out, lse = flash_cute.forward(*given, causal=True)
    assert (out.placements, lse.placements) == ((of_results,), (of_results,)), (name, out.placements)
    gradients = torch.autograd.grad(
        (out, lse), given, [distribute_tensor(x, mesh, [of_results]) for x in (dout, dlse)]
    )
    if of_gradients:
        assert tuple(x.placements[0] for x in gradients) == of_gradients, (name, gradients)
    assert_attention((out.full_tensor(), lse.full_tensor().contiguous()), *inputs, MASKS["causal"])
    assert_gradients(whole(gradients, inputs), *inputs, dout, dlse, MASKS["causal"])
    (dk,) = torch.autograd.grad(
        flash_cute.attention(*given[:1], *(x.detach() for x in given[1:])).sum(), given[:1]
    )
    assert dk.shape == inputs[0].shape  # without the gradients of k and v


def ragged(packed: bool, placement, mesh) -> None:
    sequences = BATCHES["some empty"] if packed else PADDED
    batch = make_ragged(sequences, (4, 2), 32, DTYPE, "cpu", packed, "transposed", (0, 0), shared(3))
    tensors = batch.q, batch.k, batch.v
    dout, dlse = make_ragged_gradients(batch, seed=4)
    given = leaves(tensors, [placement] * 3, mesh)
    of_lengths = BATCH if placement == BATCH else ALL
    lengths = {name: distribute_tensor(x, mesh, [of_lengths]) for name, x in batch.lengths.items()}
    function = flash_cute.forward_varlen if packed else flash_cute.forward
    out, lse = function(*given, causal=True, **lengths)
    of_lse = Shard(0) if packed and placement == HEADS else placement
    assert (out.placements, lse.placements) == ((placement,), (of_lse,)), (out.placements, lse.placements)
    gradients = torch.autograd.grad(
        (out, lse),
        given,
        (distribute_tensor(dout, mesh, [placement]), distribute_tensor(dlse, mesh, [of_lse])),
    )
    assert all(x.placements == (placement,) for x in gradients)
    assert_ragged((whole([out], [batch.q])[0], lse.full_tensor().contiguous()), batch, MASKS["causal"])
    assert_ragged_gradients(whole(gradients, tensors), batch, dout, dlse, MASKS["causal"])


def random_ranges(batch: int, queries: int, keys: int) -> torch.Tensor:
    shared(7)
    return torch.randint(-5, keys + 5, (batch, 1, queries, 2, 2), dtype=torch.int32)


def ranged(one: bool, placement, mesh) -> None:
    """one: a mask for the whole batch, which is replicated where the batch is sharded."""
    inputs = make_inputs(Shape(4, 4, 2, 37, 61, 32), DTYPE, "cpu", seed=shared(1))
    dout, dlse = make_gradients(inputs[0], seed=2)
    mask = Ranged.of(MASKS["causal"], random_ranges(1 if one else 4, 37, 61))
    given = leaves(inputs, [placement] * 3, mesh)
    of_ranges = BATCH if placement == BATCH and not one else ALL
    ranges = distribute_tensor(mask.ranges, mesh, [of_ranges])
    out, lse = flash_cute.forward(*given, causal=True, ranges=ranges)
    assert (out.placements, lse.placements) == ((placement,), (placement,)), (out.placements, lse.placements)
    results = [distribute_tensor(x, mesh, [placement]) for x in (dout, dlse)]
    gradients = torch.autograd.grad((out, lse), given, results)
    assert_attention((out.full_tensor(), lse.full_tensor().contiguous()), *inputs, mask)
    assert_gradients(whole(gradients, inputs), *inputs, dout, dlse, mask)


# What is sharded, and the shapes of a mask and a bias; slopes are alike for all sequences, or not.
CHANGES = {
    "alike for all": (BATCH, (1, 1, 37, 61), (1, 4, 1, 61), (4,)),
    "of each sequence": (BATCH, (4, 1, 37, 61), (4, 4, 37, 61), (4, 4)),
    "of pairs of sequences": (BATCH, (4, 4, 1, 61), (2, 1, 37, 61), (4,)),
    "of all heads": (HEADS, (4, 1, 37, 61), (1, 1, 37, 61), (4,)),
    "of each head": (HEADS, (1, 4, 37, 61), (2, 4, 37, 1), (4, 4)),
    "replicated": (ALL, (4, 4, 37, 61), (2, 4, 37, 61), (4,)),
}


def changed(name: str, mesh) -> None:
    """Results and gradients are those of one process, of what it has of a mask, a bias and slopes."""
    placement, *shapes = CHANGES[name]
    inputs = make_inputs(Shape(4, 4, 2, 37, 61, 32), DTYPE, "cpu", seed=shared(1))
    dout, dlse = make_gradients(inputs[0], seed=2)
    shared(3)
    mask, bias, slopes = (torch.randn(shape) for shape in shapes)
    changes = {"mask": mask > -1, "bias": bias.to(DTYPE), "alibi_slopes": slopes.abs()}
    given = leaves(inputs, [placement] * 3, mesh)
    parts = {}
    for argument, x in changes.items():
        dim = (
            x.dim() - 1 if argument == "alibi_slopes" and placement == HEADS else getattr(placement, "dim", 0)
        )
        differ = x.shape[dim] > 1 and (placement == HEADS or x.dim() > 1)
        in_parts = placement != ALL and differ
        parts[argument] = distribute_tensor(x, mesh, [Shard(dim) if in_parts else ALL])
    given.append(parts["bias"].requires_grad_())
    out, lse = flash_cute.forward(*given[:3], causal=True, softcap=5.0, **parts)
    assert (out.placements, lse.placements) == ((placement,), (placement,)), (name, out.placements)
    results = [distribute_tensor(x, mesh, [placement]) for x in (dout, dlse)]
    *gradients, dbias = torch.autograd.grad((out, lse), given, results)
    assert all(x.placements == (placement,) for x in gradients)
    of_bias = given[3].placements[0]
    assert dbias.placements == (SUM if of_bias == ALL != placement else of_bias,)
    plain = [x.detach().requires_grad_() for x in (*inputs, changes["bias"])]
    expected = flash_cute.forward(*plain[:3], causal=True, softcap=5.0, **changes | {"bias": plain[3]})
    torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), expected)
    *expected, expected_dbias = torch.autograd.grad(expected, plain, (dout, dlse))
    torch.testing.assert_close(whole(gradients, inputs), expected)
    # Of parts, which are rounded before they are added.
    torch.testing.assert_close(dbias.full_tensor(), expected_dbias, atol=2e-2, rtol=2e-2)
    # Of v and the bias alone, which are of one operator where the bias has a number for each pair.
    q, k, *asked = given
    of_v = flash_cute.forward(q.detach(), k.detach(), asked[0], causal=True, softcap=5.0, **parts)
    dv, same_dbias = torch.autograd.grad(of_v, asked, results)
    assert (dv.placements, same_dbias.placements) == ((placement,), dbias.placements)
    torch.testing.assert_close(dv.full_tensor(), expected[2])
    torch.testing.assert_close(same_dbias.full_tensor(), dbias.full_tensor())


def dropped(placement, mesh) -> None:
    """All processes drop the same, as all have the whole; parts of it are a sentence."""
    inputs = make_inputs(Shape(4, 4, 2, 37, 61, 32), DTYPE, "cpu", seed=shared(1))
    given = leaves(inputs, [placement] * 3, mesh)
    if placement != ALL:
        with pytest.raises(Exception, match="dropout_p must be 0 where q is sharded"):
            flash_cute.forward(*given, dropout_p=0.5)
        return
    out = flash_cute.attention(*given, dropout_p=0.5)
    whole_out = out.to_local()
    of_first = whole_out.detach().clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(of_first, whole_out)
    (dq,) = torch.autograd.grad(out.sum(), given[:1])
    assert dq.placements == (ALL,)


def ring_of_ranges(mesh) -> None:
    """Each process has a part of the queries, and takes the keys part by part."""
    inputs = make_inputs(Shape(2, 4, 2, 64, 80, 32), DTYPE, "cpu", seed=shared(8))
    dout, dlse = make_gradients(inputs[0], seed=9)
    ranges = random_ranges(2, 64, 80)
    rank, parts = mesh.get_local_rank(), mesh.size()
    mine = slice(rank * 64 // parts, (rank + 1) * 64 // parts)
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    of_mine, keys = ranges[:, :, mine], 80 // parts
    results = []
    for part in range(parts):
        rows = slice(part * keys, (part + 1) * keys)
        shifted = flash_cute.masks.shift(of_mine, rows.start, keys)
        results.append(flash_cute.forward(q[:, :, mine], k[:, :, rows], v[:, :, rows], ranges=shifted))
    results = flash_cute.merge(*zip(*results, strict=True))
    gradients = torch.autograd.grad(results, (q, k, v), (dout[:, :, mine], dlse[:, :, mine]))
    for gradient in gradients:
        dist.all_reduce(gradient)
    out, lse = torch.zeros_like(inputs[0]), torch.zeros(inputs[0].shape[:3])
    out[:, :, mine], lse[:, :, mine] = (x.detach() for x in results)
    dist.all_reduce(out)
    dist.all_reduce(lse)
    mask = Ranged.of(MASKS["full"], ranges)
    assert_attention((out, lse), *inputs, mask)
    gradients = [torch.empty_like(x).copy_(g) for x, g in zip(inputs, gradients, strict=True)]
    assert_gradients(gradients, *inputs, dout, dlse, mask)


def ring(mesh, method: str, causal: bool, balanced: bool) -> None:
    """What context_parallel calls on GPUs; balanced: each process has an early and a late part."""
    inputs = make_inputs(Shape(2, 4, 4, 64, 64, 32), DTYPE, "cpu", seed=shared(5))
    dout, _ = make_gradients(inputs[0], seed=6)
    pairs = [(part, 2 * mesh.size() - 1 - part) for part in range(mesh.size())]
    if not balanced:
        pairs = [(2 * part, 2 * part + 1) for part in range(mesh.size())]
    mine = pairs[mesh.get_local_rank()]

    def local(x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(2 * mesh.size(), 2)
        return torch.cat([parts[place] for place in mine], 2)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in pairs]
        dist.all_gather(found, x.contiguous())
        parts = {
            place: part
            for places, both in zip(pairs, found, strict=True)
            for place, part in zip(places, both.chunk(2, 2), strict=True)
        }
        return torch.cat([parts[place] for place in sorted(parts)], 2)

    context_parallel.set_rotate_method(method)
    context_parallel._cp_options.enable_load_balance = balanced
    activate_flash_attention_impl("flash_cute")
    tensors = [local(x) for x in inputs]
    forward = context_parallel._scaled_dot_product_ring_flash_attention
    backward = context_parallel._scaled_dot_product_ring_flash_attention_backward
    out, lse, *rest = forward(mesh, *tensors, is_causal=causal)
    arguments = *tensors, out, lse, *rest[:4], 0.0, causal, *rest[4:6]
    gradients = backward(mesh, local(dout), *arguments)
    restore_flash_attention_impl()
    mask = MASKS["causal" if causal else "full"]
    assert_attention((gathered(out), gathered(lse)), *inputs, mask)
    gradients = [torch.empty_like(x).copy_(gathered(g)) for x, g in zip(inputs, gradients, strict=False)]
    assert_gradients(gradients, *inputs, dout, None, mask)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in DENSE:
        dense(name, mesh)
        print("passed:", name, flush=True)
    for packed, placement in ((False, ALL), (False, BATCH), (False, HEADS), (True, ALL), (True, HEADS)):
        ragged(packed, placement, mesh)
        print("passed:", "packed" if packed else "padded", placement, flush=True)
    for one, placement in ((False, BATCH), (True, BATCH), (True, HEADS)):
        ranged(one, placement, mesh)
        print("passed: ranges", one, placement, flush=True)
    for name in CHANGES:
        changed(name, mesh)
        print("passed: scores changed", name, flush=True)
    for placement in (ALL, BATCH, HEADS):
        dropped(placement, mesh)
        print("passed: dropout", placement, flush=True)
    ring_of_ranges(mesh)
    print("passed: ring of ranges", flush=True)
    for method in ("allgather", "alltoall"):
        for causal, balanced in ((True, True), (True, False), (False, False)):
            ring(mesh, method, causal, balanced)
            print("passed: ring,", method, causal, balanced, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
