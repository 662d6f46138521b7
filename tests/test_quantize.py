"""quantize.py beyond the plain export: calibration, sensitivity, more bits, limits, the release."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from labelled import make_labelled
from profiles import run_stage, succeed
from safetensors.torch import load_file, save_file

from artifacts import Stage, digest, read_stage, write_json
from calibration import EMBEDDING, input_moments
from formats import Export
from model import load_checkpoint, packed_attention, read_checkpoint
from packing import LabelSet, collate

BASE = ("--run", "base", "--agreement-records", "4")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """(profile, workspace root) with an undistilled base."""
    return make_labelled(tmp_path_factory.mktemp("quantize"))


def quantization(root: Path, name: str) -> dict:
    return json.loads((root / "labelled" / name / "quantization.json").read_text())


def test_moments_are_those_of_what_each_weight_multiplies(made):
    """Against the inputs of one product, taken by hand."""
    _, root = made
    model = load_checkpoint(root / "labelled/models/base", torch.float32)
    examples = [LabelSet([root / "labelled/labels"], "train", 128)[i] for i in range(3)]
    moments = input_moments(model, examples, "cpu")
    names = {n for n, p in model.named_parameters() if p.ndim == 2}
    assert set(moments) == names
    total, count = torch.zeros(64), 0
    for example in examples:
        batch = collate([[example]])
        with torch.inference_mode():
            x = model.model.embed_tokens(batch.token_ids)
            x = model.model.layers[0].input_layernorm(x)[0]
        total, count = total + x.square().sum(0), count + len(x)
    torch.testing.assert_close(moments["model.layers.0.self_attn.q_proj.weight"], total / count)
    hidden = torch.cat(
        [
            model(b.token_ids, b.positions, packed_attention(b.segments))[0].detach()
            for b in (collate([[e]]) for e in examples)
        ]
    )
    torch.testing.assert_close(moments[EMBEDDING], hidden.square().mean(0), rtol=1e-4, atol=1e-5)


def test_better_scales_bring_the_export_closer_and_change_no_size(made):
    profile, root = made
    found = {}
    for method in ("absmax", "mse", "calibrated"):
        out = f"export-{method}"
        succeed("quantize", profile, root, *BASE, "--scales", method, "--out", out)
        found[method] = quantization(root, out)
        assert found[method]["scales"] == method
    sizes = {f["weights"]["bytes"] for f in found.values()}
    assert len(sizes) == 1
    errors = {
        m: sum(e["error"]["relative"] for e in f["tensors"].values()) for m, f in found.items()
    }
    assert errors["mse"] < errors["absmax"]
    assert found["mse"]["agreement"]["kl_nats"] < found["absmax"]["agreement"]["kl_nats"]


def test_the_most_sensitive_weights_get_more_bits_and_are_listed(made):
    profile, root = made
    out = "export-more"
    succeed("quantize", profile, root, *BASE, "--more-bits", "3", "--out", out)
    found = quantization(root, out)
    measured = found["sensitivity"]
    packed = {n for n, e in found["tensors"].items() if e["codec"] != "bf16"}
    assert set(measured) == packed
    assert all(entry["kl_nats"] > 0 for entry in measured.values())
    listed = found["scheme"]["tensors"]
    linear = [n for n in measured if n != EMBEDDING]
    worst = sorted(linear, key=lambda n: (measured[n]["accepted_change"], -measured[n]["kl_nats"]))
    assert set(listed) == set(worst[:3])
    assert {found["tensors"][n]["codec"] for n in listed} == {"int6"}
    # The reader takes it: the value of such a weight is that of its six bits.
    values = dict(Export(root / "labelled" / out).load(torch.float32).named_parameters())
    exact = dict(read_checkpoint(root / "labelled/models/base"))
    for name in listed:
        error = (values[name] - exact[name].float()).norm() / exact[name].float().norm()
        assert error < 0.04


def test_an_export_above_the_size_limit_is_refused(made):
    profile, root = made
    done = run_stage("quantize", profile, root, *BASE, "--max-bytes", "1000", "--out", "export-big")
    assert done.returncode == 1
    assert "bytes, more than --max-bytes 1,000" in done.stderr
    assert not (root / "labelled" / "export-big").exists()


def test_trained_scales_of_a_run_without_them_are_an_error(made):
    profile, root = made
    done = run_stage("quantize", profile, root, *BASE, "--scales", "trained", "--out", "export-t")
    assert done.returncode == 1 and "--qat" in done.stderr


def as_published(checkpoint: Path) -> None:
    """The layout of the real Qwen3-1.7B: two shards, an index, and the tied head once more."""
    weights = load_file(checkpoint / "model.safetensors")
    names = sorted(weights)
    parts = {
        "model-00001-of-00002.safetensors": {n: weights[n] for n in names[:-3]},
        "model-00002-of-00002.safetensors": {n: weights[n] for n in names[-3:]}
        | {"lm_head.weight": weights[EMBEDDING].clone()},
    }
    for name, tensors in parts.items():
        save_file(tensors, checkpoint / name, metadata={"format": "pt"})
    weight_map = {n: name for name, tensors in parts.items() for n in tensors}
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_checkpoint_in_the_published_layout_gives_the_same_export(made, tmp_path):
    profile, root = made
    plain = root / "labelled" / "export-plain"
    succeed("quantize", profile, root, *BASE, "--out", "export-plain")
    shutil.copytree(profile, tmp_path / "labelled")
    shutil.copytree(root / "labelled" / "labels", tmp_path / "work/labelled/labels")
    as_published(tmp_path / "labelled" / "base")
    architecture = json.loads((tmp_path / "labelled/architecture.json").read_text())
    from profile_files import model_entry

    architecture["base"] = model_entry(tmp_path / "labelled", "base")
    write_json(tmp_path / "labelled/architecture.json", architecture)
    succeed("download_models", tmp_path / "labelled", tmp_path / "work")
    succeed("quantize", tmp_path / "labelled", tmp_path / "work", *BASE, "--out", "export-plain")
    ours = tmp_path / "work/labelled/export-plain"
    assert (ours / "weights.safetensors").read_bytes() == (
        plain / "weights.safetensors"
    ).read_bytes()


# -------------------------------------------------------------------------------------- release


def climbed(root: Path, export: str, releasable: bool) -> None:
    """What evaluate.py --ladder leaves, without measuring."""
    directory = root / "labelled" / "ladder"
    outputs = read_stage(root / "labelled" / export, "")["outputs"]
    stage = Stage("ladder", directory, "python evaluate.py --ladder", {}, {})
    with stage.working_directory() as partial:
        write_json(
            partial / "results.json",
            {"export": digest(outputs), "releasable": releasable, "verdict": "the export keeps …"},
        )
        stage.finish()


def test_only_what_the_ladder_allows_is_marked_and_a_reason_is_recorded(made, tmp_path):
    profile, root = made
    export = root / "labelled" / "export"
    succeed("quantize", profile, root, *BASE, "--out", "export")
    missing = run_stage("quantize", profile, root, "--release")
    assert missing.returncode == 1 and "evaluate.py" in missing.stderr
    assert "--ladder" in missing.stderr

    climbed(root, "export", releasable=False)
    refused = run_stage("quantize", profile, root, "--release")
    assert refused.returncode == 1 and "not releasable" in refused.stderr
    assert not (export / "release.json").exists()
    succeed("quantize", profile, root, "--release-anyway", "a demonstration")
    mark = json.loads((export / "release.json").read_text())
    assert not mark["releasable"] and mark["overruled_because"] == "a demonstration"

    climbed(root, "export", releasable=True)
    succeed("quantize", profile, root, "--release")
    mark = json.loads((export / "release.json").read_text())
    assert mark["releasable"] and mark["overruled_because"] is None
    assert read_stage(export, ""), "the mark is no foreign file"
    assert Export(export).release() == mark

    # Another export, the same ladder: the mark goes, and does not come back.
    succeed("quantize", profile, root, *BASE, "--out", "export", "--scales", "absmax", "--force")
    assert not (export / "release.json").exists()
    write_json(export / "release.json", mark)
    assert Export(export).release() is None, "a mark of other weights says nothing"
    (export / "release.json").unlink()
    stale = run_stage("quantize", profile, root, "--release")
    assert stale.returncode == 1 and "another export" in stale.stderr
