"""The masks of models, as ranges of keys."""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute.masks.parts import (
    LARGEST,
    MOST,
    Queries,
    after,
    at_most,
    offsets,
    places,
    require_device,
    require_few,
    require_flag,
    require_length,
    require_match,
    require_number,
    require_tensor,
    runs_around,
    runs_in,
    stacked,
)
from flash_cute.wording import hinting, shown


@hinting("flash_cute.masks")
def documents(
    ids: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    seqlen: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Sequences one after the other that don't see each other.

        ids 0 0 0 1 1       #             ###
                            ##            ###
                            ###           ###
                               #             ##
                               ##            ##
                            causal=True   causal=False

    Args:
        ids: integers (batch, seqlen). Neighbours of one number are a document; a negative one sees nothing.
            A number that comes back is another document, where transformers takes both for one.
        cu_seqlens: instead, int32 (documents + 1,), where documents begin and end, among seqlen tokens. Those
            after the last see nothing.
        causal: does a token see only those before it in its document?

    Returns (batch, 1, seqlen, 1, 2), of cu_seqlens with a batch of 1.
    """
    if (ids is None) == (cu_seqlens is None) or (cu_seqlens is None) != (seqlen is None):
        raise TypeError("flash_cute.masks.documents: either ids, or cu_seqlens and seqlen, must be given")
    require_flag("documents", "causal", causal)
    if ids is not None:
        ids = require_tensor("documents", "ids", ids, "batch, seqlen")
        start, end = runs_around(ids)
        counts = ids >= 0
    else:
        require_tensor("documents", "cu_seqlens", cu_seqlens, "documents + 1,")
        seqlen = require_length("documents", "seqlen", seqlen)
        cu_seqlens = offsets(cu_seqlens)
        sequence, place = (x.unsqueeze(0) for x in lengths.sequences_of_rows(seqlen, cu_seqlens))
        start = torch.arange(seqlen, device=cu_seqlens.device).unsqueeze(0) - place
        counts = sequence >= 0
        ends = torch.cat((cu_seqlens[1:], cu_seqlens.new_zeros(1)))  # one more, of no sequence
        end = ends[sequence.clamp(min=0)]
    if causal:
        end = end.minimum(torch.arange(1, start.shape[1] + 1, device=start.device))
    return stacked((start, end.where(counts, start)))


@hinting("flash_cute.masks")
def causal(queries: Queries, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Each token sees those before it and itself: causal=True as ranges, to combine with others.

        queries 5     #
                      ##
                      ###
                      ####
                      #####

    Args:
        queries: where they stand.

    Returns (batch or 1, 1, seqlen_q, 1, 2), packed (total_q, 1, 2).
    """
    place = places("causal", queries, device)
    return stacked((torch.zeros_like(place), after(place)))


@hinting("flash_cute.masks")
def prefix(length: torch.Tensor, queries: Queries) -> torch.Tensor:
    """A prefix whose tokens see each other, and causal text after it (prefix-LM).

        length 3      ###
                      ###
                      ###
                      ####
                      #####

    Args:
        length: integers (batch,), or of packed queries (total_q,): those of each query's sequence.
        queries: where they stand.

    Returns (batch, 1, seqlen_q, 1, 2), packed (total_q, 1, 2).
    """
    require_tensor("prefix", "length", length, "batch,", "total_q,")
    place = places("prefix", queries, length.device)
    require_match("prefix", ("length", length), ("queries", place), 1, batch=True)
    length = length.unsqueeze(1) if place.dim() == 2 else length
    return stacked((torch.zeros_like(place), after(place).maximum(length.long())))


@hinting("flash_cute.masks")
def chunks(
    size: int,
    queries: Queries,
    *,
    causal: bool = True,
    leftpad: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Chunks of `size` tokens that don't see each other (Llama 4).

        size 3        #             ###
                      ##            ###
                      ###           ###
                         #             ###
                         ##            ###
                    causal=True   causal=False

    Args:
        size: of a chunk, > 0.
        queries: where they stand.
        causal: does a token see only those before it in its chunk?
        leftpad: integers (batch,): how many keys at the start are padding, after which chunks are counted;
            no query sees them. Not with packed queries.

    Returns (batch or 1, 1, seqlen_q, 1, 2), packed (total_q, 1, 2).
    """
    size = require_number("chunks", "size", size, 1)
    require_flag("chunks", "causal", causal)
    if leftpad is not None:
        require_tensor("chunks", "leftpad", leftpad, "batch,")
    place = places("chunks", queries, device if leftpad is None else leftpad.device)
    first = torch.zeros_like(place[:1])
    if leftpad is not None:
        if place.dim() != 2:
            raise ValueError("flash_cute.masks.chunks: leftpad is given with packed queries; leave it out")
        require_match("chunks", ("leftpad", leftpad), ("queries", place), 1, batch=True)
        first = leftpad.long().clamp(0, 2**31).unsqueeze(1)
    size = at_most(size, LARGEST)
    chunk = (place - first) // size * size + first  # before the first key it has none
    end = after(place) if causal else after(chunk) + (at_most(size, 2**32) - 1)
    return stacked((chunk.maximum(first), end))


@hinting("flash_cute.masks")
def images(ids: torch.Tensor, *, window: int | None = None, window_images: bool = False) -> torch.Tensor:
    """Causal text with blocks of tokens that see each other (Gemma 3, PaliGemma).

        ids -1 0 0 0 -1 -1      #               #
                                ####            ####
                                ####            ####
                                ####             ###
                                #####             ###
                                ######             ###
                                                window=2

    Args:
        ids: integers (batch, seqlen) of all keys. Neighbours of one number >= 0 are a block, -1 is text. For
            the last n queries, after a cache, take the result's [:, :, -n:]. A number that comes back is
            another block, where transformers takes both for one.
        window: how many keys before its own a token sees, in its own block any number. None is unlimited.
        window_images: no token sees more keys than `window` before its own, in its own block either.

    Returns (batch, 1, seqlen, 2, 2).
    """
    ids = require_tensor("images", "ids", ids, "batch, seqlen")
    require_flag("images", "window_images", window_images)
    start, end = runs_around(ids)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(start)
    first = torch.zeros_like(place)
    if window is not None:
        window = require_number("images", "window", window, 0)
        first = (place - at_most(window, LARGEST)).clamp(min=0)
        start = start.maximum(first) if window_images else start
    return stacked((first, place + 1), (start, end.where(ids >= 0, start)))


@hinting("flash_cute.masks")
def sink_window(
    first: int, window: int, queries: Queries, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """The first keys and the nearest ones (StreamingLLM).

        first 1, window 2     #
                              ##
                              ###
                              ####
                              # ###
                              #  ###

    Args:
        first: how many keys of the sequence's start each token sees, >= 0.
        window: how many keys before its own, >= 0; causal, as window=(window, 0) in forward.
        queries: where they stand.

    Returns (batch or 1, 1, seqlen_q, 2, 2), packed (total_q, 2, 2).
    """
    first = require_number("sink_window", "first", first, 0)
    window = require_number("sink_window", "window", window, 0)
    place = places("sink_window", queries, device)
    begin = (place - at_most(window, LARGEST)).clamp(min=0)
    return stacked((torch.zeros_like(place), begin.clamp(max=at_most(first, LARGEST))), (begin, after(place)))


@hinting("flash_cute.masks")
def shared_prefix(answers: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """One prompt and several answers to it, which don't see each other (packed preference data).

        answers 0 0 0 1 1 2 2     #
                                  ##
                                  ###
                                  ####
                                  #####
                                  ###  #
                                  ###  ##

    Args:
        answers: integers (batch, seqlen): 0 for the prompt, which comes first, and neighbours of one other
            number are an answer. A negative one sees nothing.
        documents: integers (batch, seqlen), where one row has several prompts: neighbours of one number are a
            prompt and its answers.

    Returns (batch, 1, seqlen, 2, 2).
    """
    answers = require_tensor("shared_prefix", "answers", answers, "batch, seqlen")
    start, end = runs_around(answers)
    begin = torch.zeros_like(start)
    if documents is not None:
        documents = require_tensor("shared_prefix", "documents", documents, "batch, seqlen")
        pair = ("answers", answers), ("documents", documents)
        require_match("shared_prefix", *pair, 2, batch=False)
        begin, last = runs_around(documents)
        start, end = start.maximum(begin), end.minimum(last)
    if answers.shape[1] == 0:
        return stacked((start, start), (start, end))
    # The prompt ends where the run that begins its document does; an answer at the start has none.
    of_begin = begin.long()
    prompt = end.gather(1, of_begin).where(answers.gather(1, of_begin) == 0, begin)
    place = torch.arange(answers.shape[1], device=answers.device, dtype=torch.int32)
    counts = answers >= 0
    return stacked(
        (begin, prompt.minimum(start).where(counts, begin)), (start, (place + 1).where(counts, start))
    )


@hinting("flash_cute.masks")
def padding(
    attention_mask: torch.Tensor, queries: int | None = None, *, causal: bool = False, runs: int = MOST
) -> torch.Tensor:
    """The keys that count, wherever padding lies, holes too.

        attention_mask 0 1 1 0 1      ## #
                                      ## #      #
                                      ## #      ##
                                      ## #      ##
                                      ## #      ## #
                                               causal=True

    Args:
        attention_mask: (batch, seqlen_k), 0 or False where a key does not count. Numbers below 0, as a mask
            has that is added to scores, are an error, on a GPU only with FLASH_CUTE_CHECK=1.
        queries: how many, the last ones; as many as keys by default.
        causal: does a query see only the keys up to its own?
        runs: at most so many runs of keys that count lie in a row, from 1 to 4. More are left out;
            with FLASH_CUTE_CHECK=1 in the environment, which waits for the device, they are an error.

    Returns (batch, 1, queries, runs, 2).
    """
    attention_mask = require_tensor(
        "padding", "attention_mask", attention_mask, "batch, seqlen_k", holds="numbers"
    )
    require_flag("padding", "causal", causal)
    runs = require_number("padding", "runs", runs, 1, MOST)
    keys = attention_mask.shape[1]
    queries = keys if queries is None else queries
    queries = require_length("padding", "queries", queries)
    known = lengths.are_known(attention_mask, attention_mask)
    if known and (lengths.CHECKED or attention_mask.device.type == "cpu"):
        _require_counts(attention_mask)
    start, end, count = runs_in(attention_mask != 0, runs)
    if lengths.CHECKED and known:
        require_few("padding", "row", count, runs)
    start, end = (x.unsqueeze(1).expand(-1, queries, -1) for x in (start, end))
    if causal:
        place = torch.arange(keys - queries, keys, device=start.device, dtype=torch.int32)
        end = end.minimum(place[:, None] + 1)
    return torch.stack((start, end), -1).unsqueeze(1)


@hinting("flash_cute.masks")
def block_diffusion(size: int, seqlen: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Training of block diffusion: noisy tokens, and after them the same tokens clean, in blocks (BD3-LM).

        size 2, seqlen 4     ##
                             ##
                               ####
                               ####
                                 ##
                                 ##
                                 ####
                                 ####

    A noisy block sees itself and the clean blocks before it, a clean one itself and those before it.

    Args:
        size: of a block, > 0.
        seqlen: how many noisy, and how many clean tokens there are.

    Returns (1, 1, 2 * seqlen, 2, 2).
    """
    size = require_number("block_diffusion", "size", size, 1)
    seqlen = require_length("block_diffusion", "seqlen", seqlen)
    require_device("block_diffusion", device)
    size = at_most(size, LARGEST)
    place = torch.arange(2 * seqlen, device=device).unsqueeze(0)
    noisy, begin = place < seqlen, place % max(1, seqlen) // size * size
    end = (begin + size).clamp(max=seqlen)
    clean = torch.full_like(place, seqlen)
    return stacked((begin, end.where(noisy, begin)), (clean, seqlen + begin.where(noisy, end)))


def _require_counts(attention_mask: torch.Tensor) -> None:
    """Raises if it hides keys by numbers to add; waits for the device."""
    if not bool((attention_mask >= 0).all()):  # NaN, too
        raise ValueError(
            "flash_cute.masks.padding: attention_mask must hold 0 where a key does not count and 1 where it "
            f"does, got {shown(attention_mask.min().item())}"
        )
