"""The persistent engine: decodes from the packed weights, all tokens of a draft in one launch.

Only the packed weights are in the GPU's memory, in the order of kernels/layout.py. A draft is one
launch of kernels/decode.cu; new positions up to FEW go through it too, as given tokens. Longer
prefills unpack one layer at a time into scratch matrices and run prefill.py's products on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from artifacts import ArtifactError
from formats import NF4_CODEBOOK, UNPACK, Export
from kernels import layout
from kernels.nvrtc import Module, architecture, compile_source
from model import Config, KVCache
from prefill import LayerWeights, Prefill, half_rope_tables

if TYPE_CHECKING:
    from kernels.ops import Ops

SOURCE = Path(__file__).parent / "kernels" / "decode.cu"
BLOCKS = 128
THREADS = 16 * 32 + 32
FEW = 4  # so many new positions cost less as decode steps than as a prefill
# Rings, table, partial sums, barriers: struct Shared of decode.cu, rounded up.
SHARED_BYTES = 231_936
EXCHANGE_WORDS = 1 << 17


class Arguments(ctypes.Structure):
    """decode.cu's struct of the same name."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("body", "head", "norms", "head_norms", "rope")),
        *((name, ctypes.c_void_p) for name in ("codebook", "keys", "values", "exchange", "given")),
        *((name, ctypes.c_void_p) for name in ("position", "tokens", "probabilities", "steps")),
        ("error", ctypes.c_void_p),
        ("length", ctypes.c_longlong),
        ("epoch", ctypes.c_uint32),
        ("given_count", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


def defines(config: Config) -> dict[str, object]:
    """The macros that decode.cu wants."""
    return {
        "HIDDEN": config.hidden_size,
        "LAYERS": config.num_hidden_layers,
        "Q_HEADS": config.num_attention_heads,
        "KV_HEADS": config.num_key_value_heads,
        "HEAD_DIM": config.head_dim,
        "INTERMEDIATE": config.intermediate_size,
        "VOCABULARY": config.vocab_size,
        "BLOCKS": BLOCKS,
        "EXCHANGE_WORDS": EXCHANGE_WORDS,
        "SHARED_BYTES": SHARED_BYTES,
        "EPSILON": f"{config.rms_norm_eps!r}f",
    }


class Weights:
    """An export's weights on a GPU, in the kernel's order.

    body: (layers, blocks, chunks, bytes) and head: (vocabulary / 16, bytes) uint8; norms and
    head_norms: float32. Raises ArtifactError on a codec or a shape that the kernel does not read.
    """

    def __init__(self, export: Export, device: torch.device):
        config = export.config
        try:
            layout.check_shape(config, BLOCKS)
        except ValueError as error:
            raise ArtifactError(f"{error}; use --engine graph") from None
        self.config = config
        stored = {name: (entry, parts) for name, entry, parts in export.tensors(str(device))}

        def packed(name: str, codec: str) -> layout.Packed:
            entry, parts = stored.pop(name)
            if (entry["codec"], entry["group_size"]) != (codec, layout.GROUP):
                raise ArtifactError(
                    f"{name} is {entry['codec']} in groups of {entry['group_size']}, and the "
                    f"persistent kernel reads {codec} in groups of {layout.GROUP}; use "
                    "--engine graph"
                )
            return layout.Packed(UNPACK[codec](parts[codec]), parts["scales"])

        def norm(name: str) -> Tensor:
            return stored.pop(name)[1]["bf16"].float()

        def below(layer: str, *names: str) -> layout.Packed:
            found = [packed(f"{layer}.{name}.weight", "nf4") for name in names]
            return layout.Packed(*(torch.cat(parts) for parts in zip(*found, strict=True)))

        layers, norms, head_norms = [], [], []
        for i in range(config.num_hidden_layers):
            at = f"model.layers.{i}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            layers.append(
                layout.layer_stream(
                    config,
                    below(attention, "q_proj", "k_proj", "v_proj"),
                    below(attention, "o_proj"),
                    below(mlp, "gate_proj", "up_proj"),
                    below(mlp, "down_proj"),
                    BLOCKS,
                )
            )
            norms += [
                norm(f"{at}.input_layernorm.weight"),
                norm(f"{at}.post_attention_layernorm.weight"),
            ]
            head_norms += [norm(f"{attention}.q_norm.weight"), norm(f"{attention}.k_norm.weight")]
        self.body = torch.stack(layers)
        self.head = layout.head_stream(packed("model.embed_tokens.weight", "int6"))
        self.norms = torch.stack([*norms, norm("model.norm.weight")])
        self.head_norms = torch.stack(head_norms)
        assert not stored, sorted(stored)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.body, self.head, self.norms, self.head_norms))


class PersistentEngine:
    """One launch a draft. Same contract as engines.TorchEngine; bf16 keys and values."""

    name = "persistent"
    prefill_chunk = 4096

    def __init__(self, export: Export, kv: KVCache, draft_length: int, ops: Ops):
        device = self.device = kv.keys.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
            raise ArtifactError("--engine persistent needs compute capability 9.0 or above")
        if torch.cuda.get_device_properties(device).multi_processor_count < BLOCKS:
            raise ArtifactError(f"--engine persistent needs {BLOCKS} multiprocessors")
        if kv.keys.dtype != torch.bfloat16:
            raise ArtifactError("--engine persistent keeps bf16 keys and values")
        self.kv, self.weights, self.config = kv, Weights(export, device), export.config
        module = Module(compile_source(SOURCE, defines(export.config), architecture(device)))
        self._decode = module.kernel("decode", SHARED_BYTES)
        self._unpack, self._embed = module.kernel("unpack_layer"), module.kernel("embed_rows")
        self.decode_steps = self.graph_replays = 0
        self._make_buffers(draft_length)
        self._scratch = self._make_scratch()
        self._prefill = Prefill(export.config, self._layer, kv, ops)

    def _make_buffers(self, draft_length: int) -> None:
        def zeros(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=self.device)

        cos, sin = half_rope_tables(self.config, self.kv.length, self.device)
        self._rope = torch.cat((cos, sin), dim=1).contiguous()
        self._codebook = NF4_CODEBOOK.to(self.device)
        self._exchange = zeros(EXCHANGE_WORDS, torch.int64)
        self._inputs = zeros(1 + FEW, torch.int64)  # the first position, the given tokens
        self._tokens = zeros(max(draft_length, 1), torch.int64)
        self._probabilities = zeros(max(draft_length, 1), torch.float32)
        self._steps, self._error = zeros(1, torch.int64), zeros(1, torch.int32)
        self._epoch, self._given = 1, 0

    def _make_scratch(self) -> LayerWeights:
        c, norms = self.config, torch.empty(0, device=self.device)
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=torch.bfloat16, device=self.device)

        return LayerWeights(
            matrix(width + 2 * kv, c.hidden_size),
            matrix(c.hidden_size, width),
            matrix(2 * c.intermediate_size, c.hidden_size),
            matrix(c.hidden_size, c.intermediate_size),
            *(norms,) * 4,
        )

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights."""
        return self.weights.nbytes

    def _layer(self, layer: int) -> LayerWeights:
        """A layer's matrices in the scratch buffers, which the next call overwrites in order."""
        w, s = self.weights, self._scratch
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (s.qkv, s.o, s.gate_up, s.down)]
        sources = [ctypes.c_void_p(t.data_ptr()) for t in (w.body, self._codebook)]
        blocks = BLOCKS * w.body.shape[2]
        self._unpack.launch(blocks, 512, [*sources, ctypes.c_int(layer), *pointers])
        norms = (w.norms[2 * layer], w.norms[2 * layer + 1])
        heads = (w.head_norms[2 * layer], w.head_norms[2 * layer + 1])
        return s._replace(
            input_norm=norms[0].bfloat16(),
            post_norm=norms[1].bfloat16(),
            q_norm=heads[0].bfloat16(),
            k_norm=heads[1].bfloat16(),
        )

    def begin(self, reach: int) -> None:
        """Nothing depends on the context's length."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        """Compute the KV of `ids` at positions start…; the last few wait for `continuation`."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        keep = 0 if not last else (len(ids) if len(ids) <= FEW else 1)
        if len(ids) > keep:
            before = tokens[: len(ids) - keep]
            x = torch.empty((len(before), self.config.hidden_size), device=self.device)
            sources = [ctypes.c_void_p(t.data_ptr()) for t in (self.weights.head, before, x)]
            self._embed.launch(len(before), 512, sources)
            self._prefill.run(x, start)
        self._given = keep
        if keep:
            self._inputs[0] = start + len(ids) - keep
            self._inputs[1 : 1 + keep] = tokens[len(ids) - keep :]

    def continuation(self, position: int, count: int) -> Iterator[tuple[int, float]]:
        """All `count` tokens at once; the caller drops what follows an end."""
        steps = self._launch(count)
        self.decode_steps += steps
        if self._error.item():
            raise RuntimeError("a block waited too long for another: the draft is not valid")
        if self._steps.item() != steps:
            raise RuntimeError(f"{self._steps.item()} steps ran on the device, expected {steps}")
        tokens, probabilities = self._tokens[:count].tolist(), self._probabilities[:count].tolist()
        return iter(list(zip(tokens, probabilities, strict=True)))

    def _launch(self, count: int) -> int:
        """Start the kernel; returns how many steps it has to run."""
        steps = self._given + max(count, 1) - 1
        w, pointer = self.weights, Tensor.data_ptr
        arguments = Arguments(
            *map(pointer, (w.body, w.head, w.norms, w.head_norms, self._rope, self._codebook)),
            *map(pointer, (self.kv.keys, self.kv.values, self._exchange, self._inputs[1:])),
            *map(pointer, (self._inputs, self._tokens, self._probabilities, self._steps)),
            self._error.data_ptr(),
            self.kv.length,
            self._epoch,
            self._given,
            count,
        )
        used = steps * (2 * self.config.num_hidden_layers + 2)
        if self._epoch + 2 * used >= 1 << 32:  # tags must not repeat: begin again
            self._exchange.zero_()
            self._epoch = 1
        arguments.epoch = self._epoch
        self._epoch += used
        self._steps.zero_()
        self._decode.launch(BLOCKS, THREADS, [arguments], together=True)
        return steps
