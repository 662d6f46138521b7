"""Training through the packed formats: the forward pass uses the weights that will be served.

Each weight is rounded to bf16 (what a checkpoint stores), quantised by formats.py and dequantised
again at every use; gradients pass through unchanged (straight-through estimator, Bengio et al.,
arXiv:1308.3432; for whole networks Jacob et al., arXiv:1712.05877). Scales are chosen once, when
this phase begins, and kept beside the checkpoint, so that quantising it gives the trained codes
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from artifacts import ArtifactError
from formats import CODES, codec_of, decode
from model import Qwen3
from parallel import whole
from scales import choose_scales

SCALES_FILE = "scales.safetensors"


class StraightThrough(torch.autograd.Function):
    """weight → the value of its code; the gradient as if nothing had happened."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, weight: Tensor, scales: Tensor, codec: str
    ) -> Tensor:
        """weight: (rows, n), scales: bf16 (rows, groups) → (rows, n) in the weight's dtype."""
        codes = CODES[codec](weight.bfloat16(), scales)
        return decode(codec, codes, scales).to(weight.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple:
        return gradient, None, None


def straight_through(codec: str, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: StraightThrough.apply(weight, scales, codec)


def quantised_modules(model: Qwen3, scheme: dict) -> Iterator[tuple[str, nn.Module, str, int]]:
    """(weight's name, module, codec, group size) of every weight that the scheme packs."""
    for name, module in model.named_modules():
        if hasattr(module, "transform"):
            codec, size = codec_of(f"{name}.weight", scheme)
            if codec != "bf16":
                yield f"{name}.weight", module, codec, size


@torch.no_grad()
def attach(model: Qwen3, scheme: dict, method: str) -> dict[str, Tensor]:
    """Put the formats into the forward pass, with scales for the weights as they are now.

    scheme: codec and group size by kind; method: absmax | mse. Returns the scales by name.
    Raises ValueError on a shape that the formats can't hold.
    """
    scales = {}
    for name, module, codec, size in quantised_modules(model, scheme):
        weight = whole(module.weight.detach()).bfloat16()
        scales[name] = choose_scales(weight, codec, size, method)
    attach_scales(model, scheme, scales)
    return scales


def attach_scales(model: Qwen3, scheme: dict, scales: dict[str, Tensor]) -> None:
    """`attach` with scales that are there: after an interruption, or beside a checkpoint."""
    for name, module, codec, _ in quantised_modules(model, scheme):
        kept = scales[name].to(module.weight.device)
        module.transform = straight_through(codec, kept)


def detach(model: Qwen3) -> None:
    """Take the formats out of the forward pass."""
    for module in model.modules():
        if hasattr(module, "transform"):
            module.transform = None


def save_scales(scales: dict[str, Tensor], directory: Path) -> None:
    tensors = {name: value.cpu() for name, value in sorted(scales.items())}
    save_file(tensors, directory / SCALES_FILE, metadata={"format": "trained scales 1"})


def read_scales(directory: Path) -> dict[str, Tensor] | None:
    """The scales beside a checkpoint by weight name, or None where it was not trained so."""
    path = directory / SCALES_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != "trained scales 1":
                raise ArtifactError(f"{path}: not the scales that this code reads; train again")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ArtifactError(f"{path} can't be read: {error}") from None
