"""flash_cute on DTensors: which ways of sharding its operators compute as they are.

    import flash_cute.integrations.dtensor

    out, lse = flash_cute.forward(q, k, v, causal=True)  # of DTensors, sharded by batch or heads

The import registers rules for the operators behind forward and forward_varlen, and behind their gradients. On
each dimension of the mesh, processes compute their parts without communication where q, k and v are

    replicated           Replicate()
    sharded by batch     Shard(0), of forward; tensors of lengths likewise, sinks replicated
    sharded by heads     Shard(1), tensors of lengths replicated, sinks Shard(0); heads_kv shares out
                         evenly, or is heads_q
    q sharded by heads   k and v replicated, if they have one head; their gradients are Partial()

DTensor redistributes what is sharded otherwise first, as for any operator, but not tensors of lengths. For a
sequence that is sharded there is context_parallel (flash_cute.integrations.sdpa), or flash_cute.merge.

Source: torch/distributed/tensor/_ops/_matrix_ops.py and experimental/_register_sharding.py of torch 2.11.
"""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from flash_cute._torch import ops, private
from flash_cute.options import LENGTHS

OpStrategy, RuntimeSchemaInfo, expand_to_full_mesh, register_op_strategy = private.parts_of_dtensor()

RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dsinks")}
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}
Placements = dict[str, Placement]  # of each tensor of a call, by its name


def rule(schema) -> OpStrategy:
    """All the ways to share out one call, DTensor's OpSchema, for DTensor to choose from."""
    names = private.argument_names(schema.op)
    given = dict(zip(names, schema.args_schema, strict=False)) | schema.kwargs_schema
    tensors = {name: value for name, value in given.items() if isinstance(value, OpStrategy)}
    results = RESULTS["backward" if "out" in tensors else "forward"]
    asked = {"dq": given.get("needs_dq", True), "dsinks": "sinks" in tensors}
    skipped = [name for name in results if not asked.get(name, given.get("needs_dkv", True))]
    packed = len(tensors["q"].shape) == 3
    by_batch = not packed and "block_table" not in tensors  # any sequence may have any page
    one_mask = "ranges" in tensors and tensors["ranges"].shape[0] == 1
    heads_q, heads_kv = tensors["q"].shape[1], tensors["k"].shape[1]
    ways = [
        [Replicate() if name in skipped else placements[name] for name in (*results, *tensors)]
        for placements in _ways(heads_q, heads_kv, packed, by_batch, one_mask)
    ]

    def is_valid(strategy) -> bool:
        specs = dict(zip(tensors, strategy.input_specs, strict=True))
        for name in schema.kwargs_schema.keys() & specs.keys():  # which DTensor doesn't redistribute
            if specs[name].placements != tensors[name].strategies[0].output_spec.placements:
                return False
        split = [placement == Shard(1) for placement in specs["k"].placements]
        parts = prod(size for size, is_split in zip(specs["k"].mesh.shape, split, strict=True) if is_split)
        return heads_q == heads_kv or heads_kv % parts == 0

    expanded = expand_to_full_mesh(schema.get_mesh_from_args(), schema, ways, input_index=len(results))
    return OpStrategy([strategy for strategy in expanded.strategies if is_valid(strategy)])


def _ways(heads_q: int, heads_kv: int, packed: bool, by_batch: bool, one_mask: bool) -> list[Placements]:
    """On one dimension of the mesh. Packed, tensors are (total, heads, head_dim), LSEs (heads, total)."""
    tensors, lses = ("q", "k", "v", "out", "dout"), ("lse", "dlse")
    by_heads = dict.fromkeys(LENGTHS, Replicate())
    by_heads |= dict.fromkeys(tensors, Shard(1)) | dict.fromkeys(lses, Shard(0 if packed else 1))
    sinks = "sinks", "dsinks"
    by_heads |= dict.fromkeys(sinks, Shard(0))
    ways = [dict.fromkeys((*LENGTHS, *tensors, *lses, *sinks), Replicate()), by_heads]
    if by_batch:
        way = dict.fromkeys((*LENGTHS, *tensors, *lses), Shard(0))
        ways.append(way | {"sinks": Replicate(), "dsinks": Partial()})
        if one_mask:  # for the whole batch
            ways[-1]["ranges"] = Replicate()
    ways = [way | {gradient: way[name] for gradient, name in GRADIENTS.items()} for way in ways]
    if heads_kv == 1 < heads_q:
        ways.append(ways[1] | {"k": Replicate(), "v": Replicate(), "dk": Partial(), "dv": Partial()})
    return ways


def _register() -> None:
    # What decides about the result beside the shapes and placements of positional tensors.
    info = RuntimeSchemaInfo(static_kwargkey=[*LENGTHS, "sinks", "needs_dq", "needs_dkv"])
    for op in (ops._forward, ops._forward_varlen, ops._backward, ops._backward_varlen):
        register_op_strategy(op, rule, info)


_register()
