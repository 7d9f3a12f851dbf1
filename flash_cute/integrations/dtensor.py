"""flash_cute on DTensors: which ways of sharding its operators compute as they are.

    import flash_cute.integrations.dtensor

    out, lse = flash_cute.forward(q, k, v, causal=True)  # of DTensors, sharded by batch or heads

The import registers rules for the operators behind forward and forward_varlen, and behind their gradients. On
each dimension of the mesh, processes compute their parts without communication where q, k and v are

    replicated           Replicate()
    sharded by batch     Shard(0), of forward; tensors of lengths, masks, biases and slopes likewise, but
                         what is for the whole batch, and sinks, replicated
    sharded by heads     Shard(1), masks, biases and slopes by their dimension of heads, where they have one,
                         sinks Shard(0), tensors of lengths replicated; heads_kv shares out evenly, or is
                         heads_q
    q sharded by heads   k and v replicated, if they have one head; their gradients are Partial()

DTensor redistributes what is sharded otherwise first, as for any operator, but not tensors of lengths and of
scores. With dropout all has to be replicated, as weights are dropped by their place in the whole. For a
sequence that is sharded there is context_parallel (flash_cute.integrations.sdpa), or flash_cute.merge.

Source: torch/distributed/tensor/_ops/_matrix_ops.py and experimental/_register_sharding.py of torch 2.11.
"""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from flash_cute._torch import ops, private
from flash_cute.options import LENGTHS, OPERANDS
from flash_cute.wording import OURS

OpStrategy, RuntimeSchemaInfo, expand_to_full_mesh, register_op_strategy = private.parts_of_dtensor()

RESULTS = dict.fromkeys((ops._forward, ops._forward_varlen), ("out", "lse"))
RESULTS |= dict.fromkeys((ops._backward, ops._backward_varlen), ("dq", "dk", "dv", "dsinks"))
RESULTS[ops._bias_gradient] = ("dbias", "dv")
RESULTS[ops._weights] = ("weights",)
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}
Placements = dict[str, Placement]  # of each tensor of a call, by its name


def rule(schema) -> OpStrategy:
    """All the ways to share out one call, DTensor's OpSchema, for DTensor to choose from."""
    names = private.argument_names(schema.op)
    given = dict(zip(names, schema.args_schema, strict=False)) | schema.kwargs_schema
    tensors = {name: value for name, value in given.items() if isinstance(value, OpStrategy)}
    results = RESULTS[schema.op]
    asked = {"dbias": True, "dq": given.get("needs_dq", True), "dsinks": "sinks" in tensors}
    if schema.op == ops._bias_gradient:
        asked["dv"] = given.get("needs_dv", False)
    skipped = [name for name in results if not asked.get(name, given.get("needs_dkv", True))]
    packed = len(tensors["q"].shape) == 3
    by_batch = not packed and "block_table" not in tensors  # any sequence may have any page
    batch, heads_q, heads_kv = tensors["q"].shape[0], tensors["q"].shape[1], tensors["k"].shape[1]
    ways = [
        [Replicate() if name in skipped else placements[name] for name in (*results, *tensors)]
        for placements in _ways(heads_q, heads_kv, packed, by_batch, _shapes(tensors))
    ]
    if given.get("dropout_p"):
        _require_replicated(tensors)

    def is_valid(strategy) -> bool:
        specs = dict(zip(tensors, strategy.input_specs, strict=True))
        for name in schema.kwargs_schema.keys() & specs.keys():  # which DTensor doesn't redistribute
            if specs[name].placements != tensors[name].strategies[0].output_spec.placements:
                return False
        if "bias" in specs and (entries := tensors["bias"].shape[0]) not in (1, batch):
            parts = _parts(specs["q"], Shard(0))
            if entries % parts or batch % parts:  # groups of sequences would be torn
                return False
        return heads_q == heads_kv or heads_kv % _parts(specs["k"], Shard(1)) == 0

    expanded = expand_to_full_mesh(schema.get_mesh_from_args(), schema, ways, input_index=len(results))
    return OpStrategy([strategy for strategy in expanded.strategies if is_valid(strategy)])


def _parts(spec, placement: Placement) -> int:
    """Into how many parts a tensor is sharded so."""
    sizes = zip(spec.mesh.shape, spec.placements, strict=True)
    return prod(size for size, found in sizes if found == placement)


def _shapes(tensors: dict[str, OpStrategy]) -> dict[str, tuple[int, ...]]:
    """Of the tensors that may have 1 in place of the batch or the heads of q."""
    return {name: tuple(tensors[name].shape) for name in _MAY_BROADCAST if name in tensors}


_MAY_BROADCAST = "ranges", "mask", "bias", "alibi_slopes"


def _require_replicated(tensors: dict[str, OpStrategy]) -> None:
    """Raises NotImplementedError if one is sharded: weights are dropped by their place in the whole."""
    for name, tensor in tensors.items():
        if any(placement != Replicate() for placement in tensor.strategies[0].output_spec.placements):
            raise NotImplementedError(f"{OURS}dropout_p must be 0 where {name} is sharded")


def _ways(
    heads_q: int, heads_kv: int, packed: bool, by_batch: bool, shapes: dict[str, tuple[int, ...]]
) -> list[Placements]:
    """On one dimension of the mesh. Packed, tensors are (total, heads, head_dim), LSEs (heads, total)."""
    tensors, lses = ("q", "k", "v", "out", "dout", "weights"), ("lse", "dlse")
    by_heads = dict.fromkeys(LENGTHS, Replicate())
    by_heads |= dict.fromkeys(tensors, Shard(1)) | dict.fromkeys(lses, Shard(0 if packed else 1))
    sinks = "sinks", "dsinks"
    by_heads |= dict.fromkeys(sinks, Shard(0)) | {"dropout_seed": Replicate()}
    for name in ("mask", "bias"):
        by_heads[name] = Shard(1) if shapes.get(name, (1, 1))[1] > 1 else Replicate()
    by_heads["alibi_slopes"] = Shard(len(shapes.get("alibi_slopes", (1,))) - 1)
    ways = [dict.fromkeys((*OPERANDS, *tensors, *lses, "dsinks"), Replicate()), by_heads]
    if by_batch:
        way = dict.fromkeys((*OPERANDS, *tensors, *lses), Shard(0))
        way |= {"sinks": Replicate(), "dropout_seed": Replicate(), "dsinks": Partial()}
        # Those for the whole batch.
        shared = [name for name, shape in shapes.items() if shape[0] == 1 or len(shape) == 1]
        ways.append(way | dict.fromkeys(shared, Replicate()))
    ways = [way | {gradient: way[name] for gradient, name in GRADIENTS.items()} for way in ways]
    for way in ways:  # each process has the part of its own pairs of what all of them read
        way["dbias"] = Partial() if way["bias"] == Replicate() != way["q"] else way["bias"]
    if heads_kv == 1 < heads_q:
        ways.append(ways[1] | {"k": Replicate(), "v": Replicate(), "dk": Partial(), "dv": Partial()})
    return ways


def _register() -> None:
    # What decides about the result beside the shapes and placements of positional tensors.
    info = RuntimeSchemaInfo(static_kwargkey=[*OPERANDS, "dropout_p", "needs_dq", "needs_dkv", "needs_dv"])
    for op in RESULTS:
        register_op_strategy(op, rule, info)


_register()
