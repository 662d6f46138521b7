"""Check: how fast is a draft, and how far from what the memory allows?

Times whole drafts of each engine over several context lengths, beside transformers' `generate`, on
an export of the profile or, with --random, on random weights of the profile's true shape (right for
speed: the time does not depend on the values, as long as they aren't zeros). Contexts are fresh
random ids, none repeated, so that no cache helps. Prints medians, the bytes that a token has to
read and the share of the device's measured copy bandwidth; the last line is JSON.

    python bench.py --random --out benchmarks/decode.json
    python bench.py --profile tiny --contexts 64 512
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from artifacts import (
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
from drafter import Drafter, resolve_device
from formats import EXPORT_FORMAT, PACKED_COLUMNS, Export, tensor_kind
from model import Config, KVCache, empty_model, greedy


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--export", metavar="DIR", help="default: export/ of the profile")
    parser.add_argument(
        "--random", action="store_true", help="random weights of the profile's shape instead"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--engines", nargs="+", choices=["torch", "graph"], metavar="E")
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 512, 2048, 8192])
    parser.add_argument("--tokens", type=int, default=16, help="a draft (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument(
        "--transformers", action="store_true", help="time transformers' generate too (bf16)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to keep the result in")
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
    """Seconds of `body`, the device waited for before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    body()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bytes_per_token(drafter: Drafter, context: int) -> int:
    """What a decode step must read: every weight once in the engine's dtype, and the live KV."""
    weights = sum(p.nbytes for p in drafter.engine.model.parameters())
    kv: KVCache = drafter.kv
    return weights + 2 * context * kv.keys[:, :, :1].nbytes


def bench_engine(drafter: Drafter, context: int, tokens: int, repeats: int) -> dict:
    """Medians over fresh random contexts: prefill, decode, the whole draft; in ms."""
    rng = random.Random(context)
    drafts = []
    for _ in range(repeats + 2):
        ids = [rng.randrange(drafter.config.vocab_size) for _ in range(context)]
        drafts.append(drafter.draft(ids, tokens))
    drafts = drafts[2:]
    prefill = statistics.median(d.prefill_seconds for d in drafts) * 1e3
    decode = statistics.median(d.decode_seconds for d in drafts) * 1e3
    # The first token comes out of the prefill; `tokens` - 1 steps follow it.
    step = decode / max(tokens - 1, 1)
    read = bytes_per_token(drafter, context)
    return {
        "prefill_ms": prefill,
        "decode_ms": decode,
        "ms_per_step": step,
        "bytes_per_step": read,
        "gb_per_s": read / step / 1e6,
    }


def bench_transformers(drafter: Drafter, context: int, tokens: int, repeats: int) -> dict:
    """`generate` of the same weights in the engine's dtype, default cache; the whole call."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    raw = json.loads((drafter.export.directory / "config.json").read_text())
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**raw))
    weights = drafter.engine.model.state_dict()
    model.load_state_dict(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True
    )
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(drafter.device)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    seconds = []
    for _ in range(repeats + 1):
        ids = torch.randint(drafter.config.vocab_size, (1, context), device=drafter.device)
        call = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        seconds.append(timed(drafter.device, lambda i=ids, c=call: model.generate(i, **c)))
    return {"draft_ms": statistics.median(seconds[1:]) * 1e3}


def bench_all(args: argparse.Namespace, export: Path) -> list[dict]:
    device = resolve_device(args.device)
    engines = args.engines or (["torch", "graph"] if device.type == "cuda" else ["torch"])
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s on {device_name(device)}")
    print(
        f"{'engine':14}{'context':>8}{'prefill ms':>12}{'decode ms':>11}{'ms/step':>9}{'GB/s':>8}"
    )
    rows = []
    for engine in engines:
        drafter = Drafter(export, str(device), engine=engine, cache_bytes=0)
        for context in args.contexts:
            if context + args.tokens > drafter.context_limit:
                continue
            row = {"engine": engine, "context": context}
            row |= bench_engine(drafter, context, args.tokens, args.repeats)
            row["of_bandwidth"] = row["gb_per_s"] * 1e9 / bandwidth
            rows.append(row)
            print(
                f"{engine:14}{context:8}{row['prefill_ms']:12.2f}{row['decode_ms']:11.2f}"
                f"{row['ms_per_step']:9.3f}{row['gb_per_s']:8.0f}  {row['of_bandwidth']:.0%}"
            )
            if args.transformers and engine == "torch":
                found = bench_transformers(drafter, context, args.tokens, max(3, args.repeats // 5))
                rows.append({"engine": "transformers", "context": context, **found})
                print(f"{'transformers':14}{context:8}{'':12}{found['draft_ms']:11.2f} whole call")
        del drafter
    return [{"copy_bandwidth": bandwidth}, *rows]


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
