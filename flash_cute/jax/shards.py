"""Arrays on meshes: the axes of a shard_map that they vary over, and explicitly sharded dimensions."""

from __future__ import annotations

import jax


def axes_of(x) -> frozenset[str]:
    """Of the shard_map's axes around, those that x varies over."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())  # JAX before 0.10


def varying(x, axes):
    """x varying over these axes, too. Its gradient is summed over those that it did not vary over."""
    axes -= axes_of(x)
    if not axes:
        return x
    if not hasattr(jax.lax, "pcast"):  # JAX 0.8.0 and older
        return jax.lax.pvary(x, tuple(axes))
    return jax.lax.pcast(x, tuple(axes), to="varying")


def alike(arrays):
    """The arrays, each varying over the axes that any of them does."""
    axes = frozenset().union(*(axes_of(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: varying(x, axes), arrays)


def explicit_axes(x) -> tuple:
    """The explicit axes of a mesh, if any, that each dimension is sharded over."""
    return tuple(jax.typeof(x).sharding.spec)


def over_shards(compute, arrays, specs, out_specs):
    """compute(*arrays) of each shard; the first of the arrays says how they are, and the others follow it."""
    axes = {axis for entry in specs[0] for axis in (entry if isinstance(entry, tuple) else (entry,))} - {None}
    leaves, tree = jax.tree.flatten(tuple(arrays))
    leaves = [
        x if explicit_axes(x) == tuple(s) else jax.sharding.reshard(x, s)
        for x, s in zip(leaves, specs, strict=True)
    ]
    if not axes:
        return compute(*jax.tree.unflatten(tree, leaves))
    mesh = jax.typeof(leaves[0]).sharding.mesh
    return jax.shard_map(
        lambda *leaves: compute(*jax.tree.unflatten(tree, leaves)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=out_specs,
        axis_names=axes,
    )(*leaves)
