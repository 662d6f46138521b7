"""The persistent engine: decodes from the packed weights, all tokens of a draft in one launch.

Only the packed weights are in the GPU's memory, in the order of kernels/layout.py. A draft is one
launch of kernels/decode.cu; new positions up to FEW go through it too, as given tokens. Longer
prefills unpack one layer at a time into scratch matrices and run prefill.py's products on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from artifacts import ArtifactError
from engines import CHUNK_BUCKETS
from formats import NF4_CODEBOOK, UNPACK, Export
from graphs import Capturer
from kernels import layout
from kernels.nvrtc import Kernel, Module, architecture, compile_source
from model import Config, KVCache
from prefill import Prefill, half_rope_tables

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


class Layers:
    """layer → its matrices for the prefill, each unpacked at the moment it is asked for.

    All share one scratch buffer: the next one overwrites the last, in the stream's order. It is
    smaller than the L2 cache of a Hopper GPU, so that unpacked weights need not travel far.
    """

    def __init__(self, weights: Weights, codebook: Tensor, unpack: Kernel):
        c, device = weights.config, weights.body.device
        self.weights, self.codebook, self.unpack = weights, codebook, unpack
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        hidden, inner = c.hidden_size, c.intermediate_size
        shapes = {
            "qkv": (width + 2 * kv, hidden),
            "o": (hidden, width),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self.places, first = {}, 0  # name → (shape, first chunk, chunks) in a block's stream
        for name, (rows, columns) in shapes.items():
            chunks = rows * columns // (layout.ROWS * layout.COLUMNS * BLOCKS)
            self.places[name] = (rows, columns), first, chunks
            first += chunks
        most = max(rows * columns for rows, columns in shapes.values())
        self.scratch = torch.empty(most, dtype=torch.bfloat16, device=device)
        self.norms, self.head_norms = weights.norms.bfloat16(), weights.head_norms.bfloat16()

    def __call__(self, layer: int) -> Layer:
        return Layer(self, layer)

    def matrix(self, layer: int, name: str) -> Tensor:
        (rows, columns), first, chunks = self.places[name]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (self.weights.body, self.codebook)]
        numbers = [ctypes.c_int(n) for n in (layer, first, chunks, columns)]
        out = ctypes.c_void_p(self.scratch.data_ptr())
        self.unpack.launch(BLOCKS * chunks, 512, [*pointers, *numbers, out])
        return self.scratch[: rows * columns].view(rows, columns)


class Layer:
    """As prefill.LayerWeights; a matrix is valid until the next one is asked for."""

    def __init__(self, layers: Layers, layer: int):
        self._layers, self._layer = layers, layer
        self.input_norm, self.post_norm = layers.norms[2 * layer : 2 * layer + 2]
        self.q_norm, self.k_norm = layers.head_norms[2 * layer : 2 * layer + 2]

    def __getattr__(self, name: str) -> Tensor:
        if name not in self._layers.places:
            raise AttributeError(name)
        return self._layers.matrix(self._layer, name)


def zeros_of(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(n, dtype=dtype, device=device)


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
        self._embed = module.kernel("embed_rows")
        self.decode_steps = self.graph_replays = self.extend_replays = 0
        self._make_buffers(draft_length)
        self._layers = Layers(self.weights, self._codebook, module.kernel("unpack_matrix"))
        self._prefill = Prefill(export.config, self._layers, kv, ops)
        self._chunks = [size for size in CHUNK_BUCKETS if size < kv.length]
        self._new = zeros_of(2 + max(self._chunks, default=0), torch.int64, device)
        capture = Capturer(device, self._aim_at_nothing).capture
        self._replay_chunk = {n: capture(self._chunk_body(n)) for n in self._chunks}

    def _make_buffers(self, draft_length: int) -> None:
        def zeros(n: int, dtype: torch.dtype) -> Tensor:
            return zeros_of(n, dtype, self.device)

        cos, sin = half_rope_tables(self.config, self.kv.length, self.device)
        self._rope = torch.cat((cos, sin), dim=1).contiguous()
        self._codebook = NF4_CODEBOOK.to(self.device)
        self._exchange = zeros(EXCHANGE_WORDS, torch.int64)
        self._inputs = zeros(1 + FEW, torch.int64)  # the first position, the given tokens
        self._tokens = zeros(max(draft_length, 1), torch.int64)
        self._probabilities = zeros(max(draft_length, 1), torch.float32)
        self._steps, self._error = zeros(1, torch.int64), zeros(1, torch.int32)
        self._epoch, self._given = 1, 0

    def _aim_at_nothing(self) -> None:
        """No row of a trial run is real: no request's keys and values are overwritten."""
        self._new.zero_()

    def _chunk_body(self, size: int) -> Callable[[], None]:
        start, count, ids = self._new[:1], self._new[1:2], self._new[2 : 2 + size]

        def body() -> None:
            attend = self._prefill.chunk_attend(start, count)
            self._prefill.forward(self._embedding(ids), start, count, attend, cache_only=True)

        return body

    def _embedding(self, tokens: Tensor) -> Tensor:
        """(n,) int64 → (n, hidden) float32."""
        x = torch.empty((len(tokens), self.config.hidden_size), device=self.device)
        sources = [ctypes.c_void_p(t.data_ptr()) for t in (self.weights.head, tokens, x)]
        self._embed.launch(len(tokens), 512, sources)
        return x

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights."""
        return self.weights.nbytes

    def begin(self, reach: int) -> None:
        """Nothing depends on the context's length."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def extend(self, ids: np.ndarray, start: int, last: bool) -> None:
        """Compute the KV of `ids` at positions start…; the last few wait for `continuation`."""
        keep = 0 if not last else (len(ids) if len(ids) <= FEW else 1)
        before, given = ids[: len(ids) - keep], ids[len(ids) - keep :]
        if len(before):
            self._prefill_by(before, start)
        self._given = keep
        if keep:
            self._set(self._inputs, [start + len(before)], given)

    def _prefill_by(self, ids: np.ndarray, start: int) -> None:
        size = next((size for size in self._chunks if size >= len(ids)), None)
        if size is None:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
            self._prefill.run(self._embedding(tokens), start, cache_only=True)
            return
        self._set(self._new, [start, len(ids)], ids)
        self.extend_replays += 1
        self._replay_chunk[size]()

    @staticmethod
    def _set(buffer: Tensor, numbers: list[int], ids: np.ndarray) -> None:
        values = np.concatenate((numbers, ids)).astype(np.int64)
        buffer[: len(values)].copy_(torch.from_numpy(values))

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
