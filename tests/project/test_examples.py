"""The examples run from end to end, in a small size, and find that the losses agree."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.cases import ROOT

import flash_cute

LLAMA = {"layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "tokens": 200, "steps": 4}
SIZES = {"layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "batch": 2, "context": 48, "steps": 8}


def example(name: str, *arguments: str, device, folder) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / name), f"--device={device.type}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def here(device, tmp_path, monkeypatch, capsys):
    """Runs an example likewise, but in this process, which has imported PyTorch already."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
        program = str(ROOT / "examples" / name)
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [program, f"--device={device.type}", *arguments])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(program, run_name="__main__")
        return subprocess.CompletedProcess(sys.argv, left.value.code or 0, *capsys.readouterr())

    return run


@pytest.mark.parametrize("mask", ["causal", "documents", "prefix"])
def test_char_gpt(device, tmp_path, here, mask):
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    options = [*sizes, f"--mask={mask}", "--contexts", "30", "64", "--plot", "curves.png"]
    files = [
        str(ROOT / "flash_cute" / "dot_product_attention.py"),
        str(ROOT / "tests" / "support" / "cases.py"),
    ]
    run = partial(example, device=device, folder=tmp_path) if mask == "causal" else here
    ran = run("char_gpt.py", *options, *files)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the losses agree" in ran.stdout
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("mask", ["packed", "documents", "prefix"])
def test_train_llama(device, tmp_path, here, mask):
    pytest.importorskip("transformers", reason="needs transformers")
    sizes = [f"--{name}={size}" for name, size in LLAMA.items()]
    options = *sizes, f"--mask={mask}", str(ROOT / "tests" / "support" / "cases.py")
    run = partial(example, device=device, folder=tmp_path) if mask == "packed" else here
    ran = run("train_llama.py", *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the losses agree" in ran.stdout
    assert all(attention in ran.stdout for attention in ("eager", "SDPA", "flash_cute"))


SERVING = {"requests": 9, "running": 4, "pages": 20, "page_size": 8, "chunk": 10, "prompt": 40, "new": 20}


def test_generate(device, tmp_path):
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in (SIZES | SERVING).items()]
    options = "--check", *sizes, str(ROOT / "tests" / "integrations" / "test_sdpa.py")
    ran = example("generate.py", *options, device=device, folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = dict(re.findall(r"^ *([^\d\n]+?) +(\d+) .* of \2$", ran.stdout, re.MULTILINE))
    assert rows == {"continuous batching": "9", "one at a time": "4", "SDPA, static cache": "9"}
    assert "the text is that of the model without a cache" in ran.stdout


def boosted(monkeypatch, device, **options) -> tuple:
    """The program, its options, and a model whose attention decides.

    More sequences than run at a time, in a pool that is too small for those, and prompts in several chunks.
    """
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import char_gpt
    import generate

    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = char_gpt.GPT(**sizes).to(device)
    with torch.no_grad():
        for block in model.blocks:
            for layer in (*block.qkv, block.project):
                layer.weight *= 4
    return generate, SimpleNamespace(**sizes, **SERVING | options, device=device), model


def test_generated_text_depends_on_the_cache(device, monkeypatch, capsys):
    """Wrong lengths or pages change logits by 0.2 or more."""
    generate, options, model = boosted(monkeypatch, device, check=True, tolerance=1e-2, cache=None)
    assert generate.compare(model, torch.randint(256, (500,), dtype=torch.uint8), options)
    assert "the text is that of the model without a cache" in capsys.readouterr().out
    append = flash_cute.append_kv
    monkeypatch.setattr(
        flash_cute, "append_kv", lambda k, v, *others, **more: append(k, 0 * v, *others, **more)
    )
    assert not generate.compare(model, torch.randint(256, (500,), dtype=torch.uint8), options)


def test_generate_from_codes(device, monkeypatch, capsys):
    """Right ones change logits by 0.6 at most, and the perplexity little; wrong ones by 2.5."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("other GPUs than Hopper do not read caches of 8 bits")
    generate, options, model = boosted(monkeypatch, device, check=False, cache="fp8", requests=4, new=10)
    text = torch.randint(256, (500,), dtype=torch.uint8)
    assert generate.compare(model, text, options)
    plain, codes = map(float, re.findall(r"([\d.]+) from", capsys.readouterr().out))
    assert 0 < abs(codes - plain) < 0.03 * plain

    @torch.inference_mode()
    def most() -> float:
        requests = generate.draw(text, options)
        scales = generate.scales_for(model, requests[0].tokens, device)
        server = generate.Server(model, options, scales, options.running)
        assert server.k_pages.dtype == server.v_pages.dtype == torch.float8_e4m3fn
        served, _ = generate.timed(partial(generate.serve, "", server), requests)
        written = [new.end - len(new.tokens) for new in requests]
        return max(map(partial(generate.check, model), served, written))

    assert most() < 1
    append = flash_cute.append_kv

    def without_scales(*given, k_scale, v_scale, **options):
        return append(*given, **options)

    monkeypatch.setattr(flash_cute, "append_kv", without_scales)
    assert most() > 1


@pytest.mark.parametrize(
    ("name", "argument", "sentence"),
    [
        ("char_gpt", "--steps=0", "--steps: 0 is no number above 0"),
        ("char_gpt", "--contexts=-3", "--contexts: -3 is no number above 0"),
        ("char_gpt", "--head-dim=7", "--head-dim: 7 is odd"),
        ("char_gpt", "--plot=nowhere/curves.png", "there is no such folder"),
        ("generate", "--chunk=0", "--chunk: 0 is no number above 0"),
        ("char_gpt_parallel", "--steps=1", "start it by torchrun --nproc-per-node 2"),
        ("generate", "--check --cache=fp8", "--check: with --cache fp8 the text is not that of the model"),
        ("generate", "--pages=2", "2 pages of 16 are too few for a prompt of 160 and 48 new tokens"),
    ],
)
def test_wrong_options(here, name, argument, sentence):
    """Before anything is computed."""
    ran = here(f"{name}.py", *argument.split(), "--device=cpu")
    assert ran.returncode == 2
    assert sentence in ran.stderr
