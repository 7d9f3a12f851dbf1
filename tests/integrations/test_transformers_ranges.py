"""Masks of transformers as ranges of keys: numbers that come back, what four ranges cannot say, and when.

Also the models that list the implementations of attention that they take.
"""

from __future__ import annotations

import sys

import pytest
import torch
from support.tolerance import assert_within_rule

transformers = pytest.importorskip("transformers", minversion="5.23", reason="needs transformers 5.23")

from support.transformers_models import (  # noqa: E402
    BATCH,
    EXPERTS,
    GROUPED,
    HOLES,
    LENGTH,
    MAKE,
    SIZES,
    Trio,
    as_trio,
    assert_generated,
    assert_logits,
    build,
    padding,
    tokens,
)

from flash_cute import masks, reference  # noqa: E402
from flash_cute.integrations import _transformers_later, _transformers_masks  # noqa: E402
from flash_cute.integrations.transformers import cute_mask, expect_holes, ranges_mask  # noqa: E402

# Numbers that come back


@pytest.fixture(params=["looked at", "on the device"])
def looked_at(request, monkeypatch) -> bool:
    """Whether values are read, as on the CPU, or not, as on a GPU."""
    if request.param == "on the device":
        monkeypatch.setattr(_transformers_masks, "_is_looked_at", lambda tensor: False)
        monkeypatch.setattr(_transformers_masks, "_may_have_holes", lambda mask, *_: mask is not None)
    return request.param == "looked at"


RETURNING = torch.tensor([[0, 0, -1, 0, 0, -1, 0, -1], [1, 0, 0, 1, 2, 2, 1, 0]])
CHAINS = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 1], [3, 1, 3, 1, 1, 3, 3, 0]])  # A A B B A A C B
BOTH_WINDOWS = MAKE.sliding_window_bidirectional_mask_function(3)
FUNCTIONS = {
    "blocks": MAKE.or_masks(MAKE.causal_mask_function, MAKE.blockwise_overlay(RETURNING)),
    "blocks in a window": MAKE.and_masks(
        MAKE.or_masks(MAKE.causal_mask_function, MAKE.blockwise_overlay(RETURNING)),
        MAKE.sliding_window_overlay(3),
    ),
    "blocks and a window": MAKE.or_masks(
        MAKE.sliding_window_causal_mask_function(2), MAKE.blockwise_overlay(RETURNING)
    ),
    "chains": MAKE.and_masks(MAKE.causal_mask_function, MAKE.packed_sequence_mask_function(CHAINS)),
    "chains in a window": MAKE.and_masks(
        MAKE.sliding_window_causal_mask_function(5), MAKE.packed_sequence_mask_function(CHAINS)
    ),
    "chains to both sides": MAKE.and_masks(
        MAKE.bidirectional_mask_function, MAKE.packed_sequence_mask_function(CHAINS)
    ),
    "chains in a window to both sides": MAKE.and_masks(
        BOTH_WINDOWS, MAKE.packed_sequence_mask_function(CHAINS)
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("first", "dropped"), [(0, 0), (5, 0), (7, 0), (7, 3)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_come_back(looked_at, name, first, dropped, padded):
    """All positions of a number, in one piece or not. `first` tokens are cached, but not those `dropped`."""
    function, length = FUNCTIONS[name], 8
    queries, keys = torch.arange(first, length), torch.arange(dropped, length)
    batch = torch.arange(2)[:, None, None]
    expected = function(batch, 0, queries[None, :, None], keys[None, None])
    present = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]]).bool() if padded else None
    if padded:
        expected = expected & present[:, None, dropped:]
    # Before transformers 5.23 it had functions of its own here, so that it matters who has given one.
    mask = cute_mask(2, len(queries), len(keys), first, dropped, function, present, use_vmap=True)
    seen = reference.visible(len(queries), len(keys), ranges=mask.ranges)[:, 0]
    assert not mask.lengths or not padded
    assert torch.equal(seen, expected)
    assert mask.factor is None or not mask.factor.isnan().any()


def test_the_block_of_all_images():
    config = build("llama", "cpu").config
    config._attn_implementation = "cute_attention"
    ids = torch.tensor([[0, 0, -1, 0, 0, -1]])
    given = config, torch.zeros(1, 6, 64), None, None, torch.arange(6)[None]
    mask = transformers.masking_utils.create_causal_mask(*given, block_sequence_ids=ids)
    seen = reference.visible(6, 6, ranges=mask.ranges)[0, 0]
    assert seen[0].nonzero().flatten().tolist() == [0, 1, 3, 4]
    assert seen[5].all()


def test_packed_sequences_in_one_piece_are_packed():
    """By offsets, whoever has numbered them, and where none is looked at, if transformers has."""
    plain, ids = MAKE.causal_mask_function, torch.tensor([[0, 0, 1], [4, 5, 5]])
    packed = MAKE.packed_sequence_mask_function(ids)
    positions = torch.tensor([[0, 1, 0], [0, 0, 1]])
    by_positions = MAKE.and_masks(MAKE.remap_positions_for_packed_sequence(plain, positions), packed)
    for function in (MAKE.and_masks(plain, packed), by_positions):
        assert cute_mask(2, 3, 3, mask_function=function).offsets.tolist() == [0, 2, 3, 4, 6, 6, 6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_transformers_masks, "_is_looked_at", lambda tensor: False)
        assert cute_mask(2, 3, 3, mask_function=by_positions).offsets is not None
        assert cute_mask(2, 3, 3, mask_function=MAKE.and_masks(plain, packed)).offsets is None


def test_positions_beyond_the_ids():
    """In cached steps: blocks have ended, and packed sequences must have an id for each key."""
    ids = torch.tensor([[-1, 0, 0]])
    blocks = MAKE.or_masks(MAKE.causal_mask_function, MAKE.blockwise_overlay(ids))
    mask = cute_mask(1, 4, 5, 1, 0, blocks)
    causal = [[*range(3)], [*range(3)], [*range(4)], [*range(5)]]
    assert [
        row.nonzero().flatten().tolist() for row in reference.visible(4, 5, ranges=mask.ranges)[0, 0]
    ] == causal
    alone = cute_mask(1, 2, 5, 3, 0, MAKE.blockwise_overlay(ids))
    assert not reference.visible(2, 5, ranges=alone.ranges).any()
    packed = MAKE.and_masks(MAKE.causal_mask_function, MAKE.packed_sequence_mask_function(ids))
    with pytest.raises(
        ValueError, match=r"packed_sequence_mask_function must have as many positions .*, 5, got 3$"
    ):
        cute_mask(1, 1, 5, 4, 0, packed)


def test_distances_without_end():
    """As those of sys.maxsize, which wrap where they are added to."""
    chunks = MAKE.chunked_causal_mask_function(sys.maxsize, torch.tensor([1]))
    for function, first in ((MAKE.sliding_window_bidirectional_overlay(sys.maxsize), 0), (chunks, 1)):
        ranges = cute_mask(1, 3, 3, mask_function=MAKE.or_masks(function, function)).ranges
        seen = reference.visible(3, 3, ranges=ranges)[0, 0]
        assert seen[1, first]
        assert seen[2].sum() == 3 - first


# More than four ranges

STRIPES = torch.tensor([[0, -1] * 6, [0] * 12])  # six images of one number, and one


def test_more_than_four_ranges(looked_at):
    """A sentence, else NaN for those queries alone."""
    function = MAKE.or_masks(MAKE.causal_mask_function, MAKE.blockwise_overlay(STRIPES))
    if looked_at:
        sentence = "at most 4 ranges of keys for each query; sequence 0 has more for query 0$"
        with pytest.raises(NotImplementedError, match=sentence):
            cute_mask(2, 12, 12, mask_function=function)
        return
    mask = cute_mask(2, 12, 12, mask_function=function)
    missing = mask.factor[..., 0, 0].isnan()
    assert missing.nonzero().tolist() == [[0, 0], [0, 2]]  # they have five later images, and four
    places = torch.arange(12)
    expected = function(torch.arange(2)[:, None, None], 0, places[None, :, None], places[None, None])
    seen = reference.visible(12, 12, ranges=mask.ranges)[:, 0]
    assert torch.equal(seen[~missing], expected[~missing])
    later = mask[:, :, -4:, :]
    assert later.factor.shape[1] == 4
    assert not later.factor.isnan().any()


def test_other_numbers_beside_positions_that_restart(looked_at):
    """transformers numbers packed sequences by positions, so none comes back; by hand it is not silent."""
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    remapped = MAKE.remap_positions_for_packed_sequence(MAKE.causal_mask_function, positions)
    packed = MAKE.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 0, 0]]))
    function = MAKE.and_masks(remapped, packed)
    if looked_at:
        with pytest.raises(NotImplementedError, match=r"sequence 0 has more for query 4$"):
            cute_mask(1, 6, 6, mask_function=function)
    else:
        mask = cute_mask(1, 6, 6, mask_function=function, use_vmap=True)
        assert mask.factor[0, :, 0, 0].isnan().tolist() == [False] * 4 + [True] * 2


# Said later


@pytest.fixture
def copies(monkeypatch) -> list[bool]:
    """Copies to the host that have arrived once the list is not empty."""
    arrived = []
    monkeypatch.setattr(_transformers_masks, "_is_looked_at", lambda tensor: False)
    monkeypatch.setattr(_transformers_masks, "_may_have_holes", lambda mask, *_: False)
    monkeypatch.setattr(_transformers_later, "_is_copied", lambda fault: True)
    monkeypatch.setattr(_transformers_later, "_copied", lambda fault: (lambda: bool(arrived), fault.clone()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield arrived
    _transformers_later.forget()


def test_ranges_that_are_no_tensor():
    with pytest.raises(TypeError, match=r"ranges is of type list; a torch\.Tensor is accepted"):
        ranges_mask([[1, 2]])


def test_holes_are_said_in_a_later_call(copies):
    model, ids = Trio("llama", "cpu").ours, tokens("cpu", 3, 6)
    for _ in range(2):
        logits = model(ids, attention_mask=HOLES).logits  # nothing has arrived
        assert logits[0].isnan().all()
    copies.append(True)
    sentence = (
        r"^flash_cute\.transformers: padding of an earlier call has holes, so NaN; padding at the start and "
        r"at the end is accepted, any after expect_holes\(\)$"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        model(ids)
    assert model(ids, attention_mask=torch.ones(3, 6)).logits.isfinite().all()  # once
    model(ids, attention_mask=torch.ones(3, 6))
    assert len(_transformers_later._copies) == 1


def test_too_many_ranges_are_said_in_a_later_call(copies):
    function = MAKE.or_masks(MAKE.causal_mask_function, MAKE.blockwise_overlay(STRIPES))
    cute_mask(2, 12, 12, mask_function=function)
    copies.append(True)
    with pytest.raises(NotImplementedError, match=r"each query; an earlier call had more, so NaN$"):
        cute_mask(2, 12, 12)
    cute_mask(2, 12, 12)


def test_nothing_is_copied_where_values_are_known():
    expect_holes(False)
    cute_mask(3, 6, 6, attention_mask=HOLES.bool())
    assert not _transformers_later._copies


# Models


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"num_key_value_heads": 2, "head_dim": 16}
MOLMO2 = {
    "text_config": GROUPED | {"head_dim": 16, "additional_vocab_size": 8},
    "vision_config": VISION | {"image_size": [28, 28]},
    "adapter_config": VISION | {"text_hidden_size": 64, "vision_feature_layer": [0]},
    "image_start_token_id": 58,
    "image_end_token_id": 59,
    "image_patch_id": 60,
    "low_res_image_start_token_id": 61,
    "frame_start_token_id": 62,
    "frame_end_token_id": 63,
}


@pytest.fixture
def molmo2(device) -> Trio:
    if not hasattr(transformers, "Molmo2Config"):
        pytest.skip("this transformers has no Molmo 2")
    torch.manual_seed(0)
    config = transformers.Molmo2Config(**MOLMO2)
    model = transformers.Molmo2ForConditionalGeneration._from_config(config, attn_implementation="eager")
    return as_trio(model, device)


def images(device) -> torch.Tensor:
    """mm_token_type_ids of three images, of which the first sees the others."""
    types = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
    types[:, 8:10], types[:, 11:13], types[1, 14:16] = 1, 1, 1
    return types


@pytest.mark.parametrize("kind", ["none", "both"])
def test_images_of_one_number(molmo2, device, kind):
    """Molmo 2 gives all images one: logits and gradients."""
    mask = padding(kind, device)
    present = torch.ones(BATCH, LENGTH, device=device).bool() if mask is None else mask.bool()
    inputs = {"input_ids": tokens(device) % 58, "attention_mask": mask, "mm_token_type_ids": images(device)}
    assert_logits(molmo2, inputs, present)
    gradients = []
    for model in molmo2.all:
        model(**inputs).logits[present].double().square().sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        )
    assert_within_rule("gradients", *gradients)


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_images_of_one_number_generate(molmo2, device, cache):
    inputs = {"input_ids": tokens(device) % 58, "attention_mask": padding("left", device)}
    assert_generated(molmo2, cache, **inputs, mm_token_type_ids=images(device))


def test_chains_of_a_protein(device):
    """ESM C's numbers of chains, A A B B A; logits."""
    if not hasattr(transformers, "EsmcConfig"):
        pytest.skip("this transformers has no ESM C")
    torch.manual_seed(0)
    config = transformers.EsmcConfig(**SIZES)
    trio = as_trio(transformers.EsmcForMaskedLM._from_config(config, attn_implementation="eager"), device)
    chains = torch.tensor([0, 0, 1, 1, 0], device=device).repeat_interleave(LENGTH // 5).repeat(BATCH, 1)
    inputs = {"input_ids": tokens(device), "sequence_id": chains}
    assert_logits(trio, inputs)
    other = trio.ours(**inputs | {"sequence_id": chains.cumsum(1)}).logits
    assert not torch.allclose(trio.ours(**inputs).logits, other, atol=1e-3)


NAME = "cute_flash_attention_3"
WINDOWED = GROUPED | {"head_dim": 16, "sliding_window": 6}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "experts_implementation": "eager"}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LISTED = {
    "GptOssForCausalLM": ("GptOssConfig", EXPERTS),
    "MiMoV2FlashForCausalLM": ("MiMoV2FlashConfig", LAYERS | FEW | {"n_routed_experts": 2, "v_head_dim": 16}),
    "FlintForCausalLM": ("FlintConfig", LAYERS | FEW | {"num_experts": 2}),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", LAYERS),
    "GraniteMoeSWAForCausalLM": ("GraniteMoeSWAConfig", LAYERS | EXPERTS),
    "OpenAIPrivacyFilterForTokenClassification": ("OpenAIPrivacyFilterConfig", EXPERTS),
}


@pytest.mark.parametrize("name", LISTED)
def test_models_that_list_implementations(device, name):
    """transformers would put the first of the list in the place of ours."""
    if not hasattr(transformers, name):
        pytest.skip("this transformers has no such model")
    config_class, sizes = LISTED[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**WINDOWED | sizes)
    model = model_class._from_config(config, attn_implementation="eager").to(device).eval()
    ids = tokens(device)
    expected = model(ids).logits.detach()
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(model(ids).logits.detach(), expected, atol=1e-5, rtol=1e-4)
    assert model_class._from_config(config, attn_implementation=NAME).config._attn_implementation == NAME


def test_sparse_attention_is_never_dense(device):
    """MiniMax M3 lists an implementation of its own: ours is refused when it is set, and by attention."""
    if not hasattr(transformers, "MiniMaxM3VLForCausalLM"):
        pytest.skip("this transformers has no MiniMax M3")
    sizes = FEW | {"num_local_experts": 2, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16}
    sizes |= {"index_block_size": 4, "index_topk_blocks": 2, "mlp_layer_types": ["dense", "dense"]}
    sizes |= {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    config = transformers.MiniMaxM3VLTextConfig(**GROUPED | {"head_dim": 16} | sizes)
    model_class = transformers.MiniMaxM3VLForCausalLM
    model = model_class._from_config(config, attn_implementation="eager").to(device).eval()
    sentence = r"^flash_cute\.transformers: attn_implementation of MiniMaxM3VLForCausalLM must be eager or of"
    with pytest.raises(NotImplementedError, match=sentence):
        model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match=sentence):
        model_class._from_config(config, attn_implementation=NAME)
    model.set_attn_implementation("cute_attention")
    for name in ("cute_attention", NAME):
        model.config._attn_implementation_internal = name
        with pytest.raises(NotImplementedError, match="block_indices is Tensor; none is accepted"):
            model(tokens(device))


# Masks of a caller, where they do not go


def test_a_mask_of_ranges_in_another_place():
    model, ids = build("llama", "cpu"), tokens("cpu")
    mask = ranges_mask(masks.prefix(torch.tensor([4, 9, 1]), LENGTH))
    sentence = (
        r"^flash_cute\.transformers: ranges_mask is accepted by the forward of a model that leaves its mask"
    )
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        with pytest.raises((NotImplementedError, AttributeError), match=sentence):
            model(ids, attention_mask=mask)
    model.set_attn_implementation("cute_attention")
    with pytest.raises((NotImplementedError, AttributeError), match=sentence):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(NotImplementedError, match=r"or be made by ranges_mask, got shape \(3, 1, 20, 1, 2\)"):
        model(ids, attention_mask=mask.ranges)
