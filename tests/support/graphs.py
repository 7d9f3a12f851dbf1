"""What compilers make of a function."""

from __future__ import annotations


def compiled_graphs() -> tuple[list, object]:
    """Graphs of forward and backward as AOTAutograd makes them, and a backend that collects these."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def collect(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if "flash_cute" in str(node.target)})
        return make_boxed_func(graph)

    return graphs, aot_autograd(fw_compiler=collect, bw_compiler=collect)
