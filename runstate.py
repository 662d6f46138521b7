"""What a training run keeps on disk to go on after a kill at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from artifacts import ArtifactError, replace_file
from losses import Distiller
from parallel import World, gather_states, restore_states, whole_parameters


class State:
    """What a run needs to go on: one file, replaced whole; metrics are cut back to match it.

    Beside it `best.safetensors`, the parameters that drafted best for the hold-out. A kill between
    the two writes does no harm: the steps since the last state are repeated, and so is the best.
    """

    def __init__(
        self, directory: Path, world: World, distiller: Distiller, optimizer: torch.optim.Optimizer
    ):
        self.path, self.metrics = directory / "state.pt", directory / "metrics.jsonl"
        self.best_path = directory / "best.safetensors"
        self.world, self.distiller, self.optimizer = world, distiller, optimizer
        self.best: dict | None = None  # {"step", "accepted"}
        self.scales: dict[str, Tensor] | None = None  # of the packed formats, once they are in use

    def save(self, step: int) -> None:
        model, optimizer = gather_states(self.world, self.distiller, self.optimizer)
        if not self.world.first:
            return
        content = {
            "step": step,
            "metrics_bytes": self.metrics.stat().st_size if self.metrics.exists() else 0,
            "best": self.best,
            "scales": self.scales,
            "model": model,
            "optimizer": optimizer,
        }
        replace_file(self.path, lambda path: torch.save(content, path))

    def keep_if_best(self, step: int, accepted: float) -> None:
        """Keep the parameters where no earlier ones of this phase drafted as well."""
        if self.best is not None and accepted <= self.best["accepted"]:
            return
        self.best = {"step": step, "accepted": accepted}
        tensors = {}
        for name, value in whole_parameters(self.distiller.model):
            if self.world.first:
                tensors[name] = value.to("cpu", torch.bfloat16)
        if self.world.first:
            metadata = {"format": "pt"}
            replace_file(self.best_path, lambda path: save_file(tensors, path, metadata=metadata))

    def restore(self) -> int:
        """The step to go on with: 0 where nothing was saved."""
        saved = self._read() if self.world.first else None
        rest = {k: saved[k] for k in ("step", "best", "scales", "metrics_bytes")} if saved else None
        rest = self.world.from_first(rest)
        if rest is None:
            if self.world.first:
                self.metrics.unlink(missing_ok=True)
            return 0
        states = (saved["model"], saved["optimizer"]) if saved else ({}, {})
        restore_states(self.world, self.distiller, self.optimizer, states)
        self.best, self.scales = rest["best"], rest["scales"]
        if self.world.first:
            os.truncate(self.metrics, rest["metrics_bytes"])
            print(f"train: going on from step {rest['step']}")
        return rest["step"]

    def _read(self) -> dict | None:
        """The saved state, or None; ArtifactError where it is damaged."""
        if not self.path.is_file():
            return None
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises whatever its parser stumbles over
            raise ArtifactError(
                f"{self.path} is damaged ({type(error).__name__}): remove it, and the same command "
                "starts over"
            ) from None
