"""Make the tiny pair: train its tokenizer, pre-train a teacher and a base, write architecture.json.

The teacher learns all tasks of tiny/text.py in its own voice, augmented prompts among them; the
base, a fifth of its size, a general corpus of the same subjects in other voices. Neither sees a
prompt of tiny/data. Every document is fresh: text is generated while training runs, a part of it
by each worker. Seeded; another device, version or number of workers gives other weights, so the
sha256 in architecture.json are those of one run: these commands on one H200 (teacher 200 s, base
100 s).

    python -m tiny.pretrain --only tokenizer
    python -m tiny.pretrain --only teacher --workers 11
    python -m tiny.pretrain --only base --workers 3
    python -m tiny.pretrain --only architecture
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import bugs
from artifacts import write_json
from profile_files import write_architecture
from prompts import load_tokenizer, prompt_token_ids
from tiny.text import data_tasks, general_document, teacher_document

HERE = Path(__file__).resolve().parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VOCABULARY = 2048
SHAPES = {
    "teacher": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "base": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
DOCUMENTS = {"teacher": teacher_document, "base": general_document}
# ChatML; with thinking off the prompt closes an empty block, as the real pair's template does.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["tokenizer", "teacher", "base", "architecture"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--steps", type=int, help="(default: teacher 3200, base 1500)")
    parser.add_argument("--batch", type=int, default=512, help="documents a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=6, help="text processes (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="directory (default: tiny/)")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------- tokenizer


def train_tokenizer(directory: Path, seed: int) -> None:
    """Byte-level BPE with single digits, and the chat template."""
    rng, problems = random.Random(f"tokenizer/{seed}"), bugs.bug_repairs(seed + 1, 400)
    documents = [make(rng, problems) for _ in range(15000) for make in DOCUMENTS.values()]
    texts = [m["content"] for messages, _ in documents for m in messages]
    texts += [answer for _, answer in documents]
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\d]+|\n+|[^\S\n]+(?!\S)|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} entries")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)


# ------------------------------------------------------------------------------------ training


def data_prompts() -> set[str]:
    """The prompts of tiny/data, which pre-training must not see, augmented or not."""
    return {t.messages[0]["content"] for tasks in data_tasks(0).values() for t in tasks}


class Text(IterableDataset):
    """Endless batches of fresh documents as (token ids, loss mask), both (documents, longest)."""

    def __init__(self, which: str, tokenizer: Path, seed: int, batch: int):
        self.which, self.directory, self.seed, self.batch = which, tokenizer, seed, batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        rng = random.Random(f"{self.which}/{self.seed}/{worker}")
        problems = bugs.bug_repairs(self.seed + 1 + worker, 3000)
        tokenizer = load_tokenizer(self.directory)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        forbidden = data_prompts()
        while True:
            pool = []
            while len(pool) < 8 * self.batch:
                messages, answer = DOCUMENTS[self.which](rng, problems, forbidden)
                prompt = prompt_token_ids(tokenizer, messages, thinking=False)
                output = [*tokenizer.encode(answer, add_special_tokens=False), end]
                pool.append((prompt + output, len(prompt)))
            pool.sort(key=lambda item: len(item[0]))  # little padding within a batch
            batches = [pool[i : i + self.batch] for i in range(0, len(pool), self.batch)]
            rng.shuffle(batches)
            yield from (self.collate(batch) for batch in batches)

    def collate(self, batch: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width)
        for row, (tokens, prompt) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, :prompt] = 0.1  # a little of the prompts' language, most of the answers
            mask[row, prompt : len(tokens)] = 1.0
        return ids, mask


def make_model(which: str) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **SHAPES[which],
        vocab_size=VOCABULARY,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    return Qwen3ForCausalLM(config)


def masked_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy; padding follows every document, so causality alone hides it."""
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    weight = mask[:, 1:]
    kept = weight > 0
    logits = model.lm_head(hidden[kept]).float()
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][kept], reduction="none")
    return (loss * weight[kept]).sum() / weight.sum()


def pretrain(which: str, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    steps = args.steps or {"teacher": 3200, "base": 1500}[which]
    model = make_model(which).to(args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
    )
    data = Text(which, args.out / "base", args.seed, args.batch)
    loader = iter(DataLoader(data, batch_size=None, num_workers=args.workers, prefetch_factor=4))
    began = time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / 200, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        ids, mask = (t.to(args.device, non_blocking=True) for t in next(loader))
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = masked_loss(model, ids, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 250 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            print(f"{which} step {step + 1}: loss {loss.item():.4f}, {seconds:.0f} s", flush=True)
    directory = args.out / which
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")],
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    model.to("cpu", torch.bfloat16).save_pretrained(directory)


# --------------------------------------------------------------------------------- architecture


def make_architecture(out: Path) -> None:
    """architecture.json over the files that are there; both models get the same tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(out / "base" / name, out / "teacher" / name)
    config = json.loads((out / "base" / "config.json").read_text())
    eos = [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")]
    write_architecture(out, config, eos, "Apache-2.0")


def main(args: argparse.Namespace) -> None:
    if args.only in (None, "tokenizer"):
        train_tokenizer(args.out / "base", args.seed)
    for which in ("teacher", "base"):
        if args.only in (None, which):
            pretrain(which, args)
    if args.only in (None, "architecture"):
        make_architecture(args.out)


if __name__ == "__main__":
    main(parse_args())
