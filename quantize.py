"""Stage 6: pack a checkpoint into the export that is served.

Reads runs/<run>/checkpoint (or models/base) and labels; writes workspace/<profile>/export/:
weights.safetensors, config.json, quantization.json, contract.json and the tokenizer files. Linear
weights become NF4, the tied embedding INT6, norms stay bf16 (formats.py); a run that was trained
through the formats keeps its scales, so that its codes are the trained ones. Prints size and error
by kind of tensor, and how often the packed model's argmax is that of the bf16 checkpoint.

    python quantize.py
    python quantize.py --profile tiny
    python quantize.py --profile tiny --run base --codec bf16    # to compare with: export-base-bf16
    python quantize.py --sensitivity                             # what each tensor's packing costs
    python quantize.py --release                # after evaluate.py --ladder: mark it as releasable
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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
    not_negative,
    own_command,
    parse_profile_args,
    plain_name,
    positive,
    read_json,
    read_stage,
    run_command,
    sha256_file,
    stage_digest,
    write_json,
)
from calibration import Reference, input_moments, sensitivity
from checkpoints import run_checkpoint
from contract import make_contract, write_contract
from formats import EXPORT_FORMAT, Export, codec_of, pack_tensor, tensor_kind
from model import Qwen3, greedy, load_checkpoint, read_checkpoint
from packing import IGNORE, Example, LabelSet
from prompts import TOKENIZER_FILES
from qat import read_scales
from scales import METHODS, choose_scales

KNOWN_ANSWER_PROMPT = 64
CALIBRATION_TOKENS = 2048  # of a label, at most


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
        choices=["packed", "body", "bf16"],
        default="packed",
        help="packed: as architecture.json states; body: the linear weights alone; bf16: "
        "unquantised (default: %(default)s)",
    )
    parser.add_argument(
        "--scales",
        choices=["trained", *METHODS],
        help="how scales are chosen (default: trained where the run went through the formats, "
        "else mse)",
    )
    parser.add_argument(
        "--calibration-records",
        type=positive,
        default=64,
        metavar="N",
        help="train labels that calibrated scales see (default: %(default)s)",
    )
    parser.add_argument(
        "--more-bits",
        type=not_negative,
        default=0,
        metavar="N",
        help="give INT6 instead of NF4 to the N linear weights whose packing costs most, measured "
        "as --sensitivity does (default: 0)",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="measure each tensor packed alone and add it to quantization.json",
    )
    parser.add_argument(
        "--max-bytes",
        type=positive,
        default=1_000_000_000,
        metavar="N",
        help="a packed export that is larger is refused (default: %(default)s)",
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="mark the export as releasable, if the ladder that was measured on it allows it",
    )
    parser.add_argument(
        "--release-anyway",
        metavar="REASON",
        help="mark it although the ladder does not; the reason is recorded",
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


def make_scheme(profile: Profile, codec: str) -> dict:
    """Codec and group size for each kind of tensor."""
    plain = {"codec": "bf16", "group_size": None}
    packed = profile.architecture["quantization"]
    return {
        "linear": plain if codec == "bf16" else packed["linear"],
        "embedding": packed["embedding"] if codec == "packed" else plain,
        "norm": plain,
    }


def checkpoint_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's weights without the copy of the tied head that some of them carry."""
    for name, tensor in read_checkpoint(checkpoint):
        if name != "lm_head.weight":
            yield name, tensor


class Scales:
    """Where each weight's scales come from. method: trained | absmax | mse | calibrated."""

    def __init__(
        self,
        scheme: dict,
        method: str,
        trained: dict[str, Tensor] | None,
        moments: dict[str, Tensor] | None,
    ):
        self.scheme, self.method, self.trained, self.moments = scheme, method, trained, moments

    def of(self, name: str, weight: Tensor) -> Tensor | None:
        """bf16 scales (rows, groups), or None for a tensor that is not packed.

        Raises ValueError where the format can't hold the weight or the scales are missing.
        """
        codec, size = codec_of(name, self.scheme)
        if codec == "bf16":
            return None
        if self.method == "trained":
            if name not in self.trained:
                raise ValueError(f"{name}: the run has no trained scales for it")
            return self.trained[name]
        moments = self.moments[name] if self.moments else None
        try:
            return choose_scales(weight, codec, size, self.method, moments)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def pack_weights(checkpoint: Path, scheme: dict, scales: Scales, path: Path) -> dict[str, dict]:
    """Write weights.safetensors; returns the entries of quantization.json."""
    entries, stored = {}, {}
    for name, tensor in tqdm(checkpoint_tensors(checkpoint), desc="pack", unit="tensor"):
        try:
            entries[name], tensors = pack_tensor(name, tensor, scheme, scales.of(name, tensor))
        except ValueError as error:
            raise ArtifactError(f"{checkpoint}: {error}") from None
        stored |= tensors
    # One entry: safetensors writes several in an order that differs from run to run.
    metadata = {"export": json.dumps({"format": EXPORT_FORMAT, "scheme": scheme}, sort_keys=True)}
    try:
        save_file(stored, path, metadata=metadata)
    except Exception as error:  # safetensors wraps what the operating system said
        raise ArtifactError(f"{path} can't be written: {error}") from None
    path.chmod(0o644)  # safetensors writes it for its owner alone; a server may run as another user
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


def known_answer(packed: Qwen3, prompt: list[int], draft_length: int, eos: list[int]) -> dict:
    """A short draft of the export in float32, which the server repeats when it loads it."""
    prompt = prompt[-KNOWN_ANSWER_PROMPT:]
    draft = greedy(packed, prompt, draft_length, eos)
    return {
        "prompt_token_ids": prompt,
        "draft_token_ids": draft.token_ids,
        "margins": draft.margins,
    }


def measured_examples(profile: Profile, count: int) -> list[Example]:
    """Hold-out labels (diagnostic ones where there are none) to measure an export on."""
    labels, context = (
        profile.workspace / "labels",
        profile.architecture["dimensions"]["max_position_embeddings"],
    )
    for split in ("holdout", "diagnostic"):
        found = LabelSet([labels], split, context)
        if len(found):
            return [found[i] for i in range(min(count, len(found)))]
    raise ArtifactError(
        "the label set has neither hold-out nor diagnostic records to measure the export on; "
        f"label more prompts: {profile.command('generate_teacher')} --force"
    )


class Preparation(NamedTuple):
    """What is measured on the exact checkpoint before anything is packed."""

    scheme: dict
    moments: dict[str, Tensor] | None
    sensitivity: dict[str, dict] | None
    reference: Reference


def prepare(
    args: argparse.Namespace,
    profile: Profile,
    checkpoint: Path,
    method: str,
    examples: list[Example],
    device: str,
) -> Preparation:
    """Load the checkpoint once for all that needs it, and let it go."""
    model = load_checkpoint(checkpoint, torch.float32, device)
    scheme, moments, measured = make_scheme(profile, args.codec), None, None
    if method == "calibrated":
        train = LabelSet([profile.workspace / "labels"], "train", CALIBRATION_TOKENS)
        chosen = [train[i] for i in range(min(args.calibration_records, len(train)))]
        found = input_moments(model, chosen, device)
        moments = {name: value.cpu() for name, value in found.items()}
    if args.sensitivity or args.more_bits:
        used = "mse" if method == "trained" else method
        length = profile.architecture["draft_length"]
        measured = sensitivity(model, scheme, used, moments, examples, length, device)
        print_sensitivity(measured)
    if args.more_bits:
        linear = [name for name in measured if codec_of(name, scheme)[0] == "nf4"]
        worst = sorted(
            linear, key=lambda n: (measured[n]["accepted_change"], -measured[n]["kl_nats"])
        )
        more = {"codec": "int6", "group_size": scheme["linear"]["group_size"]}
        scheme["tensors"] = {name: more for name in sorted(worst[: args.more_bits])}
    return Preparation(scheme, moments, measured, Reference(model, examples, device))


def cost(entry: dict) -> tuple[float, float]:
    """Sorts the tensors whose packing costs most acceptance first; then by KL."""
    return entry["accepted_change"], -entry["kl_nats"]


def print_sensitivity(measured: dict[str, dict], count: int = 10) -> None:
    """The tensors whose packing alone moves the model most."""
    print(f"  {'packed alone':44} {'KL, nats':>10} {'accepted':>9} {'change':>8}")
    for name in sorted(measured, key=lambda n: -measured[n]["kl_nats"])[:count]:
        entry = measured[name]
        print(
            f"  {name.removeprefix('model.'):44} {entry['kl_nats']:10.5f} "
            f"{entry['accepted']:9.3f} {entry['accepted_change']:+8.3f}"
        )


def write_export(
    args: argparse.Namespace,
    profile: Profile,
    checkpoint: Path,
    contract: Callable[[dict, str], dict],
    directory: Path,
) -> dict:
    """Fill `directory`; returns the figures. contract: made for scheme and weights' sha256."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    examples = measured_examples(profile, args.agreement_records)
    trained = read_scales(checkpoint) if args.codec == "packed" else None
    method = scales_method(args, trained, checkpoint)
    found = prepare(args, profile, checkpoint, method, examples, device)
    weights = directory / "weights.safetensors"
    scales = Scales(found.scheme, method, trained, found.moments)
    entries = pack_weights(checkpoint, found.scheme, scales, weights)
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)
    size = weights.stat().st_size
    print_report(entries, size)
    if args.codec == "packed" and size > args.max_bytes:
        raise ArtifactError(
            f"the export has {size:,} bytes, more than --max-bytes {args.max_bytes:,}"
        )
    quantization = {
        "format": EXPORT_FORMAT,
        "scheme": found.scheme,
        "scales": method,
        "draft_length": profile.architecture["draft_length"],
        "weights": {"bytes": size, "sha256": sha256_file(weights)},
        "tensors": entries,
    }
    if found.sensitivity is not None:
        quantization["sensitivity"] = found.sensitivity
    write_json(directory / "quantization.json", quantization)
    made = contract(found.scheme, quantization["weights"]["sha256"])
    write_contract(directory, made)

    packed = Export(directory).load(torch.float32, device)
    quantization["agreement"] = found.reference.compare(packed)
    eos, length = (profile.architecture[key] for key in ("eos_token_ids", "draft_length"))
    prompt = first_prompt(examples[0])
    quantization["known_answer"] = known_answer(packed, prompt, length, eos)
    write_json(directory / "quantization.json", quantization)
    print(f"  agreement with the bf16 checkpoint: {quantization['agreement']}")
    print(f"  contract {made['fingerprint']}")
    return {"bytes": size, "agreement": quantization["agreement"], "scales": method}


def first_prompt(example: Example) -> list[int]:
    """The prompt part of a training sequence."""
    start = next(i for i, target in enumerate(example.targets) if target != IGNORE)
    return list(example.token_ids[: start + 1])


def scales_method(
    args: argparse.Namespace, trained: dict[str, Tensor] | None, checkpoint: Path
) -> str:
    """--scales, or what suits the run; ArtifactError where trained ones are asked for in vain."""
    if args.scales == "trained" and trained is None:
        raise ArtifactError(
            f"{checkpoint} was not trained through the packed formats and has no scales; train "
            "with --qat, or take --scales mse"
        )
    return args.scales or ("trained" if trained is not None else "mse")


# ------------------------------------------------------------------------------------- release


def release(args: argparse.Namespace, profile: Profile) -> None:
    """Mark the export as releasable where the ladder measured on this very export allows it.

    The mark is a file beside the weights, release.json: the ladder's verdict, and the reason where
    it was overruled. Making the export again removes it.
    """
    directory = profile.workspace / export_name(args)
    command = own_command()
    record = read_stage(directory, profile.command("quantize"))
    ladder = profile.workspace / "ladder"
    measure = f"{profile.command('evaluate')} --ladder"
    read_stage(ladder, measure)
    results = read_json(ladder / "results.json", f"run: {measure}")
    if results["export"] != digest(record["outputs"]):
        raise ArtifactError(f"{ladder} was measured on another export; run: {measure}")
    if not results["releasable"] and args.release_anyway is None:
        raise ArtifactError(
            f"not releasable: {results['verdict']}; improve the export, or record why it is "
            f"released all the same: {command} --release-anyway REASON"
        )
    mark = {
        "weights": record["outputs"]["weights.safetensors"]["sha256"],
        "releasable": results["releasable"],
        "verdict": results["verdict"],
        "ladder": digest(results),
        "overruled_because": None if results["releasable"] else args.release_anyway,
    }
    write_json(directory / "release.json", mark)
    print(f"  {directory} is marked as releasable: {results['verdict']}")


# ---------------------------------------------------------------------------------------- main


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    if args.release or args.release_anyway is not None:
        return release(args, profile)
    checkpoint, source, label_set = run_checkpoint(profile, args.run)
    labels = stage_digest(profile.workspace / "labels", profile.command("generate_teacher"))
    neutral = ("profile", "force", "out", "release", "release_anyway")
    stage = Stage(
        name="quantize",
        directory=profile.workspace / export_name(args),
        command=own_command(),
        arguments={k: v for k, v in vars(args).items() if k not in neutral}
        | {
            "scheme": make_scheme(profile, args.codec),
            "architecture": digest(profile.architecture),
        },
        inputs={"checkpoint": source, "labels": labels},
    )
    if stage.is_done(args.force):
        return

    def contract(scheme: dict, weights: str) -> dict:
        return make_contract(checkpoint, profile.architecture, label_set, scheme, source, weights)

    with stage.working_directory() as directory:
        stage.finish(results=write_export(args, profile, checkpoint, contract, directory))


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
