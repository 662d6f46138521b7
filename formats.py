"""The packed weight formats: NF4 for linear weights, INT6 for the embedding, and the export file.

NF4 (QLoRA, arXiv:2305.14314, appendix E): a 4-bit code picks one of 16 values, the quantiles of a
normal distribution scaled to [-1, 1]; each group of 64 consecutive weights of a row has one scale.
INT6: a 6-bit code c stands for c - 32.

    value = NF4_CODEBOOK[code] * scale        value = (code - 32) * scale        in float32

Quantisers are pure functions: weights in, packed tensors and their error out. The reader of an
export checks the checksum, every tensor's name, dtype and shape, and that nothing is left over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from artifacts import ArtifactError, check_file, read_json
from model import Config, Qwen3, assign_weights, empty_model

EXPORT_FORMAT = 1
# Of a tensor: bounds the float32 intermediates, which then stay in a core's cache.
WEIGHTS_AT_ONCE = 1 << 18

# Published with bitsandbytes; the middle entry is an exact zero, the ends are exactly -1 and 1.
NF4_CODEBOOK = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float32,
)
# A weight half-way between two entries takes the lower one.
NF4_BOUNDS = (NF4_CODEBOOK[:-1] + NF4_CODEBOOK[1:]) / 2
# A binary search for each of 1.4 billion weights takes minutes on a CPU. So [-1, 1] is cut into
# bins that hold one bound at most: how many bounds lie below a bin, and which comes next.
NF4_BINS = 256
_EDGES = torch.arange(NF4_BINS + 1, dtype=torch.float64) * (2 / NF4_BINS) - 1
NF4_BELOW = torch.searchsorted(NF4_BOUNDS.double(), _EDGES).to(torch.uint8)
NF4_NEXT = torch.cat((NF4_BOUNDS, torch.tensor([2.0])))[NF4_BELOW.int()]


class Packed(NamedTuple):
    """One quantised weight. codes: uint8, packed along the rows; scales: bf16 (rows, groups);
    relative_error: |W - W'| / |W| in the Frobenius norm; max_error: largest |w - w'|."""

    codes: Tensor
    scales: Tensor
    relative_error: float
    max_error: float


# ------------------------------------------------------------------------------------- packing


def pack_nibbles(codes: Tensor) -> Tensor:
    """(rows, n) uint8 below 16 → (rows, n/2) uint8; the high nibble is the even column."""
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """(rows, n/2) uint8 → (rows, n) uint8 below 16."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)


def pack_sixes(codes: Tensor) -> Tensor:
    """(rows, n) uint8 below 64 → (rows, 3n/4) uint8.

    Four codes a, b, c, d fill three bytes in little-endian bit order: the 24-bit number
    a | b << 6 | c << 12 | d << 18, lowest byte first.
    """
    a, b, c, d = (codes[:, i::4] for i in range(4))
    # Shifts of uint8 drop what overflows, which is what falls into the next byte.
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=-1).flatten(1)


def unpack_sixes(packed: Tensor) -> Tensor:
    """(rows, 3n/4) uint8 → (rows, n) uint8 below 64."""
    x, y, z = (packed[:, i::3] for i in range(3))
    parts = (x & 63, (x >> 6 | y << 2) & 63, (y >> 4 | z << 4) & 63, z >> 2)
    return torch.stack(parts, dim=-1).flatten(1)


# ----------------------------------------------------------------------------------- quantisers


def check_weight(weight: Tensor, group_size: int) -> None:
    """Refuse what the formats can't hold; the text says why."""
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight has two dimensions, none empty; got shape {[*weight.shape]}")
    if group_size < 4 or group_size % 4:
        raise ValueError(f"group size {group_size} is not a positive multiple of 4")
    if weight.shape[1] % group_size:
        raise ValueError(
            f"{weight.shape[1]} columns are not a multiple of the group size {group_size}: "
            "a group may not cross rows"
        )
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity")


def absmax_scales(weight: Tensor, group_size: int, largest_code: float) -> Tensor:
    """bf16 scales (rows, groups) with which a group's largest magnitude takes `largest_code`."""
    groups = weight.float().unflatten(1, (-1, group_size))
    return (groups.abs().amax(-1) / largest_code).bfloat16()


def scaled(weight: Tensor, scales: Tensor) -> Tensor:
    """weight / scale by group: (rows, n), (rows, groups) bf16 → (rows, groups, group) float32.

    A product with the float32 reciprocal, as bitsandbytes takes it, so that equal scales give equal
    codes; a group of zeros has scale 0.
    """
    inverse = 1.0 / scales.float().clamp(min=1e-38)
    return weight.float().unflatten(1, (scales.shape[1], -1)) * inverse[..., None]


def nf4_codes(weight: Tensor, scales: Tensor) -> Tensor:
    """Nearest codebook index of weight / scale, ties to the lower; (rows, n) uint8.

    A group of zeros has scale 0 and code 7, whose value is 0.
    """
    x = scaled(weight, scales).clamp_(-1, 1).flatten()
    bins = ((x + 1) * (NF4_BINS / 2)).int()
    below, bound = (table.to(x.device).index_select(0, bins) for table in (NF4_BELOW, NF4_NEXT))
    return (below + (x > bound)).view(weight.shape)


def int6_codes(weight: Tensor, scales: Tensor) -> Tensor:
    """round(weight / scale) + 32, clamped to 0..63, ties to even; (rows, n) uint8."""
    return (scaled(weight, scales).round_().clamp_(-32, 31) + 32).flatten(1).to(torch.uint8)


CODES = {"nf4": nf4_codes, "int6": int6_codes}
LARGEST_CODE = {"nf4": 1.0, "int6": 31.0}


def code_values(codec: str, codes: Tensor) -> Tensor:
    """What codes stand for before the scale; float32 in the codes' shape."""
    if codec == "int6":
        return codes.float() - 32
    return NF4_CODEBOOK.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def decode(codec: str, codes: Tensor, scales: Tensor) -> Tensor:
    """(rows, n) uint8 codes, (rows, groups) bf16 scales → (rows, n) float32."""
    values = code_values(codec, codes).unflatten(1, (scales.shape[1], -1))
    return (values * scales.float()[..., None]).flatten(1)


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of whole rows, about WEIGHTS_AT_ONCE weights each."""
    step = max(1, WEIGHTS_AT_ONCE // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def quantize(
    codec: str, weight: Tensor, group_size: int = 64, scales: Tensor | None = None
) -> Packed:
    """weight: (rows, n) → its codes, scales and error.

    scales: bf16 (rows, groups); None: those of absmax.

    Raises ValueError on a shape or value that the format can't hold.
    """
    check_weight(weight, group_size)
    if scales is None:
        scales = absmax_scales(weight, group_size, LARGEST_CODE[codec])
    rows, columns = weight.shape
    if scales.shape != (rows, columns // group_size) or scales.dtype != torch.bfloat16:
        raise ValueError(f"scales {scales.dtype} {[*scales.shape]} don't fit {[*weight.shape]}")
    packed = weight.new_empty((rows, PACKED_COLUMNS[codec](columns)), dtype=torch.uint8)
    squares, norm, largest = 0.0, 0.0, 0.0
    for part in row_chunks(rows, columns):
        codes = CODES[codec](weight[part], scales[part])
        packed[part] = PACK[codec](codes)
        exact = weight[part].float()
        difference = exact - decode(codec, codes, scales[part])
        squares += difference.square().sum().item()
        norm += exact.square().sum().item()
        largest = max(largest, difference.abs().max().item())
    return Packed(packed, scales, (squares / (norm or 1.0)) ** 0.5, largest)


def dequantize(
    codec: str, packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Packed codes and bf16 scales (rows, groups) → (rows, n): float32 products in `dtype`."""
    rows, groups = scales.shape
    columns = UNPACK[codec](packed[:1]).shape[1]
    out = torch.empty((rows, columns), dtype=dtype, device=packed.device)
    for part in row_chunks(rows, columns):
        out[part] = decode(codec, UNPACK[codec](packed[part]), scales[part])
    return out


PACK = {"nf4": pack_nibbles, "int6": pack_sixes}
UNPACK = {"nf4": unpack_nibbles, "int6": unpack_sixes}
PACKED_COLUMNS = {"nf4": lambda n: n // 2, "int6": lambda n: n * 3 // 4}


# --------------------------------------------------------------------------------------- export


def tensor_kind(name: str) -> str:
    """`embedding`, `linear` or `norm`: what decides a tensor's codec."""
    if name == "model.embed_tokens.weight":
        return "embedding"
    return "norm" if name.split(".")[-2].endswith("norm") else "linear"


def stored_tensors(name: str, entry: dict) -> dict[str, tuple[torch.dtype, list[int]]]:
    """What `weights.safetensors` holds for one tensor of quantization.json: name → dtype, shape."""
    rows = entry["shape"][0]
    codec = entry["codec"]
    if codec == "bf16":
        return {name: (torch.bfloat16, entry["shape"])}
    if codec not in PACKED_COLUMNS:
        raise ArtifactError(f"{name}: codec {codec!r} is not known to this code")
    columns = entry["shape"][1]
    return {
        f"{name}.{codec}": (torch.uint8, [rows, PACKED_COLUMNS[codec](columns)]),
        f"{name}.scales": (torch.bfloat16, [rows, columns // entry["group_size"]]),
    }


def codec_of(name: str, scheme: dict) -> tuple[str, int | None]:
    """(codec, group size) of a tensor: its own entry in the scheme, or that of its kind.

    scheme: {"linear" | "embedding" | "norm": {"codec", "group_size"}, "tensors": {name: the same}}.
    """
    chosen = scheme.get("tensors", {}).get(name) or scheme[tensor_kind(name)]
    return chosen["codec"], chosen["group_size"]


def pack_tensor(
    name: str, weight: Tensor, scheme: dict, scales: Tensor | None = None
) -> tuple[dict, dict[str, Tensor]]:
    """One weight in its codec: (its entry of quantization.json, the stored tensors by name).

    scheme: see codec_of; scales: bf16, or None for absmax. Raises ValueError, naming the tensor, on
    a shape or value that the codec can't hold.
    """
    codec, group_size = codec_of(name, scheme)
    entry = {
        "codec": codec,
        "shape": list(weight.shape),
        "group_size": group_size,
        "source_sha256": tensor_sha256(weight),
    }
    if codec == "bf16":
        value = weight.bfloat16()
        difference = weight.float() - value.float()
        relative = difference.norm().item() / (weight.float().norm().item() or 1.0)
        largest = difference.abs().max().item()
        stored = {name: value.contiguous()}
    else:
        try:
            packed = quantize(codec, weight, group_size, scales)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        relative, largest = packed.relative_error, packed.max_error
        stored = {f"{name}.{codec}": packed.codes, f"{name}.scales": packed.scales}
    entry["error"] = {"relative": relative, "max": largest}
    return entry, stored


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order, in its own dtype."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()


class Export:
    """A checked, open export directory. `quantization`: its quantization.json.

    Raises ArtifactError where a file is missing, the checksum differs, or the inventory of
    `weights.safetensors` is not exactly what quantization.json lists.
    """

    def __init__(self, directory: Path, remedy: str = "run: python quantize.py"):
        self.directory = directory
        self.quantization = read_json(directory / "quantization.json", remedy)
        if self.quantization.get("format") != EXPORT_FORMAT:
            raise ArtifactError(
                f"{directory}: export format {self.quantization.get('format')!r}, "
                f"this code reads {EXPORT_FORMAT}; {remedy}"
            )
        self.config = Config.from_file(directory / "config.json")
        self.path = directory / "weights.safetensors"
        check_file(self.path, self.quantization["weights"], remedy)
        self._check_inventory()

    def _check_inventory(self) -> None:
        expected = {}
        for name, entry in self.quantization["tensors"].items():
            expected |= stored_tensors(name, entry)
        with safe_open(self.path, framework="pt") as file:
            present = set(file.keys())
            if present != set(expected):
                odd = sorted(present ^ set(expected))
                raise ArtifactError(f"{self.path}: inventory differs from quantization.json: {odd}")
            for name, (dtype, shape) in expected.items():
                view = file.get_slice(name)
                stored = {"U8": torch.uint8, "BF16": torch.bfloat16}.get(view.get_dtype())
                if stored != dtype or view.get_shape() != shape:
                    raise ArtifactError(
                        f"{self.path}: {name} is {view.get_dtype()} {view.get_shape()}, "
                        f"quantization.json says {dtype} {shape}"
                    )

    def tensors(self, device: str = "cpu") -> Iterator[tuple[str, dict, dict[str, Tensor]]]:
        """(name, entry, {suffix: tensor}) of each weight; suffix: nf4 | int6 | bf16, scales."""
        with safe_open(self.path, framework="pt", device=device) as file:
            for name, entry in self.quantization["tensors"].items():
                stored = stored_tensors(name, entry)
                yield (
                    name,
                    entry,
                    {(key[len(name) + 1 :] or "bf16"): file.get_tensor(key) for key in stored},
                )

    def load(self, dtype: torch.dtype, device: str = "cpu") -> Qwen3:
        """The model with every weight dequantised in float32, then cast to `dtype`."""

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, entry, stored in self.tensors(device):
                codec = entry["codec"]
                if codec == "bf16":
                    value = stored["bf16"]
                else:
                    value = dequantize(codec, stored[codec], stored["scales"], dtype)
                yield name, value.to(dtype)

        return assign_weights(empty_model(self.config), weights(), str(self.path))

    def release(self) -> dict | None:
        """The mark that quantize.py --release left on these very weights, or None."""
        path = self.directory / "release.json"
        if not path.is_file():
            return None
        mark = read_json(path, "run: python quantize.py --release")
        return mark if mark.get("weights") == self.quantization["weights"]["sha256"] else None

    def summary(self) -> str:
        """One line for logs and `/info`: codecs, group sizes, bytes."""
        scheme = self.quantization["scheme"]
        parts = [
            f"{kind} {c['codec']}" + (f" g{c['group_size']}" if c.get("group_size") else "")
            for kind, c in scheme.items()
            if kind != "tensors"
        ]
        return f"{', '.join(parts)}; {self.quantization['weights']['bytes']} bytes"
