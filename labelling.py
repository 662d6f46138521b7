"""The two labelling engines: greedy continuations of prompts, by vLLM or by transformers.

Both take prompts as token ids and give the same records; where two logits nearly tie, kernels of
different batch shapes may pick either token (compare with a margin, not blindly).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

import torch


class Label(NamedTuple):
    """One greedy continuation. top: (ids, log-probabilities) per position, (positions, k), or None.

    finish_reason: "stop" (the last id is an EOS id) or "length" (cut off; there is no end in it).
    """

    output_token_ids: list[int]
    finish_reason: str
    top: tuple[list[list[int]], list[list[float]]] | None


class Engine(Protocol):
    def label(self, prompts: list[list[int]]) -> list[Label]:
        """Continue every prompt; results in the order of the prompts."""


class TransformersEngine:
    """Batched `generate`, for small teachers and as a cross-check; left-padded, longest first."""

    def __init__(self, model: Path, eos: list[int], max_tokens: int, top_k: int, batch_size: int):
        from transformers import AutoModelForCausalLM, GenerationConfig, logging

        logging.disable_progress_bar()

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=dtype, local_files_only=True
        )
        self.model.to(self.device).eval()
        # The checkpoint's own generation config samples; nothing of it may reach a greedy label.
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=eos, pad_token_id=eos[-1], max_new_tokens=max_tokens
        )
        self.eos, self.top_k, self.batch_size = set(eos), top_k, batch_size

    def label(self, prompts: list[list[int]]) -> list[Label]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
        labels: list[Label | None] = [None] * len(prompts)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = self._generate([prompts[i] for i in chosen])
            for i, label in zip(chosen, batch, strict=True):
                labels[i] = label
        return labels

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[Label]:
        width = max(map(len, prompts))
        pad = self.model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        capture = TopK(self.top_k)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask.to(self.device),
            logits_processor=[capture] if self.top_k else None,
        )
        labels = []
        for row, tokens in enumerate(out[:, width:].tolist()):
            end = next((i for i, t in enumerate(tokens) if t in self.eos), None)
            kept = tokens if end is None else tokens[: end + 1]
            reason = "length" if end is None else "stop"
            labels.append(Label(kept, reason, capture.rows(row, len(kept))))
        return labels


class TopK:
    """A logits processor that changes nothing and keeps each step's k best log-probabilities.

    They stay on the device until the batch is done: fetched a step at a time, they would be what
    labelling waits for.
    """

    def __init__(self, k: int):
        self.k = k
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        top = scores.float().log_softmax(-1).topk(self.k)
        self.steps.append((top.indices, top.values))
        return scores

    def rows(self, row: int, length: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """(ids, log-probabilities) of a sequence's first `length` tokens, (length, k)."""
        if not self.k:
            return None
        if self._whole is None:
            kept = zip(*self.steps, strict=True)
            self._whole = tuple(torch.stack(values, dim=1).cpu() for values in kept)
        return tuple(values[row, :length].tolist() for values in self._whole)


class VllmEngine:
    """vLLM's offline engine: continuous batching, prefix caching, tensor parallelism."""

    def __init__(
        self,
        model: Path,
        eos: list[int],
        max_tokens: int,
        top_k: int,
        max_model_len: int,
        tensor_parallel: int,
        seed: int = 0,
    ):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=str(model),
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=True,
            enforce_eager=not torch.cuda.is_available(),
            skip_tokenizer_init=True,  # token ids in, token ids out
            generation_config="vllm",  # not the checkpoint's, which samples
            max_logprobs=max(top_k, 1),
            seed=seed,
        )
        self.parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=eos,
            logprobs=top_k or None,
            detokenize=False,
        )
        self.top_k = top_k

    def label(self, prompts: list[list[int]]) -> list[Label]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(inputs, self.parameters, use_tqdm=False)
        labels = []
        for output in outputs:
            completion = output.outputs[0]
            top = self._top(completion.logprobs) if self.top_k else None
            labels.append(Label(list(completion.token_ids), completion.finish_reason, top))
        return labels

    def _top(self, logprobs) -> tuple[list[list[int]], list[list[float]]]:
        ids, values = [], []
        for position in logprobs:
            ranked = sorted(position.items(), key=lambda item: item[1].rank)[: self.top_k]
            ids.append([token for token, _ in ranked])
            values.append([entry.logprob for _, entry in ranked])
        return ids, values
