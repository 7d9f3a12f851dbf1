"""How errors show values, and under which name and in whose words they come.

Needs torch for a name alone, as flash_cute.jax works without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Real
from typing import TypeVar

_MOST = 100

# In front of each sentence that C++ (csrc/problem.hpp) or a module below the faces raises.
OURS = "flash_cute: "

Function = TypeVar("Function", bound=Callable)

# Names of one thing, here and elsewhere: a function has at most one of them.
_ALIKE = (
    ("q", "query", "queries"),
    ("k", "key", "keys"),
    ("v", "value", "values"),
    ("causal", "is_causal"),
    ("softmax_scale", "scale", "sm_scale", "scaling"),
    ("window", "window_size", "local_window_size", "sliding_window"),
    ("sinks", "s_aux", "learnable_sink", "attention_sinks"),
    ("block_table", "block_tables", "page_table"),
    ("leftpad_k", "cache_leftpad", "key_value_left_padding"),
    ("seqused_k", "cache_seqlens", "key_value_seq_lengths", "kv_lens"),
    ("seqused_q", "query_seq_lengths"),
    ("cu_seqlens_q", "cu_seq_q", "cu_seqlens"),
    ("cu_seqlens_k", "cu_seq_k", "cu_seqlens_kv"),
    ("slots", "slot_mapping"),
    ("rotary_cos", "cos", "cos_cache"),
    ("rotary_sin", "sin", "sin_cache"),
    ("positions", "position_ids"),
    ("bias", "attn_bias", "position_bias"),
    ("softcap", "soft_cap", "logit_softcap", "logits_soft_cap", "attn_logit_softcapping"),
    ("dropout_p", "dropout", "dropout_rate", "p_dropout"),
    ("dropout_seed", "seed", "rng_state", "philox_seed"),
    ("rotary_interleaved", "interleaved"),
    ("return_residual", "return_lse", "return_softmax_lse", "return_attn_probs"),
)
# Masks of other libraries -> what makes ranges of them.
_MASKS = {
    "attn_mask": "from_dense",
    "mask": "from_dense",
    "attention_mask": "padding",
    "key_padding_mask": "padding",
    "block_mask": "from_block_mask",
    "mask_mod": "from_mask_mod",
}
_ABSENT = {
    "dropout": "dropout",
    "dropout_p": "dropout",
    "softcap": "soft cap",
    "logits_soft_cap": "soft cap",
    "alibi_slopes": "ALiBi",
    "bias": "bias",
    "attn_bias": "bias",
    "score_mod": "function of the scores",
}
_NEEDLESS = ("enable_gqa", "pack_gqa", "sm_margin", "scheduler_metadata")


def shown(value: object) -> str:
    """The value in one line of at most _MOST characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # of an integer with more digits than Python writes
        text = f"a very large {type(value).__name__}"
    except RuntimeError:  # of a tensor whose memory was given back
        text = f"a {type(value).__name__} that can't be shown"
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def require_bool(face: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{face}: {name} is {shown(value)}; True or False is accepted")


def require_number(face: str, name: str, value: object, accepted: str) -> None:
    import torch

    if not isinstance(value, Real | torch.SymFloat | torch.SymInt) or isinstance(value, bool):
        kind = "a tensor" if isinstance(value, torch.Tensor) else shown(value)
        raise TypeError(f"{face}: {name} is {kind}; {accepted} is accepted")


def is_ours(error: Exception) -> bool:
    return re.match(r"flash_cute(\.\w+)*: ", str(error)) is not None


def named(error: Exception, face: str, words: Mapping[str, str] | None = None) -> Exception:
    """What a call threw, as the face of that name throws it: of the type that fits, and with its `words`.

    What is not ours comes back unchanged, but for the RuntimeError in which torch says that the CPU's memory
    is used up.
    """
    import torch

    message = str(error).partition("\n")[0]
    _, refused, rest = message.partition("DefaultCPUAllocator: can't allocate memory: you tried to allocate ")
    if refused:
        size = rest.partition(".")[0]  # "5 bytes"
        return torch.OutOfMemoryError(f"{face}: out of memory: {size} could not be allocated on the CPU")
    if not is_ours(error):
        return error
    sentence = message.partition(": ")[2]
    kind = type(error)
    if kind is RuntimeError:  # of C++
        kind = torch.OutOfMemoryError if sentence.startswith("out of memory") else ValueError
        kind = RuntimeError if " failed: " in sentence else kind  # of CUDA, see core/check.hpp
    if words:
        names = [(word, word.partition("'s")[0].rstrip(",;")) for word in sentence.split(" ")]
        sentence = " ".join(words.get(name, name) + word[len(name) :] for word, name in names)
    return kind(f"{face}: {sentence}")


def misnamed(face: str, name: str, arguments: tuple[str, ...]) -> str:
    """What to say of an argument that a function with these has not: what its caller may have meant."""
    sentence = f"{face}: there is no argument {name}"
    for alike in _ALIKE:
        if name in alike and (meant := next((other for other in alike if other in arguments), None)):
            return f"{sentence}; did you mean {meant}?"
    if name in _ABSENT:
        return f"{sentence}, as there is no {_ABSENT[name]}; did you mean to leave it out?"
    if name == "attn_mask" and "bias" in arguments:  # of a face that takes all of SDPA's
        return f"{sentence}; did you mean mask, where True is seen, or bias, which is added to scores?"
    if name in _MASKS and "ranges" in arguments:
        return f"{sentence}; did you mean ranges, which flash_cute.masks.{_MASKS[name]} makes?"
    if name == "num_splits" and "batch_invariant" in arguments:
        return f"{sentence}; did you mean batch_invariant, which has the effect of num_splits=1?"
    if name in (*_NEEDLESS, "num_splits") or name.startswith("max_"):  # seqlen_q, seqlen, q, ...
        return f"{sentence}; none is needed, did you mean to leave it out?"
    if name.startswith("cu_seq") and face in ("flash_cute.forward", "flash_cute.attention"):
        return f"{sentence}; did you mean {face}_varlen?"
    if name in _ALIKE[-1] and "softmax_scale" in arguments:
        return f"{sentence}; did you mean flash_cute.forward, which returns (out, lse)?"
    if close := get_close_matches(name, arguments, n=1):
        return f"{sentence}; did you mean {close[0]}?"
    return f"{sentence}; there are {', '.join(arguments)}"


misnamed._dynamo_marked_constant = True  # torch.compile can't trace difflib, see precision.py


def hinting(module: str) -> Callable[[Function], Function]:
    """A decorator: the function answers a name that no argument of it has with a hint, see misnamed."""

    def decorate(function: Function) -> Function:
        face, arguments = f"{module}.{function.__name__}", tuple(signature(function).parameters)

        @wraps(function)
        def call(*args, **options):
            for name in options:
                if name not in arguments:
                    raise TypeError(misnamed(face, name, arguments))
            return function(*args, **options)

        return call

    return decorate
