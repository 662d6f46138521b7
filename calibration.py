"""What a model's weights see, and what packing each of them costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from tqdm import tqdm

from acceptance import simulate
from formats import codec_of
from losses import labelled_hidden
from model import Qwen3, packed_attention
from packing import Example, collate
from qat import straight_through
from scales import choose_scales

EMBEDDING = "model.embed_tokens.weight"


@torch.inference_mode()
def input_moments(model: Qwen3, examples: Iterable[Example], device: str) -> dict[str, Tensor]:
    """E[x²] of each input column over all positions, by weight name; (columns,) float32.

    The tied embedding's are those of the hidden states that meet it as the head.
    """
    sums: dict[str, Tensor] = {}
    count = 0

    def add(name: str, x: Tensor) -> None:
        squares = x.float().flatten(0, -2).square().sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    def watch(name: str) -> object:
        return lambda module, inputs: add(name, inputs[0])

    hooks = [
        module.register_forward_pre_hook(watch(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        for example in examples:
            batch = collate([[example]], device)
            hidden = model(batch.token_ids, batch.positions, packed_attention(batch.segments))
            add(EMBEDDING, hidden)
            count += batch.token_ids.numel()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / max(count, 1) for name, total in sums.items()}


class Reference:
    """A checkpoint's hidden states at label positions: enough for its logits, not its weights.

    Two models of the real size in float32 don't fit into a small machine's memory side by side.
    """

    def __init__(self, model: Qwen3, examples: list[Example], device: str):
        self.head = model.head_weight().detach()
        self.examples, self.device = examples, device
        self.hidden = [self._hidden(model, example) for example in examples]

    @torch.inference_mode()
    def _hidden(self, model: Qwen3, example: Example) -> Tensor:
        return labelled_hidden(model, collate([[example]], self.device))

    @torch.inference_mode()
    def compare(self, other: Qwen3) -> dict:
        """Over label positions: share of equal argmaxes, and mean KL(reference ‖ other), nats."""
        equal = positions = 0
        divergence = 0.0
        for example, hidden in zip(self.examples, self.hidden, strict=True):
            theirs = self._hidden(other, example)
            for mine, his in zip(hidden.split(512), theirs.split(512), strict=True):
                a, b = (mine @ self.head.t()).float(), other.logits(his)
                equal += (a.argmax(-1) == b.argmax(-1)).sum().item()
                p, q = a.log_softmax(-1), b.log_softmax(-1)
                divergence += (p.exp() * (p - q)).sum().item()
                positions += len(p)
        return {
            "positions": positions,
            "argmax_equal": equal / positions if positions else None,
            "kl_nats": divergence / positions if positions else None,
        }


def packed_alone(
    model: Qwen3, scheme: dict, method: str, moments: dict[str, Tensor] | None
) -> Iterator[str]:
    """Pack one weight at a time, in the forward pass of an otherwise exact model."""
    for module_name, module in model.named_modules():
        name = f"{module_name}.weight"
        if not hasattr(module, "transform") or codec_of(name, scheme)[0] == "bf16":
            continue
        codec, size = codec_of(name, scheme)
        given = moments[name] if moments else None
        scales = choose_scales(module.weight.detach().bfloat16(), codec, size, method, given)
        module.transform = straight_through(codec, scales)
        yield name
        module.transform = None


def sensitivity(
    model: Qwen3,
    scheme: dict,
    method: str,
    moments: dict[str, Tensor] | None,
    examples: list[Example],
    draft_length: int,
    device: str,
) -> dict[str, dict]:
    """For each packed weight, packed alone: KL from the exact model, and the accepted length."""
    reference = Reference(model, examples, device)
    exact = simulate(model, examples, draft_length, device).mean()
    found = {}
    names = packed_alone(model, scheme, method, moments)
    for name in tqdm(names, desc="sensitivity", unit="tensor"):
        figures = reference.compare(model)
        accepted = simulate(model, examples, draft_length, device).mean()
        found[name] = {
            "kl_nats": figures["kl_nats"],
            "accepted": accepted,
            "accepted_change": accepted - exact,
        }
    return found
