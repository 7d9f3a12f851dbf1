"""A torch without one of the private names that flash_cute uses: what works, and what says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cases import ROOT
from torch.autograd import forward_ad

from flash_cute._torch import private

# Asked for at run time, and part of what torch itself does then.
AT_RUN_TIME = {
    "torch.autograd.forward_ad:_current_level",
    "torch.fx.experimental.sym_node:SymNode.hint",
    "torch.fx.experimental.sym_node:SymNode.has_hint",
    "torch._ops:OpOverload._schema",
    "torch._C:_get_schema",
    "torch.nested._internal.nested_tensor:NestedTensor._ragged_idx",
}
# Where another way stands in, nothing is missed.
REPLACED = {
    "torch._C:_are_functorch_transforms_active",
    "torch._C:_is_any_autocast_enabled",
    "torch._C:_get_schema",
    "torch.fx.experimental.proxy_tensor:get_proxy_mode",
}


def test_every_name():
    names = sorted(private.NAMES.keys() - AT_RUN_TIME)
    path = os.pathsep.join([*sys.path, str(ROOT)])
    command = [sys.executable, str(Path(__file__).with_name("private_names_worker.py")), *names]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = defaultdict(dict)
    for line in ran.stdout.splitlines():
        name, use, result = line.split("|")
        said[name][use] = result
    assert sorted(said) == names
    for name, results in said.items():
        sentence = f": {private.NAMES[name]} needs {name.replace(':', '.')}, which torch"
        failed = {use: result for use, result in results.items() if result != "works"}
        assert len(results) == 11
        assert not failed.keys() & {"call", "gradient"}, failed
        assert all(sentence in result for result in failed.values()), failed
        assert bool(failed) == (name not in REPLACED), (name, results)


def test_names_of_run_time(monkeypatch):
    op = torch.ops.flash_cute.forward.default
    expected = private.argument_names(op)
    assert private.argument_names(SimpleNamespace(name=op.name)) == expected
    monkeypatch.delattr(forward_ad, "_current_level")
    assert private.dual_levels_are_active()
    with pytest.raises(
        NotImplementedError, match=r"^flash_cute: a nested tensor needs torch\.nested\..*, which"
    ):
        private.ragged_dimension(torch.ones(1))
