"""The forward pass against transformers, over drawn shapes; and what a loader must refuse."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import random_qwen3
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from artifacts import ArtifactError
from model import Config, KVCache, Qwen3, assign_weights, greedy, load_checkpoint, packed_attention

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


def random_pair(sizes: dict, theta: float, seed: int) -> tuple[torch.nn.Module, Qwen3]:
    """transformers' model and ours with the same float32 weights, built from one config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": theta}
    config = Qwen3Config(tie_word_embeddings=True, rope_parameters=rope, **sizes)
    torch.manual_seed(seed)
    reference = Qwen3ForCausalLM(config).eval()
    for parameter in reference.parameters():
        # Norm weights too: at their initial 1 a missing or swapped norm weight would not show.
        parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    with torch.device("meta"):
        ours = Qwen3(Config.from_dict(config.to_dict()))
    tensors = ((n, p.detach()) for n, p in reference.named_parameters() if n != "lm_head.weight")
    return reference, assign_weights(ours, tensors, "test")


shapes = st.fixed_dictionaries(
    {
        "hidden_size": st.sampled_from([32, 64, 96]),
        "intermediate_size": st.sampled_from([48, 128]),
        "num_hidden_layers": st.integers(1, 3),
        "head_dim": st.sampled_from([16, 32, 64]),
        "vocab_size": st.sampled_from([37, 200]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
        "max_position_embeddings": st.just(128),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    sizes=shapes,
    heads=st.sampled_from([(2, 1), (4, 2), (4, 4), (6, 2)]),
    theta=st.sampled_from([1e4, 1e6]),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_logits_equal_transformers_at_every_split(sizes, heads, theta, seed, data):
    """Prefill and decode in any pieces give the logits that transformers gives in one."""
    sizes = sizes | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    reference, ours = random_pair(sizes, theta, seed)
    length = data.draw(st.integers(1, 100), "length")
    splits = data.draw(st.lists(st.integers(1, length), max_size=4), "splits")
    bounds = sorted({0, length, *(s for s in splits if s < length)})
    ids = torch.randint(sizes["vocab_size"], (1, length))
    with torch.inference_mode():
        expected = reference(ids).logits[0]
        cache = KVCache(ours.config, length + 3, torch.device("cpu"), torch.float32)
        cache.keys.fill_(1e4), cache.values.fill_(1e4)  # what is left over from earlier work
        parts = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            positions = torch.arange(start, end)
            hidden = ours(ids[:, start:end], positions[None], cache.attention(positions, end + 3))
            parts.append(ours.logits(hidden[0]))
    scale = max(1.0, expected.abs().max().item())
    assert (torch.cat(parts) - expected).abs().max() <= 1e-4 * scale


DROP = ("model_type", "rope_theta", "tie_word_embeddings")


def test_packed_sequences_do_not_see_each_other():
    _, ours = random_pair({k: v for k, v in CONFIG.items() if k not in DROP}, 1e6, 0)
    a, b = torch.randint(100, (9,)), torch.randint(100, (14,))
    alone = []
    with torch.inference_mode():
        for ids in (a, b):
            segments = torch.zeros(1, len(ids))
            alone.append(ours(ids[None], torch.arange(len(ids))[None], packed_attention(segments)))
        segments = torch.tensor([[0] * 9 + [1] * 14 + [-1] * 3])
        positions = torch.cat([torch.arange(9), torch.arange(14), torch.zeros(3, dtype=int)])
        ids = torch.cat([a, b, torch.zeros(3, dtype=int)])
        packed = ours(ids[None], positions[None], packed_attention(segments))
    torch.testing.assert_close(packed[:, :9], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 9:23], alone[1], atol=1e-5, rtol=1e-5)


def test_both_spellings_of_theta_are_read_and_none_is_assumed():
    old = Config.from_dict(CONFIG | {"rope_scaling": None})
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    spelled = new | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert old == Config.from_dict(spelled)
    assert old.rope_theta == 1e6
    with pytest.raises(ArtifactError, match="rope_theta"):
        Config.from_dict(new)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"attention_bias": True},
        {"tie_word_embeddings": False},
        {"hidden_act": "gelu"},
        {"model_type": "llama"},
        {"use_sliding_window": True},
        {"head_dim": None},
        {"num_key_value_heads": 3},
    ],
)
def test_a_config_that_is_not_this_model_is_refused(change):
    with pytest.raises(ArtifactError, match=next(iter(change)).split("_")[0]):
        Config.from_dict(CONFIG | change)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    random_qwen3(directory, vocab_size=300, seed=3)
    return directory


def edited(checkpoint, tmp_path, edit):
    """A copy of the checkpoint whose tensors went through `edit`."""
    copy = tmp_path / "edited"
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_tensor_missing_left_over_or_misshapen_is_refused(checkpoint, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": lambda t: t.pop(name),
        "unknown tensor": lambda t: t.update(extra=torch.ones(2).bfloat16()),
        "has shape": lambda t: t.update({name: t[name].t().contiguous()}),
        "expected": lambda t: t.update({name: t[name].half()}),
    }
    for number, (message, edit) in enumerate(cases.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(ArtifactError, match=message):
            load_checkpoint(edited(checkpoint, directory, edit), torch.float32)


def test_a_stored_copy_of_the_tied_head_is_checked_then_dropped(checkpoint, tmp_path):
    """Published checkpoints carry lm_head.weight though it is tied."""
    head = "lm_head.weight"
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    same = edited(
        checkpoint,
        tmp_path / "same",
        lambda t: t.update({head: t["model.embed_tokens.weight"].clone()}),
    )
    model = load_checkpoint(same, torch.float32)
    assert head not in dict(model.named_parameters())
    other = edited(
        checkpoint,
        tmp_path / "other",
        lambda t: t.update({head: t["model.embed_tokens.weight"] + 1}),
    )
    with pytest.raises(ArtifactError, match="differs from the embedding"):
        load_checkpoint(other, torch.float32)


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(checkpoint, tmp_path):
    copy = tmp_path / "sharded"
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, copy / file)
    weight_map = {n: file for file, part in halves.items() for n in part}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    whole = load_checkpoint(checkpoint, torch.float32).state_dict()
    for name, value in load_checkpoint(copy, torch.float32).state_dict().items():
        assert torch.equal(value, whole[name])
    (copy / "b.safetensors").unlink()
    with pytest.raises(ArtifactError, match="b.safetensors is missing"):
        load_checkpoint(copy, torch.float32)


def test_a_truncated_weight_file_is_a_clear_error(checkpoint, tmp_path):
    copy = tmp_path / "short"
    shutil.copytree(checkpoint, copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="can't be read"):
        load_checkpoint(copy, torch.float32)


def test_greedy_equals_transformers_generate_and_ends_with_the_first_eos(checkpoint):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = load_checkpoint(checkpoint, torch.float32)
    prompt = list(range(10, 30))
    ids = torch.tensor([prompt])
    out = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = out[0, len(prompt) :].tolist()
    ours = greedy(model, prompt, 24, eos=())
    assert ours.token_ids == expected
    assert min(ours.margins) > 1e-4, "a near-tie: draw another seed"
    end = expected[5]
    stopped = greedy(model, prompt, 24, eos=(end,))
    assert stopped.token_ids == expected[: expected.index(end) + 1]


def test_ties_go_to_the_lowest_id():
    """Two equal embedding rows give two equal logits."""
    _, ours = random_pair({k: v for k, v in CONFIG.items() if k not in DROP}, 1e6, 5)
    prompt = [1, 2, 3]
    best = greedy(ours, prompt, 1, eos=()).token_ids[0]
    twin = (best + 7) % 100
    with torch.no_grad():
        weight = ours.model.embed_tokens.weight
        weight[twin] = weight[best]
    tied = greedy(ours, prompt, 1, eos=())
    assert tied.token_ids == [min(best, twin)]
    assert tied.margins == [0.0]
