"""Stage 6: pack a checkpoint into the export that is served.

Reads runs/<run>/checkpoint (or models/base) and labels; writes workspace/<profile>/export/:
weights.safetensors, config.json, quantization.json, contract.json and the tokenizer files. Linear
weights become NF4, the tied embedding INT6, norms stay bf16 (formats.py). Prints size and error by
kind of tensor, and how often the packed model's argmax is that of the bf16 checkpoint.

    python quantize.py
    python quantize.py --profile tiny
    python quantize.py --profile tiny --run base --codec bf16    # to compare with: export-base-bf16
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from artifacts import (
    ArtifactError,
    Profile,
    Stage,
    digest,
    load_profile,
    own_command,
    parse_profile_args,
    plain_name,
    positive,
    read_stage,
    run_command,
    sha256_file,
    stage_digest,
    write_json,
)
from contract import make_contract, write_contract
from formats import EXPORT_FORMAT, Export, pack_tensor, tensor_kind
from losses import IGNORE, Example, collate, make_example
from model import Qwen3, greedy, load_checkpoint, packed_attention, read_checkpoint
from prompts import TOKENIZER_FILES
from records import read_labels

KNOWN_ANSWER_PROMPT = 64


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run",
        type=plain_name,
        default="distilled",
        metavar="NAME",
        help="the training run to export, or base for the undistilled base (default: distilled)",
    )
    parser.add_argument(
        "--codec",
        choices=["packed", "bf16"],
        default="packed",
        help="packed: as architecture.json states; bf16: unquantised (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=export_directory,
        metavar="NAME",
        help="directory in the workspace, its name starting with export (default: export for "
        "the distilled draft, packed; else export-<run>-<codec>)",
    )
    parser.add_argument(
        "--agreement-records",
        type=positive,
        default=32,
        metavar="N",
        help="hold-out labels over which agreement is measured (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    return parse_profile_args(parser, argv)


def export_directory(text: str) -> str:
    """A plain name that starts with `export`, so that no other artefact can be meant."""
    if not plain_name(text).startswith("export"):
        raise argparse.ArgumentTypeError(f"{text!r} does not start with export")
    return text


def export_name(args: argparse.Namespace) -> str:
    if args.out:
        return args.out
    main_one = (args.run, args.codec) == ("distilled", "packed")
    return "export" if main_one else f"export-{args.run}-{args.codec}"


def checkpoint_source(profile: Profile, run: str) -> tuple[Path, str, str | None]:
    """(checkpoint directory, digest of the stage that made it, digest of its labels or None)."""
    if run == "base":
        directory = profile.workspace / "models" / "base"
        return directory, stage_digest(directory, profile.command("download_models")), None
    directory = profile.workspace / "runs" / run
    command = profile.command("train") + ("" if run == "distilled" else f" --name {run}")
    record = read_stage(directory, command)
    return directory / "checkpoint", digest(record["outputs"]), record["inputs"]["labels"]


def make_scheme(profile: Profile, codec: str) -> dict:
    """Codec and group size for each kind of tensor."""
    plain = {"codec": "bf16", "group_size": None}
    packed = profile.architecture["quantization"]
    chosen = packed if codec == "packed" else {"linear": plain, "embedding": plain}
    return {"linear": chosen["linear"], "embedding": chosen["embedding"], "norm": plain}


def checkpoint_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's weights without the copy of the tied head that some of them carry."""
    for name, tensor in read_checkpoint(checkpoint):
        if name != "lm_head.weight":
            yield name, tensor


def pack_weights(checkpoint: Path, scheme: dict, path: Path) -> dict[str, dict]:
    """Write weights.safetensors; returns the entries of quantization.json."""
    entries, stored = {}, {}
    for name, tensor in tqdm(checkpoint_tensors(checkpoint), desc="pack", unit="tensor"):
        try:
            entries[name], tensors = pack_tensor(name, tensor, scheme)
        except ValueError as error:
            raise ArtifactError(f"{checkpoint}: {error}") from None
        stored |= tensors
    # One entry: safetensors writes several in an order that differs from run to run.
    metadata = {"export": json.dumps({"format": EXPORT_FORMAT, "scheme": scheme}, sort_keys=True)}
    try:
        save_file(stored, path, metadata=metadata)
    except Exception as error:  # safetensors wraps what the operating system said
        raise ArtifactError(f"{path} can't be written: {error}") from None
    return entries


def print_report(entries: dict[str, dict], size: int) -> None:
    """Elements and error by kind of tensor, and the file's size."""
    kinds: dict[str, list[dict]] = {}
    for name, entry in entries.items():
        short = name.split(".")[-2] if tensor_kind(name) == "linear" else tensor_kind(name)
        kinds.setdefault(f"{short} ({entry['codec']})", []).append(entry)
    print(f"  {'tensors':24} {'count':>5} {'elements':>12} {'rel. error':>10} {'max error':>10}")
    for kind, group in kinds.items():
        elements = sum(torch.Size(e["shape"]).numel() for e in group)
        relative = sum(e["error"]["relative"] for e in group) / len(group)
        largest = max(e["error"]["max"] for e in group)
        print(f"  {kind:24} {len(group):5} {elements:12,} {relative:10.4f} {largest:10.4f}")
    print(f"  weights.safetensors: {size:,} bytes")


@torch.inference_mode()
def measure_agreement(reference: Qwen3, packed: Qwen3, examples: list[Example]) -> dict:
    """Over label positions: share of equal argmaxes, and mean KL(reference ‖ packed) in nats."""
    equal = positions = 0
    divergence = 0.0
    for example in examples:
        batch = collate([[example]], str(packed.model.embed_tokens.weight.device))
        attend = packed_attention(batch.segments)
        labelled = batch.targets[0] != IGNORE
        logits = [
            m.logits(m(batch.token_ids, batch.positions, attend)[0, labelled])
            for m in (reference, packed)
        ]
        p, q = (values.log_softmax(-1) for values in logits)
        equal += (logits[0].argmax(-1) == logits[1].argmax(-1)).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        positions += len(p)
    return {
        "positions": positions,
        "argmax_equal": equal / positions if positions else None,
        "kl_nats": divergence / positions if positions else None,
    }


def known_answer(packed: Qwen3, prompt: list[int], draft_length: int, eos: list[int]) -> dict:
    """A short draft of the export in float32, which the server repeats when it loads it."""
    prompt = prompt[-KNOWN_ANSWER_PROMPT:]
    draft = greedy(packed, prompt, draft_length, eos)
    return {
        "prompt_token_ids": prompt,
        "draft_token_ids": draft.token_ids,
        "margins": draft.margins,
    }


def write_export(
    args: argparse.Namespace, profile: Profile, checkpoint: Path, contract: dict, directory: Path
) -> dict:
    """Fill `directory`; returns the figures."""
    scheme = contract["fields"]["quantization"]
    weights = directory / "weights.safetensors"
    entries = pack_weights(checkpoint, scheme, weights)
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)
    size = weights.stat().st_size
    quantization = {
        "format": EXPORT_FORMAT,
        "scheme": scheme,
        "draft_length": profile.architecture["draft_length"],
        "weights": {"bytes": size, "sha256": sha256_file(weights)},
        "tensors": entries,
    }
    write_json(directory / "quantization.json", quantization)
    write_contract(directory, contract)
    print_report(entries, size)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = Export(directory).load(torch.float32, device)
    reference = load_checkpoint(checkpoint, torch.float32, device)
    records = read_labels(profile.workspace / "labels", "holdout")
    records = records or read_labels(profile.workspace / "labels", "diagnostic")
    if not records:
        raise ArtifactError(
            "the label set has neither hold-out nor diagnostic records to measure the export on; "
            f"label more prompts: {profile.command('generate_teacher')} --force"
        )
    context = packed.config.max_position_embeddings
    examples = [
        make_example(r["prompt_token_ids"], r["output_token_ids"], context)
        for r in records[: args.agreement_records]
    ]
    agreement = measure_agreement(reference, packed, [e for e in examples if e is not None])
    eos = profile.architecture["eos_token_ids"]
    length = profile.architecture["draft_length"]
    quantization["agreement"] = agreement
    quantization["known_answer"] = known_answer(packed, records[0]["prompt_token_ids"], length, eos)
    write_json(directory / "quantization.json", quantization)
    return {"bytes": size, "agreement": agreement}


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    checkpoint, source, label_set = checkpoint_source(profile, args.run)
    labels = stage_digest(profile.workspace / "labels", profile.command("generate_teacher"))
    scheme = make_scheme(profile, args.codec)
    stage = Stage(
        name="quantize",
        directory=profile.workspace / export_name(args),
        command=own_command(),
        arguments={
            "run": args.run,
            "codec": args.codec,
            "scheme": scheme,
            "agreement_records": args.agreement_records,
            "architecture": digest(profile.architecture),
        },
        inputs={"checkpoint": source, "labels": labels},
    )
    if stage.is_done(args.force):
        return
    contract = make_contract(checkpoint, profile.architecture, label_set, scheme, source)
    with stage.working_directory() as directory:
        figures = write_export(args, profile, checkpoint, contract, directory)
        stage.finish(results=figures)
    agreement = figures["agreement"]
    print(f"  agreement with the bf16 checkpoint: {agreement}")
    print(f"  contract {contract['fingerprint']}")


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
