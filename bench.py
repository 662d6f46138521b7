"""Check: how fast is a draft, and how far from what the memory allows?

Times each engine side by side in one run, beside transformers' `generate` and the straightforward
design (benchmarks/straightforward.py), over several context lengths, on an export of the profile
or, with --random, on random weights of the profile's true shape (right for speed: the time does not
depend on the values, as long as they aren't zeros). Contexts are fresh random ids, none repeated,
so that no cache helps.

prefill: the context's positions in an empty cache. draft: one more token, then a whole draft: as
many decode steps as tokens, from the first launch until the host has them. On a GPU both are taken
with events; all are medians. A step's bytes are every weight as the engine holds it and the live
KV; they are set against the device's measured copy bandwidth. The last line is JSON.

    python bench.py --random --out benchmarks/decode.json --plot benchmarks/decode.png
    python bench.py --profile tiny --contexts 64 512
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from artifacts import (
    ArtifactError,
    Profile,
    digest,
    load_profile,
    parse_profile_args,
    run_command,
    sha256_file,
    versions,
    write_json,
)
from contract import CONTRACT_FORMAT
from drafter import ENGINES, UNPROVEN, Drafter, resolve_device, resolve_engine
from engines import TorchEngine
from formats import EXPORT_FORMAT, PACKED_COLUMNS, Export, tensor_kind
from model import Config, empty_model, greedy

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

REFERENCES = ("transformers", "straightforward")  # what the engines are compared with


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--export", metavar="DIR", help="default: export/ of the profile")
    parser.add_argument(
        "--random", action="store_true", help="random weights of the profile's shape instead"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[*REFERENCES, *ENGINES, *UNPROVEN],
        metavar="E",
        help="default: all that are proven to run on the device",
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 512, 2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=16, help="a draft (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to keep the result in")
    parser.add_argument("--plot", type=Path, help="PNG file: ms a token against the floor")
    return parse_profile_args(parser, argv)


# ------------------------------------------------------------------------------- random export


def random_tensors(config: Config, scheme: dict, device: str) -> Iterator[tuple[dict, dict]]:
    """(entry, stored tensors) by name: random codes, scales as a trained model's have them."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in empty_model(config).named_parameters():
        chosen = scheme[tensor_kind(name)]
        codec, size = chosen["codec"], chosen["group_size"]
        shape = list(parameter.shape)
        entry = {"codec": codec, "shape": shape, "group_size": size, "source_sha256": None}
        if codec == "bf16":
            stored = {name: torch.ones(shape, dtype=torch.bfloat16)}
        else:
            # Values of about 1 / sqrt(columns): activations neither die nor explode.
            step = {"nf4": 2.0, "int6": 1 / 18}[codec] / shape[1] ** 0.5
            packed = [shape[0], PACKED_COLUMNS[codec](shape[1])]
            codes = torch.randint(256, packed, generator=generator, device=device)
            spread = torch.rand(shape[0], shape[1] // size, generator=generator, device=device)
            scales = (step * (0.5 + spread)).bfloat16()
            stored = {
                f"{name}.{codec}": codes.to(torch.uint8).cpu(),
                f"{name}.scales": scales.cpu(),
            }
        yield {name: entry}, stored


def write_random_export(profile: Profile, directory: Path, device: str) -> Path:
    """An export of the profile's shape with random weights; the drafter loads it as any other."""
    dimensions = profile.architecture["dimensions"]
    raw = dimensions | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config = Config.from_dict(raw)
    plain = {"codec": "bf16", "group_size": None}
    scheme = profile.architecture["quantization"] | {"norm": plain}
    entries, stored = {}, {}
    for entry, tensors in random_tensors(config, scheme, device):
        entries |= entry
        stored |= tensors
    save_file(stored, directory / "weights.safetensors")
    write_json(directory / "config.json", raw)
    fields = {"format": CONTRACT_FORMAT, "eos_token_ids": [], "note": "random weights"}
    write_json(directory / "contract.json", {"fingerprint": digest(fields), "fields": fields})
    quantization = {
        "format": EXPORT_FORMAT,
        "scheme": scheme,
        "draft_length": profile.architecture["draft_length"],
        "weights": {
            "bytes": (directory / "weights.safetensors").stat().st_size,
            "sha256": sha256_file(directory / "weights.safetensors"),
        },
        "tensors": entries,
    }
    write_json(directory / "quantization.json", quantization)
    prompt = list(range(100, 132))
    model = Export(directory).load(torch.float32, device)
    answer = greedy(model, prompt, quantization["draft_length"], eos=())
    quantization["known_answer"] = {
        "prompt_token_ids": prompt,
        "draft_token_ids": answer.token_ids,
        "margins": answer.margins,
    }
    write_json(directory / "quantization.json", quantization)
    return directory


# -------------------------------------------------------------------------------------- timing


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large device copy, read and written ones counted; median of 20."""
    size = (2 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = [timed(device, lambda: target.copy_(source)) for _ in range(22)][2:]
    return 2 * size / statistics.median(seconds)


def timed(device: torch.device, body: Callable[[], object]) -> float:
    """Seconds of `body`, the device idle before and after; by events on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        body()
        return time.perf_counter() - began
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    body()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


@torch.inference_mode()
def bench_engine(engine: TorchEngine, vocab: int, context: int, tokens: int, repeats: int) -> dict:
    """Medians over fresh random contexts, in ms; see the module's docstring."""
    rng = np.random.default_rng(context)
    prefills, drafts = [], []

    def prefill(ids: np.ndarray) -> None:
        for start in range(0, context, engine.prefill_chunk):
            end = min(start + engine.prefill_chunk, context)
            engine.extend(ids[start:end], start, last=end == context)

    def draft(ids: np.ndarray) -> None:
        engine.extend(ids, context, last=True)
        for _ in engine.continuation(context + 1, tokens):
            pass

    for _ in range(repeats + 2):
        engine.begin(context + 1 + tokens)
        ids = rng.integers(0, vocab, context + 1, dtype=np.int32)
        prefills.append(timed(engine.device, lambda ids=ids: prefill(ids[:-1])))
        drafts.append(timed(engine.device, lambda ids=ids: draft(ids[-1:])))
    token = statistics.median(drafts[2:]) * 1e3 / tokens
    read = engine.weight_bytes + 2 * context * engine.kv.keys[:, :, :1].nbytes
    return {
        "prefill_ms": statistics.median(prefills[2:]) * 1e3,
        "draft_ms": token * tokens,
        "ms_per_token": token,
        "bytes_per_step": read,
        "gb_per_s": read / token / 1e6,
    }


@torch.inference_mode()
def bench_transformers(model: Qwen3ForCausalLM, context: int, tokens: int, repeats: int) -> dict:
    """`generate` as it comes, default cache; its prefill is timed as a forward pass."""
    device, vocab = model.device, model.config.vocab_size
    call = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    whole, prefills = [], []
    for _ in range(repeats + 1):
        ids = torch.randint(vocab, (1, context), device=device)
        whole.append(timed(device, lambda ids=ids: model.generate(ids, **call)))
        prefills.append(timed(device, lambda ids=ids: model(ids, logits_to_keep=1)))
    prefill = statistics.median(prefills[1:]) * 1e3
    # generate's first token comes out of its prefill; the others take a step each.
    draft = (statistics.median(whole[1:]) * 1e3 - prefill) * tokens / max(tokens - 1, 1)
    return {"prefill_ms": prefill, "draft_ms": draft, "ms_per_token": draft / tokens}


def transformers_model(export: Path, device: torch.device) -> Qwen3ForCausalLM:
    """The export's weights in the reference library, in the dtype that engines get here."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**json.loads((export / "config.json").read_text())))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = Export(export).load(dtype, str(device)).state_dict()
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    model.load_state_dict(weights | head, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model.requires_grad_(False)


# ------------------------------------------------------------------------------------ the whole


def bench_one(name: str, args: argparse.Namespace, export: Path) -> Iterator[dict]:
    """One engine's or reference's rows, context by context."""
    device = resolve_device(args.device)
    few = max(3, args.repeats // 5)
    if name == "transformers":
        model = transformers_model(export, device)
        limit = model.config.max_position_embeddings
        measure = lambda n: bench_transformers(model, n, args.tokens, few)  # noqa: E731
    else:
        if name == "straightforward":
            from benchmarks.straightforward import CACHE, StraightforwardEngine

            model = Export(export).load(torch.bfloat16, str(device))
            with torch.inference_mode():
                engine = StraightforwardEngine(model, args.tokens)
            limit, vocab = CACHE, model.config.vocab_size
        else:
            drafter = Drafter(export, str(device), engine=name, cache_bytes=0)
            engine, limit, vocab = drafter.engine, drafter.context_limit, drafter.config.vocab_size
        repeats = few if name == "torch" else args.repeats
        measure = lambda n: bench_engine(engine, vocab, n, args.tokens, repeats)  # noqa: E731
    for context in args.contexts:
        if context + 1 + args.tokens <= limit:
            yield {"engine": name, "context": context} | measure(context)


def bench_all(args: argparse.Namespace, export: Path) -> list[dict]:
    device = resolve_device(args.device)
    bandwidth = copy_bandwidth(device)
    rows = [{"copy_bandwidth": bandwidth}]
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s on {device_name(device)}")
    print(
        f"{'engine':16}{'context':>8}{'prefill ms':>12}{'draft ms':>10}{'ms/token':>10}{'GB/s':>7}"
    )
    for name in args.engines or runnable(device):
        for row in bench_one(name, args, export):
            line = f"{name:16}{row['context']:8}{row['prefill_ms']:12.2f}{row['draft_ms']:10.2f}"
            line += f"{row['ms_per_token']:10.3f}"
            if "gb_per_s" in row:
                row["of_bandwidth"] = row["gb_per_s"] * 1e9 / bandwidth
                line += f"{row['gb_per_s']:7.0f}  {row['of_bandwidth']:.0%}"
            print(line, flush=True)
            rows.append(row)
    return rows


def runnable(device: torch.device) -> list[str]:
    """The references and engines that run on the device."""
    names = list(REFERENCES if device.type == "cuda" else REFERENCES[:1])
    for engine in ENGINES:
        try:
            names.append(resolve_engine(engine, device))
        except ArtifactError as error:
            print(f"left out: {error}")
    return names


def plot(rows: list[dict], packed_bytes: int, path: Path) -> None:
    """ms a token over the context, both logarithmic, above the floor: the packed weights and the
    live KV at the copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bandwidth, *rows = (rows[0]["copy_bandwidth"], *rows[1:])
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == name]
        contexts, times = [r["context"] for r in own], [r["ms_per_token"] for r in own]
        axes.plot(contexts, times, marker="o", label=name)
    measured = {r["context"]: r for r in rows if "bytes_per_step" in r}
    contexts = sorted(measured)
    if contexts:
        first, last = measured[contexts[0]], measured[contexts[-1]]
        span = max(last["context"] - first["context"], 1)
        per_position = (last["bytes_per_step"] - first["bytes_per_step"]) / span
        floor = [(packed_bytes + per_position * n) / bandwidth * 1e3 for n in contexts]
        axes.plot(contexts, floor, "k--", label="floor of the packed weights")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a token")
    axes.set_xticks(contexts, [str(n) for n in contexts])
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def main(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile)
    with tempfile.TemporaryDirectory() as temporary:
        export = Path(args.export) if args.export else profile.workspace / "export"
        if args.random:
            device = str(resolve_device(args.device))
            export = write_random_export(profile, Path(temporary), device)
        rows = bench_all(args, export)
        if args.plot:
            plot(rows, (export / "weights.safetensors").stat().st_size, args.plot)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": device_name(resolve_device(args.device)),
        "tokens": args.tokens,
        "weights": "random" if args.random else str(args.export or "export"),
        "results": rows,
        "versions": versions(),
    }
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_command(main, parse_args))
