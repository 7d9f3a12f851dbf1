"""The masks of models, as ranges of keys."""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute.masks.parts import (
    MOST,
    Queries,
    places,
    require_few,
    require_number,
    require_tensor,
    runs_around,
    runs_in,
    stacked,
)


def documents(
    ids: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    seqlen: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Sequences one behind the other that don't see each other.

        ids 0 0 0 1 1       #             ###
                            ##            ###
                            ###           ###
                               #             ##
                               ##            ##
                            causal=True   causal=False

    Args:
        ids: integers (batch, seqlen). Neighbours of one number are a document; a negative one sees nothing.
        cu_seqlens: instead, int32 (documents + 1,), where documents begin and end, among seqlen tokens. Those
            behind the last see nothing.
        causal: does a token see only those before it in its document?

    Returns (batch, 1, seqlen, 1, 2), of cu_seqlens with a batch of 1.
    """
    if (ids is None) == (cu_seqlens is None) or (cu_seqlens is None) != (seqlen is None):
        raise TypeError("flash_cute.masks.documents: either ids, or cu_seqlens and seqlen, must be given")
    if ids is not None:
        require_tensor("documents", "ids", ids, 2, "(batch, seqlen)")
        start, end = runs_around(ids)
        counts = ids >= 0
    else:
        require_tensor("documents", "cu_seqlens", cu_seqlens, 1, "(documents + 1,)")
        cu_seqlens = cu_seqlens.int()
        sequence, place = (x.unsqueeze(0) for x in lengths.sequences_of_rows(seqlen, cu_seqlens))
        start = torch.arange(seqlen, device=cu_seqlens.device).unsqueeze(0) - place
        counts = sequence >= 0
        ends = torch.cat((cu_seqlens[1:], cu_seqlens.new_zeros(1)))  # one more, of no sequence
        end = ends[sequence.clamp(min=0)]
    if causal:
        end = end.minimum(torch.arange(1, start.shape[1] + 1, device=start.device))
    return stacked((start, end.where(counts, start)))


def prefix(length: torch.Tensor, queries: Queries) -> torch.Tensor:
    """A prefix whose tokens see each other, and causal text behind it (prefix-LM).

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
    require_tensor("prefix", "length", length, 1, "(batch,) or, packed, (total_q,)")
    place = places("prefix", queries, length.device)
    length = length.unsqueeze(1) if place.dim() == 2 else length
    return stacked((torch.zeros_like(place), (place + 1).maximum(length)))


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
        leftpad: integers (batch,): how many keys at the begin are padding, behind which chunks are counted;
            no query sees them.

    Returns (batch or 1, 1, seqlen_q, 1, 2), packed (total_q, 1, 2).
    """
    require_number("chunks", "size", size, 1)
    place = places("chunks", queries, device if leftpad is None else leftpad.device)
    begin = 0 if leftpad is None else leftpad.unsqueeze(1)
    chunk = (place - begin) // size * size + begin  # before the first key it has none
    return stacked((chunk.clamp(min=begin), place + 1 if causal else chunk + size))


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
            the last n queries beside a cache take the result's [:, :, -n:].
        window: how many keys before its own a token sees, in its own block any number. None is unlimited.
        window_images: no token sees more keys than `window` before its own, in its own block either.

    Returns (batch, 1, seqlen, 2, 2).
    """
    require_tensor("images", "ids", ids, 2, "(batch, seqlen)")
    start, end = runs_around(ids)
    place = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32).expand_as(start)
    first = torch.zeros_like(place)
    if window is not None:
        require_number("images", "window", window, 0)
        first = (place - window).clamp(min=0)
        start = start.maximum(first) if window_images else start
    return stacked((first, place + 1), (start, end.where(ids >= 0, start)))


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
        first: how many keys of the sequence's begin each token sees, >= 0.
        window: how many keys before its own, >= 0; causal, as window=(window, 0) in forward.
        queries: where they stand.

    Returns (batch or 1, 1, seqlen_q, 2, 2), packed (total_q, 2, 2).
    """
    require_number("sink_window", "first", first, 0)
    require_number("sink_window", "window", window, 0)
    place = places("sink_window", queries, device)
    begin = (place - window).clamp(min=0)
    return stacked((torch.zeros_like(place), begin.clamp(max=first)), (begin, place + 1))


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
    require_tensor("shared_prefix", "answers", answers, 2, "(batch, seqlen)")
    start, end = runs_around(answers)
    begin = torch.zeros_like(start)
    if documents is not None:
        require_tensor("shared_prefix", "documents", documents, 2, "(batch, seqlen)")
        begin, last = runs_around(documents)
        start, end = start.maximum(begin), end.minimum(last)
    if answers.shape[1] == 0:
        return stacked((start, start), (start, end))
    # The prompt ends where the run that begins its document does; an answer at the begin has none.
    of_begin = begin.long()
    prompt = end.gather(1, of_begin).where(answers.gather(1, of_begin) == 0, begin)
    place = torch.arange(answers.shape[1], device=answers.device, dtype=torch.int32)
    counts = answers >= 0
    return stacked(
        (begin, prompt.minimum(start).where(counts, begin)), (start, (place + 1).where(counts, start))
    )


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
        attention_mask: (batch, seqlen_k), 0 or False where a key does not count.
        queries: how many, the last ones; as many as keys by default.
        causal: does a query see only the keys up to its own?
        runs: at most so many runs of keys that count lie in a row, from 1 to 4. Those behind are left out;
            with FLASH_CUTE_CHECK=1 in the environment, which waits for the device, they are an error.

    Returns (batch, 1, queries, runs, 2).
    """
    require_tensor("padding", "attention_mask", attention_mask, 2, "(batch, seqlen_k)", integers=False)
    require_number("padding", "runs", runs, 1)
    keys = attention_mask.shape[1]
    queries = keys if queries is None else queries
    start, end, count = runs_in(attention_mask != 0, min(runs, MOST))
    if lengths.CHECKED and lengths.are_known(attention_mask, attention_mask):
        require_few("padding", "row", count, min(runs, MOST))
    start, end = (x.unsqueeze(1).expand(-1, queries, -1) for x in (start, end))
    if causal:
        place = torch.arange(keys - queries, keys, device=start.device, dtype=torch.int32)
        end = end.minimum(place[:, None] + 1)
    return torch.stack((start, end), -1).unsqueeze(1)


def block_diffusion(size: int, seqlen: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Training of block diffusion: noisy tokens, and behind them the same tokens clean, in blocks (BD3-LM).

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
    require_number("block_diffusion", "size", size, 1)
    place = torch.arange(2 * seqlen, device=device, dtype=torch.int32).unsqueeze(0)
    noisy, begin = place < seqlen, place % max(1, seqlen) // size * size
    end = (begin + size).clamp(max=seqlen)
    clean = torch.full_like(place, seqlen)
    return stacked((begin, end.where(noisy, begin)), (clean, seqlen + begin.where(noisy, end)))
