"""The one function that turns messages into prompt token ids.

Labelling, training, evaluation and the serving examples all call it: a draft that is trained on
one byte more or less than it is served with loses acceptance without an error anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from artifacts import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model or export directory, from local files only."""
    if not (directory / "tokenizer.json").is_file():
        raise ArtifactError(f"{directory} has no tokenizer.json: not a model directory")
    # Importing transformers takes seconds, which a stage that only refuses its input need not wait.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    if not tokenizer.chat_template:
        raise ArtifactError(f"{directory}: the tokenizer has no chat template")
    return tokenizer


def prompt_token_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], thinking: bool
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    messages: [{"role", "content"}, …]; thinking: the profile's (`architecture.json`). With it off,
    Qwen3's template closes an empty `<think>` block in the prompt.
    """
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        enable_thinking=thinking,
        tokenize=True,
        return_dict=False,
    )
