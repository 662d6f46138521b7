"""Throw-away profiles for tests: small random Qwen3 pairs, manifests over local parquet files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from artifacts import ROOT
from profile_files import write_architecture

TOKENIZER = ROOT / "tiny" / "base"


def random_qwen3(directory: Path, vocab_size: int, seed: int, **sizes: int) -> dict:
    """Write a random tied Qwen3 checkpoint (bf16); returns its config as a dict.

    Default initialisation makes a tied model repeat itself; wide layers give varied output.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    } | sizes
    config = Qwen3Config(
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **sizes,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.05 if "embed" in name else 0.35)
    model.generation_config = GenerationConfig()
    model.bfloat16().save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def add_tokenizer(directory: Path, tokenizer: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, directory / name)


def make_random_profile(profile: Path, tokenizer: Path, vocab_size: int, eos: list[int]) -> Path:
    """A directory with base/, teacher/ and architecture.json; the caller adds the manifest."""
    profile.mkdir()
    config = random_qwen3(profile / "base", vocab_size, seed=1)
    random_qwen3(profile / "teacher", vocab_size, seed=2, hidden_size=128, num_hidden_layers=3)
    add_tokenizer(profile / "base", tokenizer)
    add_tokenizer(profile / "teacher", tokenizer)
    write_architecture(profile, config, eos)
    return profile


def environment(workspace: Path, **extra: str) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Two tests run side by side on two cores; threads that wait for each other take far longer.
    offline |= {"OMP_NUM_THREADS": "1"}
    return os.environ | offline | {"WORKSPACE": str(workspace)} | extra


def run_stage(
    stage: str, profile: str | Path, workspace: Path, *flags: str, python: str = sys.executable
) -> subprocess.CompletedProcess:
    """Run one stage as a user does; the result's output is captured as text."""
    command = [python, str(ROOT / f"{stage}.py"), "--profile", str(profile), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(workspace), timeout=560
    )


def succeed(stage: str, profile: str | Path, workspace: Path, *flags: str) -> str:
    """Run a stage that must succeed; returns its stdout."""
    result = run_stage(stage, profile, workspace, *flags)
    assert result.returncode == 0, f"{stage} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def start_stage(
    stage: str, profile: str | Path, workspace: Path, *flags: str, python: str = sys.executable
) -> subprocess.Popen:
    """Start a stage that the test will kill."""
    return subprocess.Popen(
        [python, str(ROOT / f"{stage}.py"), "--profile", str(profile), *flags],
        env=environment(workspace),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_when(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """SIGKILL as soon as `condition` holds; fails the test where the stage ends first."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the stage ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
