#!/usr/bin/env bash
# Shows that one built wheel serves other torches and Pythons: each gets a venv of its own, in which the wheel is
# installed and its operators are listed and run on the CPU, forward and backward.
#
#   tools/abi_check.sh dist/flash_cute-*.whl python3.11=2.11.0 python3.12=2.15.0
set -euo pipefail

wheel=$1
shift
folder=$(mktemp -d "${TMPDIR:-/tmp}/flash_cute_abi.XXXXXX")
trap 'rm -rf "$folder"' EXIT

cat >"$folder/probe.py" <<'PROBE'
import platform

import torch

import flash_cute

names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("flash_cute::")]
inputs = [torch.randn(1, 2, 77, 64).to(torch.bfloat16).requires_grad_() for _ in range(3)]


def results(function, *inputs):
    out, lse = function(*inputs, causal=True)
    return out, lse, *torch.autograd.grad(out.double().square().sum() + lse.double().sum(), inputs)


exact = results(flash_cute.reference.forward, *(x.detach().double().requires_grad_() for x in inputs))
pairs = zip(results(flash_cute.forward, *inputs), exact, strict=True)
error = max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)
assert error < 0.02, error
print(f"Python {platform.python_version()}, torch {torch.__version__}: relative error {error:.4f}, {', '.join(sorted(names))}")
PROBE

for pair in "$@"; do
    rm -rf "$folder/venv"
    "${pair%%=*}" -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet "torch==${pair#*=}"
    "$folder/venv/bin/pip" install --quiet --no-deps "$wheel"
    (cd "$folder" && venv/bin/python -W ignore probe.py)
done
