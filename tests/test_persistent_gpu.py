"""The persistent engine on a Hopper GPU against eager float32 torch on the same packed weights.

    python -m pytest -m gpu tests/test_persistent_gpu.py

Needs what tests/test_drafter_gpu.py needs, and cuda-bindings.
"""

from __future__ import annotations

from pathlib import Path

import exports
import pytest
import torch
from drafts import assert_same_draft
from exports import make_export, random_prompt, random_weights

from drafter import Drafter
from model import Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
LIMIT, VOCABULARY = 1500, 4096
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LIMIT,
}
LENGTHS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65),
    *(127, 128, 129, 130, 255, 257, 383, 385, 511, 513, 1023, 1025),
    *(LIMIT - 17, LIMIT - 16, LIMIT - 15, LIMIT - 2, LIMIT - 1, LIMIT),
)


def tame(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Random weights whose activations neither die nor explode at this width."""
    return {
        name: value * (0.12 if value.ndim == 2 and "embed" not in name else 1.0)
        for name, value in random_weights(config, seed).items()
    }


def massive(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """A few residual channels thousands of times the rest, norm weights to match, and inputs of the
    down-projection beyond what fp16 holds."""
    weights = tame(config, seed)
    channels = [3, 700, 2047]
    weights["model.embed_tokens.weight"][:, channels] *= 3000
    for name, value in weights.items():
        if "layernorm" in name or name == "model.norm.weight":
            value[channels] = 1e-3
        if "up_proj" in name:
            value[:5] *= 300
        if "down_proj" in name:
            value[:, :5] *= 1e-3
    return weights


@pytest.fixture(scope="module", params=[tame, massive], ids=["random", "massive"])
def pair(request, tmp_path_factory) -> tuple[Drafter, Drafter]:
    """(persistent, the oracle: eager float32) on one export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "random_weights", request.param)
        directory = make_export(tmp_path_factory.mktemp("exports") / "wide", **WIDE)
    return open_pair(directory)


def open_pair(directory: Path) -> tuple[Drafter, Drafter]:
    eager = Drafter(directory, "cuda", engine="torch", dtype=torch.float32, cache_bytes=0)
    return Drafter(directory, "cuda", engine="persistent"), eager


@torch.inference_mode()
def poison(drafter: Drafter) -> None:
    engine = drafter.engine
    engine._tokens.fill_(-7)
    engine._probabilities.fill_(float("nan"))
    drafter.kv.keys[:, :, len(drafter._live) :].fill_(1e4)


def test_drafts_equal_those_of_the_oracle(pair):
    """Cold, the same again (one position), and one to five tokens on; near-ties are counted."""
    persistent, eager = pair
    equal = total = 0
    for seed, length in enumerate(LENGTHS):
        ids = random_prompt(seed, length, VOCABULARY)
        more = random_prompt(seed + 1000, 1 + seed % 5, VOCABULARY)
        contexts = [ids, ids] + [[*ids, *more]] * (length + 5 <= LIMIT)
        for context in contexts:
            poison(persistent)
            draft = persistent.draft(context, 16)
            eager.reset()
            expected = eager.draft(context, 16)
            equal += assert_same_draft(draft, expected, eager.engine.model, context)
            total += 1
    print(f"{equal} of {total} drafts equal, the rest near-ties")
    assert equal > 0.8 * total


def test_two_runs_give_the_same_bits(pair):
    persistent, _ = pair
    ids = random_prompt(77, 700, VOCABULARY)
    drafts = []
    for _ in range(3):
        persistent.reset()
        drafts.append(persistent.draft(ids, 16))
    assert len({tuple(d.token_ids) for d in drafts}) == 1
    assert len({tuple(d.probabilities) for d in drafts}) == 1


def test_every_step_ran_on_the_device(pair):
    persistent, _ = pair
    persistent.reset()
    before = persistent.engine.decode_steps
    persistent.draft(random_prompt(5, 40, VOCABULARY), 16)
    assert persistent.engine.decode_steps - before == 16  # the last prompt token, and 15 drafted
    persistent.draft(random_prompt(6, 3, VOCABULARY), 16)
    assert persistent.engine.decode_steps - before == 16 + 18


def test_no_drafted_token_computes_the_context_all_the_same(pair):
    persistent, eager = pair
    ids = random_prompt(8, 90, VOCABULARY)
    persistent.reset()
    assert persistent.draft(ids, 0).token_ids == []
    draft = persistent.draft([*ids, 5], 16)
    eager.reset()
    assert_same_draft(draft, eager.draft([*ids, 5], 16), eager.engine.model, [*ids, 5])


def test_embeddings_and_layers_unpack_to_the_exports_values(pair):
    persistent, eager = pair
    model, engine = eager.engine.model.model, persistent.engine
    w, block = engine._layers(1), model.layers[1]
    for name, rows, expected in (
        ("qkv", slice(0, 2048), block.self_attn.q_proj.weight),
        ("qkv", slice(2048, 3072), block.self_attn.k_proj.weight),
        ("qkv", slice(3072, 4096), block.self_attn.v_proj.weight),
        ("o", slice(None), block.self_attn.o_proj.weight),
        ("gate_up", slice(0, 6144), block.mlp.gate_proj.weight),
        ("gate_up", slice(6144, None), block.mlp.up_proj.weight),
        ("down", slice(None), block.mlp.down_proj.weight),
    ):
        engine._layers.scratch.fill_(float("nan"))
        assert torch.equal(getattr(w, name)[rows], expected.bfloat16()), name
