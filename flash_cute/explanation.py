"""What a call would run, its work, and the least time that its device would need for that."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from typing_extensions import Unpack

from flash_cute import lengths
from flash_cute._cpu import key_ranges
from flash_cute._cpu.sequences import rows_that_count
from flash_cute._cpu.windows import Window
from flash_cute._torch import ops
from flash_cute._torch.autocast import autocast_dtype, is_rounded
from flash_cute.dot_product_attention import call, offsets_of
from flash_cute.options import FP8, LENGTHS, Options, spelled_out
from flash_cute.reference import visible
from flash_cute.wording import require_bool


@dataclass(frozen=True)
class Rates:
    """A device's best: dense 16-bit matrix products and memory traffic; source says how that is known.

    bytes_per_second: of a copy. read_bytes_per_second: where nothing is written; None where it is not known.
    """

    flops_per_second: float
    bytes_per_second: float
    source: str
    read_bytes_per_second: float | None = None

    def memory_seconds(self, read: float, written: float) -> float:
        """As much is read as is written at the rate of a copy, the rest at that of reading."""
        copied = 2 * min(read, written)
        rest = self.read_bytes_per_second or self.bytes_per_second
        return copied / self.bytes_per_second + (read + written - copied) / rest


# By the name that CUDA gives the device.
MEASURED = {
    "NVIDIA H100 80GB HBM3": Rates(788e12, 3.02e12, "measured: cuBLAS, copy"),
    "NVIDIA H200": Rates(800e12, 4.24e12, "measured: cuBLAS in bursts, copy, read", 4.54e12),
}

# FLOPs per clock and multiprocessor, 16-bit inputs summed in fp32, by compute capability, from NVIDIA's
# architecture papers. GeForce cards do half of what 8.6, 8.9 and 12.0 do elsewhere.
FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}

# A weight is kept by dropout with a multiple of 1 / this (csrc/problem.hpp).
DROPOUT_STEPS = 4096

# Of these rates: TF32 has half of 16-bit types', and an exact product of float32 is made of three of TF32.
SHARES = {"tf32": 1 / 2, "fp32": 1 / 6}

PREFIXES = (
    *((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")),
    *((1, ""), (1e-3, "m"), (1e-6, "µ")),
)


def rates_of(device: torch.device) -> Rates | None:
    """The device's rates as measured, or estimated from its clocks; None where neither is possible."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    flops_per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    if properties.name in MEASURED or not flops_per_clock:
        return MEASURED.get(properties.name)
    clock, memory_clock = 1e3 * properties.clock_rate, 1e3 * properties.memory_clock_rate  # torch gives kHz
    return Rates(
        flops_per_second=flops_per_clock * properties.multi_processor_count * clock,
        bytes_per_second=2 * memory_clock * properties.memory_bus_width / 8,  # two transfers a clock; bits
        source="estimated from its clocks",
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def scaled(value: float, unit: str) -> str:
    """value to three digits with a decimal prefix: scaled(2.5e9, "B") is "2.5 GB"."""
    factor, prefix = next((scale for scale in PREFIXES if value >= scale[0]), (1, ""))
    return f"{value / factor:.3g} {prefix}{unit}"


# Keys of a kernel's plan that tell how it is made and launched, which no argument of a call chooses.
INTERNALS = {
    *(
        "block_m",
        "block_n",
        "stages",
        "packed_heads",
        "threads",
        "registers",
        "local_bytes",
        "smem_bytes",
        "grid",
    ),
    *("splits", "seqlen_k_used", "gqa_splits", "lse_delta_mma", "workspace"),
}


def work(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[int | None, int | None],
    given: dict[str, torch.Tensor],
    backward: bool,
    element: int,
) -> dict[str, int]:
    """What a call, or its backward, has to do: FLOPs of the pairs that see each other, bytes read and written
    at least once, and those of them that are written.

    given: the tensors of lengths, mask, bias and slopes, which are read; element: bytes of one, which
    autocast may have made fewer. Pairs that a bias hides count, as it has to be read to know.
    """
    packed = "cu_seqlens_q" in given
    heads_q, heads_kv, head_dim, head_dim_v = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    heads = heads_q  # of which each has as many pairs
    size_q, size_k = (x.shape[0 if x.dim() == 3 else 2] for x in (q, k))
    if "block_table" in given:
        size_k *= given["block_table"].shape[1]
    if given:
        offsets_q = given.get("cu_seqlens_q")
        offsets_k = given.get("cu_seqlens_k", offsets_q) if k.dim() == 3 else None
        batch = len(offsets_q) - 1 if packed else q.shape[0]
        given_k = given.get("seqused_k")
        queries = rows_that_count(batch, size_q, offsets_q, given.get("seqused_q"), None)
        keys = rows_that_count(batch, size_k, offsets_k, given_k, given.get("leftpad_k"))
        sizes = Counter((r.stop - r.start, c.stop - c.start) for r, c in zip(queries, keys, strict=True))
    else:
        sizes = {(size_q, size_k): q.shape[0]}
    if "mask" in given:
        pairs = sum(
            _pairs_of_masked(given["mask"], given.get("ranges"), window, entry, r, c, size_k)
            for entry, (r, c) in enumerate(zip(queries, keys, strict=True))
        )
        heads = heads_q // max(1, given["mask"].shape[1])  # that each head of the mask is for
    elif "ranges" in given:
        begins = rows_that_count(batch, size_k, offsets_k, given_k, None)
        pairs = sum(
            key_ranges.pairs(
                Window.of(r.stop - r.start, c.stop - c.start, *window),
                key_ranges.of_sequence(
                    given["ranges"], (slice(b, b + 1), slice(None), r), c.start - begins[b].start
                ),
            )
            for b, (r, c) in enumerate(zip(queries, keys, strict=True))
        )
    else:
        pairs = sum(count * Window.of(*size, *window).pairs for size, count in sizes.items())
    rows_read, keys_read = (sum(count * size[side] for size, count in sizes.items()) for side in (0, 1))
    lse_row = torch.float32.itemsize // element  # as many elements as a float has room for
    if backward:  # reads q, out, dout and lse; writes dq, dk and dv
        row_read, written = head_dim + 2 * head_dim_v + lse_row, q.numel() + k.numel() + v.numel()
        products = 3 * head_dim + 2 * head_dim_v
    else:
        row_read, written = head_dim, q.numel() // head_dim * (head_dim_v + lse_row)
        products = head_dim + head_dim_v
    read = heads_q * rows_read * row_read
    element_k = k.element_size() if k.dtype in FP8 else element
    sizes_of_elements = {"mask": 1, "bias": element, "alibi_slopes": torch.float32.itemsize}
    read_besides = heads_kv * keys_read * (head_dim + head_dim_v) * element_k + sum(
        size * given[name].numel() for name, size in sizes_of_elements.items() if name in given
    )
    return {
        "flops": 2 * products * heads * pairs,
        "bytes": element * (read + written) + read_besides,
        "written_bytes": element * written,
    }


def _pairs_of_masked(
    mask: torch.Tensor,
    ranges: torch.Tensor | None,
    window: tuple[int | None, int | None],
    entry: int,
    queries: slice,
    keys: slice,
    room: int,
) -> int:
    """The pairs that see each other in one sequence of a padded batch, in all heads of the mask.

    queries, keys: its rows that count, of `room` for keys.
    """
    mask = mask[entry if len(mask) > 1 else 0]
    mask = mask[:, queries] if mask.shape[1] > 1 else mask
    columns = mask.shape[-1]
    if mask.dtype == torch.uint8:
        bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
        columns = room if columns == -(-room // 8) else 8 * columns
        mask = bits.bool().flatten(-2)[..., :columns]
    if columns < room:  # of the last keys; those before them are seen
        before = keys.stop - columns
        mask = torch.nn.functional.pad(mask, (before, 0), value=True) if before > 0 else mask[..., -before:]
    sizes = queries.stop - queries.start, keys.stop - keys.start
    of_queries = key_ranges.of_sequence(ranges, (slice(entry, entry + 1), slice(None), queries), keys.start)
    seen = visible(*sizes, window=window, device=mask.device, ranges=of_queries)
    return int((seen & mask[..., keys]).sum())


class Explanation(dict):
    """The plan of a call: a dict that prints as a table.

    Keys: device, backward (or is it the forward?), family ("cpu" where there is no kernel), head_dim, of q
    and k, and head_dim_v, softmax_scale, window_left and window_right (None is unlimited), fp8 (are k and v a
    cache of 8 bits?), ranges (of keys, how many each query has), sinks (are there any?), mask ("bool", "bits"
    or None), bias (its shape, or None), alibi_slopes (likewise), softcap (0 for none), dropout_keep (the
    share of weights that dropout keeps, 1 without), copies (inputs that are copied first, and why),
    flops (for each visible pair 2 for each column of k and of v, in the backward 6 and 4), bytes (each input
    read and each output written once) and of these written_bytes, roofline (None where the device's rates are
    unknown, else seconds, bound_by "compute" or "memory", and the rates).

    Of a backward also: bias_gradient (None without a bias, else the family and the workspace_bytes of what
    computes its gradient, beside the rest, where it requires grad).

    Of a kernel also: element, bucket and bucket_v (the head dims that it is compiled for), workspace_bytes
    (for unequal lengths, for tiles that blocks take one by one, for partial results, and for every backward),
    partial_results (of a forward: at most so many, where keys are cut into parts, else 0).

    With internals=True, of a kernel: block_m, block_n, stages, packed_heads (query heads that share a tile),
    threads, registers and local_bytes (spills) per thread, smem_bytes, grid in blocks, seqlen_k_used. Of a
    backward, whose kernel is the one that takes longest: gqa_splits (into how many the query heads that share
    K and V are split, each with tiles of its own), lse_delta_mma (do LSE and delta come by a product?),
    workspace (bytes of each of its regions).
    """

    @classmethod
    def of(cls, plan: dict[str, Any], device: torch.device, internals: bool = False) -> Explanation:
        roofline = None
        if rates := rates_of(device):
            share = SHARES.get(plan.get("element"), 1)
            rates = replace(rates, flops_per_second=share * rates.flops_per_second)
            compute = plan["flops"] / rates.flops_per_second
            written = plan["written_bytes"]
            memory = rates.memory_seconds(plan["bytes"] - written, written)
            bound_by = "compute" if compute > memory else "memory"
            roofline = {"seconds": max(compute, memory), "bound_by": bound_by, **asdict(rates)}
        shown = {key: value for key, value in plan.items() if internals or key not in INTERNALS}
        return cls(shown, device=device_name(device), roofline=roofline)

    def __str__(self) -> str:
        limits = (self["window_left"], self["window_right"])
        left, right = ("all" if limit is None else limit for limit in limits)
        rows = {
            "device": self["device"],
            **self._kernel_rows(),
            "window": f"{left} keys before each query's own, {right} after it",
            **self._rows_of_masks(),
            **self._rows_of_bias_gradient(),
            "work": f"{scaled(self['flops'], 'FLOP')}, {scaled(self['bytes'], 'B')}",
            "copies": "; ".join(self["copies"]) or "none",
            "roofline": self._roofline_text(),
        }
        return "\n".join(f"{title:<9} {text}" for title, text in rows.items())

    def _rows_of_masks(self) -> dict[str, str]:
        count = self.get("ranges", 0)
        ranges = {"ranges": f"{count} of keys for each query, cut by the window"} if count else {}
        sinks = {"sinks": "a logit for each query head, in its sum"} if self.get("sinks") else {}
        return ranges | sinks | self._rows_of_scores()

    def _rows_of_scores(self) -> dict[str, str]:
        kinds = {"bool": "a boolean for each pair", "bits": "a bit for each pair, 8 keys a byte"}
        mask, bias, slopes, cap = (self.get(name) for name in ("mask", "bias", "alibi_slopes", "softcap"))
        keep = self.get("dropout_keep", 1)
        kept = f"{keep * DROPOUT_STEPS:.0f} of {DROPOUT_STEPS} weights, by a bit for each pair"
        rows = {
            "mask": mask and kinds[mask],
            "bias": bias and f"{bias}, added to scores",
            "alibi": slopes and f"slopes {slopes}, times the distance",
            "softcap": cap and f"scores are less than {cap:g} either way",
            "dropout": keep < 1 and f"keeps {kept}",
        }
        return {title: text for title, text in rows.items() if text}

    def _rows_of_bias_gradient(self) -> dict[str, str]:
        if not (plan := self.get("bias_gradient")):
            return {}
        what = f"{plan['family']}, scores and their gradients once more where the bias requires grad"
        return {"dbias": f"{what}, workspace {scaled(plan['workspace_bytes'], 'B')}"}

    def _kernel_rows(self) -> dict[str, str]:
        if self["family"] == "cpu" and self._rows_of_scores():
            return {"kernel": "PyTorch's operators in float32, for a part of the queries at a time"}
        if self["family"] == "cpu" and self["backward"]:
            return {"kernel": "PyTorch's CPU flash attention backward in float32"}
        if self["family"] == "cpu" and self["head_dim"] != self["head_dim_v"]:
            wide = f"columns of zeros make all {max(self['head_dim'], self['head_dim_v'])} wide"
            return {"kernel": f"PyTorch's CPU flash attention in float32; {wide}"}
        if self["family"] == "cpu":
            types = "full and causal in the inputs' type, other masks and tiny scores in float32"
            return {"kernel": f"PyTorch's CPU flash attention; {types}"}
        direction, parts = " backward" if self["backward"] else "", self.get("partial_results")
        serves = f"for head_dim up to {self['bucket']}"
        if self["bucket_v"] != self["bucket"]:
            serves += f" and, of v, up to {self['bucket_v']}"
        element = f"{self['element']} over a cache of fp8" if self.get("fp8") else self["element"]
        return {
            "kernel": f"{self['family']}{direction}, {element}, {serves}",
            **(self._internal_rows() if "block_m" in self else {}),
            **({"keys": f"cut into parts, up to {parts} partial results"} if parts else {}),
            "workspace": self._workspace_text(),
        }

    def _internal_rows(self) -> dict[str, str]:
        heads = self["packed_heads"]
        rows = "queries" if heads == 1 else f"rows ({heads} heads of each query)"
        tile = f"{self['block_m']} {rows} x {self['block_n']} keys, {self['stages']} stages"
        if self.get("lse_delta_mma"):
            tile += ", LSE and delta by a product"
        if self.get("gqa_splits", 1) > 1:
            tile += f", query heads that share K and V in {self['gqa_splits']} parts"
        return {
            "tile": tile,
            "block": f"{self['threads']} threads, {self['registers']} registers, "
            f"{self['local_bytes']} bytes spilled, {self['smem_bytes'] / 1024:.4g} KiB shared memory",
            "grid": f"{self['grid']} blocks",
        }

    def _workspace_text(self) -> str:
        if not self["workspace_bytes"]:
            return "none"
        total = scaled(self["workspace_bytes"], "B")
        regions = self.get("workspace", {})
        listed = ", ".join(f"{name} {scaled(size, 'B')}" for name, size in regions.items())
        return f"{total}: {listed}" if regions else total

    def _roofline_text(self) -> str:
        if self["roofline"] is None:
            return "unknown for this device"
        seconds, bound_by, flops, bandwidth, source, reading = self["roofline"].values()
        rates = f"{scaled(flops, 'FLOP/s')}, {scaled(bandwidth, 'B/s')}"
        rates += f" ({scaled(reading, 'B/s')} where it only reads), {source}" if reading else f", {source}"
        return f"{scaled(seconds, 's')}, bound by {bound_by} ({rates})"


@spelled_out(Options)
def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    backward: bool = False,
    internals: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """What forward, or with cu_seqlens_q forward_varlen, would run with these arguments, which they document.

    With backward=True it is what the backward of that call would run, for the gradients of q, k and v, and
    beside them bias_gradient for that of a bias; internals=True adds the kernel's tile and launch. Launches
    nothing, but reads the lengths from the device to count the work; print() shows it.
    """
    require_bool("flash_cute.explain", "backward", backward)
    require_bool("flash_cute.explain", "internals", internals)
    offsets = offsets_of(cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is None:
        del offsets["cu_seqlens_q"]
    op = ops.plan_backward if backward else ops.plan
    plan = json.loads(call("explain", op, q, k, v, dict(offsets), causal, softmax_scale, options))
    read = *LENGTHS, "mask", "bias", "alibi_slopes"
    given = offsets | {name: options[name] for name in read if options.get(name) is not None}
    if q.is_nested:
        slopes = {"alibi_slopes": given.pop("alibi_slopes")} if "alibi_slopes" in given else {}
        q, k, v, given = lengths.unwrapped(q, k, v, given)
        given |= slopes
    window = plan["window_left"], plan["window_right"]
    plan |= work(q, k, v, window, given, backward, autocast_dtype(q).itemsize)
    plan["ranges"] = given["ranges"].shape[-2] if "ranges" in given else 0
    plan["fp8"] = k.dtype in FP8
    plan["sinks"] = options.get("sinks") is not None
    if backward:
        plan.setdefault("bias_gradient", None)
    plan |= _scores(q, options)
    if plan["bias"] and is_rounded(options["bias"], q):
        plan["copies"].append(f"bias: it is rounded from {options['bias'].dtype} to {autocast_dtype(q)}")
    return Explanation.of(plan | {"backward": backward}, q.device, internals)


def _scores(q: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What of the plan is about scores and weights."""
    mask, bias, slopes = (options.get(name) for name in ("mask", "bias", "alibi_slopes"))
    return {
        "mask": None if mask is None else "bool" if mask.dtype == torch.bool else "bits",
        "bias": None if bias is None else tuple(bias.shape),
        "alibi_slopes": None if slopes is None else tuple(slopes.shape),
        "softcap": float(options.get("softcap", 0.0)),
        "dropout_keep": round(DROPOUT_STEPS * (1 - options.get("dropout_p", 0.0))) / DROPOUT_STEPS,
    }


def supported() -> dict[str, Any]:
    """What is compiled: {"families": {family: {element: [head_dim, ...]}}, "backward": ..., "kernels": [...]}

    A kernel serves every head_dim of q and k up to its own, and every one of v up to its head_dim_v.
    "families" has the forward's kernels for which both are the same and "backward", likewise, those of the
    backward; "kernels" lists all of the forward with their head dims, tile and shared memory in bytes, once
    for each tile that the launch chooses from. All are empty in a build without CUDA. The CPU needs no kernel
    and is always supported.
    """
    kernels = json.loads(ops.compiled())
    found: dict[str, dict[str, dict[str, list[int]]]] = {"forward": {}, "backward": {}}
    for kernel in kernels:
        elements = found[kernel["pass"]].setdefault(kernel["family"], {})
        head_dims = elements.setdefault(kernel["element"], [])
        if kernel["head_dim"] == kernel["head_dim_v"] and kernel["head_dim"] not in head_dims:
            head_dims.append(kernel["head_dim"])
    return {
        "families": found["forward"],
        "backward": found["backward"],
        "kernels": [kernel for kernel in kernels if kernel["pass"] == "forward"],
    }
