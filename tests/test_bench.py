"""The benchmark measures what it says: fresh contexts, bytes that are read, a JSON line last."""

from __future__ import annotations

import json

import pytest
from profiles import succeed


def test_bench_times_random_weights_of_the_profiles_shape(tmp_path):
    out = tmp_path / "bench.json"
    text = succeed(
        *("bench", "tiny", tmp_path, "--random", "--contexts", "32", "100", "5000"),
        *("--repeats", "3", "--transformers", "--out", str(out)),
    )
    result = json.loads(text.strip().splitlines()[-1])
    assert result == json.loads(out.read_text())
    bandwidth, *rows = result["results"]
    assert bandwidth["copy_bandwidth"] > 1e9
    assert [(r["engine"], r["context"]) for r in rows] == [
        *(("torch", 32), ("transformers", 32), ("torch", 100), ("transformers", 100)),
    ], "a context beyond the limit is left out"
    first, longer = rows[0], rows[2]
    # 4 layers x 2 heads x 32 x (key, value) x 4 bytes for each of 68 positions more.
    assert longer["bytes_per_step"] - first["bytes_per_step"] == 68 * 4 * 2 * 32 * 2 * 4
    for row in (first, longer):
        assert row["ms_per_step"] * 15 == pytest.approx(row["decode_ms"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_step"] / row["ms_per_step"] / 1e6)
        assert 0 < row["of_bandwidth"] < 1
