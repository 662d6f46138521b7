"""Small random exports for the tests of drafter and server; needs torch, not transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from artifacts import digest, sha256_file
from formats import EXPORT_FORMAT, Export, pack_tensor
from model import Config, empty_model, greedy

SCHEME = {
    "linear": {"codec": "nf4", "group_size": 64},
    "embedding": {"codec": "int6", "group_size": 64},
    "norm": {"codec": "bf16", "group_size": None},
}
DRAFT_LENGTH = 16
NO_EOS = (1000, 1001)  # outside of the vocabulary: no draft ends early


def small_config(**sizes: int) -> Config:
    dimensions = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    }
    return Config(rope_theta=1e6, rms_norm_eps=1e-6, **(dimensions | sizes))


def random_weights(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Wide layers give varied greedy output; with the default std a tied model repeats itself."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in empty_model(config).named_parameters():
        if parameter.ndim == 1:
            weights[name] = torch.ones(parameter.shape)
        else:
            std = 0.05 if "embed" in name else 0.35
            weights[name] = torch.randn(parameter.shape, generator=generator) * std
    return weights


def make_export(
    directory: Path, seed: int = 0, eos: tuple[int, ...] = NO_EOS, **sizes: int
) -> Path:
    """Write a whole export of a random model, its known answer included; returns `directory`."""
    directory.mkdir(parents=True)
    config = small_config(**sizes)
    raw = {"model_type": "qwen3", "tie_word_embeddings": True} | asdict(config)
    (directory / "config.json").write_text(json.dumps(raw))
    entries, stored = {}, {}
    for name, weight in random_weights(config, seed).items():
        entries[name], tensors = pack_tensor(name, weight, SCHEME)
        stored |= tensors
    path = directory / "weights.safetensors"
    save_file(stored, path)
    fields = {"format": 1, "eos_token_ids": sorted(eos), "quantization": SCHEME, "checkpoint": seed}
    contract = {"fingerprint": digest(fields), "fields": fields}
    (directory / "contract.json").write_text(json.dumps(contract))
    quantization = {
        "format": EXPORT_FORMAT,
        "scheme": SCHEME,
        "tensors": entries,
        "weights": {"bytes": path.stat().st_size, "sha256": sha256_file(path)},
        "draft_length": DRAFT_LENGTH,
    }
    (directory / "quantization.json").write_text(json.dumps(quantization))
    prompt = [(7 * i + seed) % config.vocab_size for i in range(8)]
    answer = greedy(Export(directory).load(torch.float32), prompt, DRAFT_LENGTH, eos)
    quantization["known_answer"] = {
        "prompt_token_ids": prompt,
        "draft_token_ids": answer.token_ids,
        "margins": answer.margins,
    }
    (directory / "quantization.json").write_text(json.dumps(quantization))
    return directory


def random_prompt(seed: int, length: int, vocab_size: int = 512) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
