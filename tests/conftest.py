"""Fixtures that several tests share. Nothing is imported here that a GPU machine may lack."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a small random model: read it, don't write to it."""
    from exports import make_export

    return make_export(tmp_path_factory.mktemp("exports") / "random")
