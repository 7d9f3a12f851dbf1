"""Tables of the programs that draw no plot."""

from __future__ import annotations

import statistics
from functools import partial

from .decode import read_rate
from .tables import by_column, digits, head_dim_of, reasons, shape_labels, source, title, union

# Whose errors of gradients others are compared with; where scores are changed, the second.
REFERENCE, OPERATORS = "flash", "operators"
WAYS = ("forward", "backward")


def accuracy(results: dict) -> str:
    """A row for each contender of each problem."""
    rows = [
        cell | {"title": title(p), "head_dim": head_dim_of(p), "name": name, "found": found}
        for cell in results["cells"]
        for p in [cell["problem"]]
        for name, found in cell["errors"].items()
    ]

    def error(what: str, row: dict) -> str:
        seen = row["found"][what]
        return f"{statistics.median(seen):.2e} ({max(seen):.2e})"

    case = results.get("case", "plain")
    reference = REFERENCE if case == "plain" else OPERATORS

    def ratio(what: str, row: dict) -> str:
        pairs = zip(row["found"][what], row["errors"][reference][what], strict=True)
        return f"{statistics.median(ours / theirs for ours, theirs in pairs):.3f}"

    measures = union(rows, lambda row: row["found"])
    columns = {"": "d{head_dim}, {title}, {problem[dtype]}: {name}"}
    columns |= {what: partial(error, what) for what in measures}
    if rows[0]["problem"]["direction"] == "backward":
        columns |= {f"{what}/{reference}": partial(ratio, what) for what in measures if what.endswith("RMS")}
    of_case = "" if case == "plain" else f" with {case}"
    told = f"Error against float64{of_case}, median (largest) over the draws:"
    return "\n".join([told, "", *by_column(columns, rows)])


def masks(results: dict) -> str:
    lines = source(results)
    columns = {
        "": "{name}",
        "us": "{times_us[median]:.1f}",
        "TFLOP/s, visible pairs": lambda case: digits(case["visible_tflops"]),
        "TFLOP/s, visited blocks": lambda case: digits(case["visited_tflops"]),
        "share of causal": "{share[median]:.3f}",
        "quartiles": "{share[q25]:.3f} to {share[q75]:.3f}",
    }
    for measured in results["measured"]:
        cases = [case | {"name": name} for name, case in measured["cases"].items()]
        p = cases[0]["problem"]
        told = measured["regime"].capitalize() + (f", {measured['family']}" if "family" in measured else "")
        told += f", {p['batch']} x {p['heads_q']} heads, {p['seqlen_q']} tokens, head dim {head_dim_of(p)}"
        told += f", {p['dtype']}, rounds: {measured['rounds']}"
        lines += ["", told, "", *by_column(columns, cases)]
    return "\n".join(lines)


def overhead(results: dict) -> str:
    lines = []
    for cell in results["cells"]:
        p, rows = cell["problem"], [{"name": name, **us} for name, us in cell["us"].items()]
        shape = f"({p['batch']}, {p['heads_q']}, {p['seqlen_q']}, {p['head_dim']}) {p['mask']}, {p['dtype']}"
        measures = next(iter(cell["us"].values()))
        columns = {"": "{name}"} | {what: f"{{{what}[median]:.1f}}" for what in measures}
        lines += [f"{shape}, microseconds per call:", "", *by_column(columns, rows), ""]
    return "\n".join(lines).rstrip()


def ranges(results: dict) -> str:
    """The last columns say how many times as fast ranges are as the others, in each pass."""

    def time(call: str, cell: dict) -> float:
        return cell["times_us"][call]["median"]

    def speed(peer: str, way: str, cell: dict) -> str:
        return f"{time(f'{peer}, {way}', cell) / time(f'ranges, {way}', cell):.2f}"

    columns = {"mask": "{mask}", "heads x tokens x head dim": "{shape[1]} x {shape[2]} x {shape[3]}"}
    for call in (f"{who}, {way}" for way in WAYS for who in ("ranges", "other", "flex")):
        columns[call] = lambda cell, call=call: digits(time(call, cell))
    for way, peer in ((way, peer) for way in WAYS for peer in ("other", "flex")):
        columns[f"over {peer}, {way}"] = partial(speed, peer, way)
    told = "Microseconds in bursts; then times as fast as the others:"
    return "\n".join([*source(results), "", told, "", *by_column(columns, results["cells"])])


def softmax(results: dict) -> str:
    def ratio(peer: str, cell: dict) -> str:
        over = cell[f"over_{peer}"]
        return f"{over['median']:.3f} ±{(over['q75'] - over['q25']) / 2:.3f}"

    columns = {"direction": "{direction}", "type": "{element}", "columns": "{columns}", "rows": "{rows}"}
    columns |= {"ours, us": "{times_us[ours][median]:.1f}", "of a copy": "{of_a_copy:.2f}"}
    columns |= {f"times {peer}": partial(ratio, peer) for peer in ("torch", "triton")}
    return "\n".join([*source(results), "", *by_column(columns, results["cells"])])


def softmax_matmul(results: dict) -> str:
    cells, read = results["cells"], read_rate(results)

    def share(cell: dict) -> str:
        took = cell["passes"]["forward"]["times_us"]["ours"]["median"]
        return f"{cell['problem']['bytes'] / took * 1e6 / read:.2f}"

    columns = {"x": "{shape[0]} x {shape[1]} x {shape[2]} x {shape[2]}", "head dim": "{shape[3]}"}
    for way, told in {"forward": "forward", "both": "forward and backward"}.items():
        of_way = f"{{passes[{way}]"
        names = union(cells, lambda cell, way=way: cell["passes"][way]["times_us"])
        columns |= {f"{told}: {name}": f"{of_way}[times_us][{name}][median]:.0f}}" for name in names}
        peers = [name for name in names if name != "ours"]
        columns |= {f"times {name}, {told}": f"{of_way}[speedup][ours][{name}]:.2f}}" for name in peers}
    told = "Microseconds in bursts, and times as fast as the others"
    if read:
        columns["of the read rate"] = share
        told += f"; then the rate at which our forward reads x, of {read / 1e9:.0f} GB/s"
    table = by_column(columns, cells)
    return "\n".join([*source(results), "", f"{told}:", "", *table, "", *reasons(cells)]).rstrip()


def training(results: dict) -> str:
    first = results["cells"][0]
    columns = {"head dim": "{head_dim}", "context": "{context}"}
    columns[""] = lambda cell: "compiled" if cell["compiled"] else "eager"
    for name in first["tokens_per_second"]:
        columns[name] = lambda cell, name=name: f"{cell['tokens_per_second'][name]['median'] / 1e6:.3f} M/s"
    for peer in first["over"]:
        over = f"{{over[{peer}]"
        columns[f"times {peer}"] = f"{over}[median]:.3f}} ({over}[q25]:.3f}} to {over}[q75]:.3f}})"
    told = "{layers} layers of width {width}, {tokens} tokens a step, {turns} turns".format(**results["size"])
    return "\n".join([*source(results), "", told, "", *by_column(columns, results["cells"])])


def jax_attention(results: dict) -> str:
    cells = results["cells"]
    labels = [label.replace("\n", ", ") for label in shape_labels(cells)]
    named = "{direction}, head dim {head_dim}, {mask}, "
    rows = [
        cell | {"name": named.format(**cell["problem"]) + label}
        for cell, label in zip(cells, labels, strict=True)
    ]
    means = {
        peer: statistics.geometric_mean([cell["over"][peer] for cell in cells]) for peer in cells[0]["over"]
    }
    rows.append({"name": "all, geometric mean", "times_us": {}, "over": means})
    columns = {"": "{name}"}
    columns |= {f"{name}, us": f"{{times_us[{name}][median]:.1f}}" for name in cells[0]["times_us"]}
    columns |= {f"times {peer}": f"{{over[{peer}]:.3f}}" for peer in means}
    columns["GPU: our time in JAX / in PyTorch"] = "{gpu_share:.3f}"
    told = f"jax {results['jax']}. Times as fast as:"
    return "\n".join([*source(results), "", told, "", *by_column(columns, rows)])


def context_parallel(results: dict) -> str:
    options, rows = results["options"], results["rows"]
    tokens, heads, head_dim = (options[name] for name in ("tokens", "heads", "head_dim"))
    # A causal half of 4 a pair, and the backward's 2.5 times that.
    flops = 3.5 * 2 * heads * tokens**2 * head_dim
    alone = {row["kernels"]: row["milliseconds"] for row in rows if row["gpus"] == 1}
    columns = {
        "kernels": "{kernels}",
        "GPUs": "{gpus}",
        "K and V": lambda row: row["rotation"] or "",
        "ms": "{milliseconds:.1f}",
        "TFLOP/s": lambda row: f"{flops / row['milliseconds'] / 1e9:.0f}",
        "times one GPU": lambda row: f"{alone[row['kernels']] / row['milliseconds']:.2f}",
        "apart": "{apart:.1e}",
    }
    told = f"Causal, bf16, {tokens} tokens, {heads} heads, head dim {head_dim}, forward and backward. "
    told += "Apart: RMS of the difference from flash_cute on one GPU, of that of the results themselves."
    return "\n".join([*source(results), "", told, "", *by_column(columns, rows)])
