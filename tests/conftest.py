"""Fixtures that several tests share. Nothing is imported here that a GPU machine may lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The first call of anything in torch takes as long as it takes.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a small random model: read it, don't write to it."""
    from exports import make_export

    return make_export(tmp_path_factory.mktemp("exports") / "random")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Test models gain nothing from a second thread; beside other work on the machine, threads that
    wait for each other at every operation make them twenty times slower."""
    import torch

    torch.set_num_threads(1)
