"""The Qwen3 forward pass, by hand, in plain torch: the oracle of every faster path.

One module serves training (packed sequences) and inference (a static KV cache); what differs is
the `attend` function that a caller passes. Parameter names are those of the published checkpoints,
so weights load by name, dtype and shape, and nothing may be missing or left over.

Architecture: Qwen3 Technical Report (arXiv:2505.09388): a pre-norm decoder, RMSNorm
(arXiv:1910.07467), grouped-query attention (arXiv:2305.13245) with an RMSNorm over each head's q
and k, rotary embedding (arXiv:2104.09864, the half-split layout), SwiGLU (arXiv:2002.05202), tied
head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from artifacts import ArtifactError

# attend(layer, q, k, v) -> out
#   q: (batch, heads, tokens, head_dim), k, v: (batch, kv_heads, tokens, head_dim), all after RoPE
#   out: (batch, heads, tokens, head_dim)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """Dimensions of a Qwen3 model, read from a checkpoint's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def from_file(cls, path: Path) -> Config:
        """Read config.json; ArtifactError where it is missing or asks for what this code lacks."""
        try:
            raw = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing: not a model directory") from None
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{path} is not JSON: {error}") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config") -> Config:
        """The trap here is RoPE's theta: unset, libraries fall back to 10,000 and tokens go wrong
        without an error, so it has no default. Both spellings are read: `rope_theta` beside
        `rope_scaling`, and `rope_parameters` (transformers 5)."""
        rope = raw.get("rope_parameters") or {}
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        scaling = raw.get("rope_scaling")
        unsupported = {
            "model_type": raw.get("model_type") != "qwen3",
            "rope_scaling": bool(scaling) and scaling.get("rope_type", "default") != "default",
            "rope_parameters.rope_type": rope.get("rope_type", "default") != "default",
            "rope_theta (missing)": theta is None,
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(raw.get("attention_bias", False)),
            "use_sliding_window": bool(raw.get("use_sliding_window", False)),
            "tie_word_embeddings": not raw.get("tie_word_embeddings", False),
        }
        wrong = [name for name, bad in unsupported.items() if bad]
        if wrong:
            raise ArtifactError(f"{where}: not a Qwen3 that this code runs: {', '.join(wrong)}")
        names = [name for name in cls.__dataclass_fields__ if name != "rope_theta"]
        missing = [name for name in names if raw.get(name) is None]
        if missing:
            raise ArtifactError(f"{where}: lacks {', '.join(missing)}")
        config = cls(rope_theta=float(theta), **{name: raw[name] for name in names})
        if config.num_attention_heads % config.num_key_value_heads:
            raise ArtifactError(f"{where}: num_attention_heads % num_key_value_heads != 0")
        return config


class RMSNorm(nn.Module):
    """x / rms(x) × weight over the last dimension, in float32; returns the weight's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x.to(self.weight.dtype) * self.weight


def rope_tables(positions: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32.

    positions: (batch, tokens) int64 → two of (batch, 1, tokens, head_dim).
    """
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    inverse = 1.0 / config.rope_theta ** exponent.float()
    angles = positions[..., None].float() * inverse  # (batch, tokens, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2). x: (batch, heads, tokens, head_dim), dtype kept."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Projection(nn.Linear):
    """A linear map without bias. transform: applied to the weight at each use, or None; training
    through a packed format puts one there (qat.py)."""

    def __init__(self, columns: int, rows: int):
        super().__init__(columns, rows, bias=False)
        self.transform: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.transform is None else self.transform(self.weight))


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.layer, self.head_dim = layer, hd
        self.q_proj = Projection(d, config.num_attention_heads * hd)
        self.k_proj = Projection(d, config.num_key_value_heads * hd)
        self.v_proj = Projection(d, config.num_key_value_heads * hd)
        self.o_proj = Projection(config.num_attention_heads * hd, d)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(hd, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        batch, tokens, _ = x.shape
        split = (batch, tokens, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(split)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        out = attend(self.layer, apply_rope(q, *rope), apply_rope(k, *rope), v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.transform = None  # as in Projection
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """forward gives hidden states; `logits` turns those that are needed into logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.recompute = False  # activation checkpointing (arXiv:1604.06174), a block at a time

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, head: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last norm.

        token_ids, positions: (batch, tokens) int64 → (batch, tokens, hidden) in the weights' dtype.
        head: what `head_weight` gave, where the caller needs it too.
        The residual stream is float32 whatever the weights are: trained Qwen models carry a few
        activations thousands of times the median, next to which bf16 would lose the rest.
        """
        rope = rope_tables(positions, self.config)
        x = F.embedding(token_ids, self.head_weight() if head is None else head).float()
        for block in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, attend, use_reentrant=False)
            else:
                x = block(x, rope, attend)
        return self.model.norm(x)

    def head_weight(self) -> Tensor:
        """(vocab, hidden): the tied embedding as it is used, quantised where training says so."""
        embedding = self.model.embed_tokens
        if embedding.transform is None:
            return embedding.weight
        return embedding.transform(embedding.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden) → (n, vocab) float32, with the embedding as head.

        bf16 weights accumulate into float32 logits: rounded to bf16, neighbours among 151,936
        logits would tie.
        """
        head = self.head_weight()
        if head.dtype == torch.float32:
            return F.linear(hidden, head)
        if head.is_cuda:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), head.float())


def packed_attention(segments: Tensor, bounds: Tensor | None = None) -> Attend:
    """Causal attention within each segment of packed rows.

    segments: (batch, tokens) int: equal numbers side by side belong to one sequence; tokens of
    different sequences, padding (a number of its own) included, don't see each other. bounds: the
    same as starts and end (packing.Batch); with it, half precision on a GPU takes the
    variable-length flash kernel (FlashAttention-2, arXiv:2307.08691), which reads no mask. Anything
    else is SDPA with one.
    """
    tokens = segments.shape[1]
    if bounds is not None and segments.is_cuda and torch.is_autocast_enabled("cuda"):
        return flash_attention(bounds, tokens)
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=segments.device).tril()
    mask = (segments[:, :, None] == segments[:, None, :])[:, None] & causal  # (batch, 1, T, T)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def flash_attention(bounds: Tensor, longest: int) -> Attend:
    """Causal attention within the sequences that `bounds` separates; bf16, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, head_dim = q.shape
        # The kernel takes (all tokens, heads, head_dim), as many key as query heads.
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        q, k, v = (t.transpose(1, 2).flatten(0, 1).to(torch.bfloat16) for t in (q, k, v))
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
        return out.unflatten(0, (batch, tokens)).transpose(1, 2)

    return attend


class KVCache:
    """Static keys and values of one sequence.

    keys, values: (layers, kv_heads, length, head_dim).

    The buffers never move, so that a captured CUDA graph can write and read them. What is at or
    above the current position is left over from earlier work and is masked, never cleared.
    """

    def __init__(self, config: Config, length: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_hidden_layers, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = length

    def attention(self, positions: Tensor, limit: int) -> Attend:
        """Write this call's keys and values at `positions`, attend over positions 0..limit-1.

        positions: (tokens,) int64, on the device: its values may change between replays of a
        graph. limit: a host number above every position; it bounds the work. The mask admits key
        positions up to the query's own.
        """
        columns = torch.arange(limit, device=positions.device)
        mask = columns[None, :] <= positions[:, None]  # (tokens, limit)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys.index_copy_(1, positions, k[0])
            values.index_copy_(1, positions, v[0])
            return F.scaled_dot_product_attention(
                q,
                keys[None, :, :limit],
                values[None, :, :limit],
                attn_mask=mask[None, None],
                enable_gqa=True,
            )

        return attend


class Greedy(NamedTuple):
    """A greedy continuation: its ids and, at each, how far the best logit was above the second."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def greedy(model: Qwen3, token_ids: list[int], max_tokens: int, eos: Container[int]) -> Greedy:
    """Up to `max_tokens` greedy tokens after `token_ids`, ending with the first EOS id, included.

    The plain path in full: one prefill, then one decode step a token. Ties go to the lowest id.
    """
    weight = model.model.embed_tokens.weight
    cache = KVCache(model.config, len(token_ids) + max_tokens, weight.device, weight.dtype)
    found = Greedy([], [])
    new, start = token_ids, 0
    while len(found.token_ids) < max_tokens and not (found.token_ids and new[0] in eos):
        positions = torch.arange(start, start + len(new), device=weight.device)
        start += len(new)
        ids = torch.tensor([new], device=weight.device)
        hidden = model(ids, positions[None], cache.attention(positions, start))
        logits = model.logits(hidden[0, -1:])[0]
        best = logits.argmax().item()  # the first of equal ones, which topk does not promise
        first, second = logits.topk(2).values.tolist()
        found.token_ids.append(best)
        found.margins.append(first - second)
        new = [best]
    return found


# ------------------------------------------------------------------------------------- weights


def empty_model(config: Config) -> Qwen3:
    """A model on the meta device: no memory until `assign_weights` fills it."""
    with torch.device("meta"):
        return Qwen3(config)


def assign_weights(model: Qwen3, tensors: Iterator[tuple[str, Tensor]], where: str) -> Qwen3:
    """Put tensors into a meta model by name and shape; every parameter exactly once.

    A published checkpoint of a tied model may store `lm_head.weight` beside the embedding
    (Qwen3-1.7B's does): it is checked to be equal and dropped, never loaded as a second matrix.
    Raises ArtifactError on an unknown, repeated, missing or misshapen tensor.
    """
    expected = dict(model.named_parameters())
    loaded: dict[str, Tensor] = {}
    head = None
    for name, tensor in tensors:
        if name == "lm_head.weight":
            head = tensor
        elif name not in expected:
            raise ArtifactError(f"{where}: unknown tensor {name}")
        elif name in loaded:
            raise ArtifactError(f"{where}: {name} is stored twice")
        elif tensor.shape != expected[name].shape:
            raise ArtifactError(
                f"{where}: {name} has shape {list(tensor.shape)}, "
                f"config.json says {list(expected[name].shape)}"
            )
        else:
            loaded[name] = tensor
    missing = sorted(set(expected) - set(loaded))
    if missing:
        raise ArtifactError(f"{where}: {len(missing)} tensors missing, first {missing[0]}")
    if head is not None and not torch.equal(head, loaded["model.embed_tokens.weight"]):
        raise ArtifactError(f"{where}: lm_head.weight differs from the embedding it is tied to")
    model.load_state_dict(loaded, assign=True)
    return model


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, or the single one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise ArtifactError(f"{file} is missing: {directory} is not a whole checkpoint")
    return files


def read_checkpoint(
    directory: Path, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every stored tensor, one at a time; other dtypes are refused."""
    for file in checkpoint_files(directory):
        try:
            handle = safe_open(file, framework="pt")
        except Exception as error:  # safetensors raises its own type for a damaged header
            raise ArtifactError(f"{file} can't be read: {error}") from None
        with handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open is not a mapping)
                tensor = handle.get_tensor(name)
                if tensor.dtype not in dtypes:
                    raise ArtifactError(f"{file}: {name} is {tensor.dtype}, expected {dtypes}")
                yield name, tensor


def load_checkpoint(directory: Path, dtype: torch.dtype, device: str = "cpu") -> Qwen3:
    """A model from a Hugging Face checkpoint directory (config.json + safetensors)."""
    model = empty_model(Config.from_file(directory / "config.json"))
    tensors = ((name, t.to(device, dtype)) for name, t in read_checkpoint(directory))
    return assign_weights(model, tensors, str(directory))
