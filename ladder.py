"""The acceptance ladder: what distillation gains and what each step of the export costs.

Every rung drafts along the same held-out labels, through a server of its own, so differences are
those of the drafts. The last two serve the same export: once by the plain torch engine, once as a
user gets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from acceptance import Counts, accepted_length, accepted_ratio
from client import serve
from contract import read_contract
from rounds import measure


class Rung(NamedTuple):
    """export: a directory of the workspace; made_by: quantize.py's flags; flags: the server's."""

    name: str
    title: str
    export: str
    made_by: str
    flags: tuple[str, ...] = ("--engine", "torch")


_RUNGS = (
    Rung("base", "base, bf16", "export-base-bf16", " --run base --codec bf16"),
    Rung("distilled", "distilled, bf16", "export-distilled-bf16", " --codec bf16"),
    Rung("body", "  NF4 body", "export-distilled-body", " --codec body"),
    Rung("packed", "  + INT6 embedding", "export", ""),
    Rung("served", "  as served", "export", "", ()),
)
RUNGS = {rung.name: rung for rung in _RUNGS}  # from the bottom up


def climb(directories: dict[str, Path], labels: list[dict], max_loss: float) -> dict:
    """Measure every rung; returns its figures, and whether the served one keeps enough of the
    distilled one's accepted length."""
    figures, counts = {}, {}
    for rung in RUNGS.values():
        directory = directories[rung.name]
        contract = read_contract(directory)["fingerprint"]
        with serve(directory, *rung.flags) as client:
            found = measure(client, labels, contract, None, rung.name)
            info = client.get("/info")
        table = np.array(found["per_prompt"], dtype=float)
        counts[rung.name] = Counts(table[:, 0], table[:, 1])
        figures[rung.name] = found | {
            "accepted": accepted_length(counts[rung.name])._asdict(),
            "engine": info["engine"],
            "device": info["device"],
            "quantization": info["quantization"]["summary"],
        }
    for name, found in figures.items():
        ratio = accepted_ratio(counts[name], counts["distilled"])
        found["of_distilled"] = ratio._asdict()
    kept = figures["served"]["of_distilled"]
    verdict = (
        f"the export keeps {kept['value']:.1%} [{kept['low']:.1%}, {kept['high']:.1%}] of the bf16 "
        f"draft's accepted length; {1 - max_loss:.0%} are asked for"
    )
    return {
        "prompts": len(labels),
        "rungs": figures,
        "max_loss": max_loss,
        "releasable": kept["value"] >= 1 - max_loss,
        "verdict": verdict,
    }


def print_ladder(results: dict, split: str) -> None:
    print(f"\nThe acceptance ladder ({split}, {results['prompts']} prompts; 95% intervals)")
    print(f"{'':22}{'accepted a round':>24}{'of distilled bf16':>28}   at position 1, 2, 4, 8, 16")
    for rung in RUNGS.values():
        found = results["rungs"][rung.name]
        a, r = found["accepted"], found["of_distilled"]
        length = f"{a['value']:.2f} [{a['low']:.2f}, {a['high']:.2f}]"
        ratio = f"{r['value']:.1%} [{r['low']:.1%}, {r['high']:.1%}]"
        at = [found["acceptance_at"][i - 1] for i in (1, 2, 4, 8, 16) if i <= draft_length(found)]
        shares = "  ".join("-" if share is None else f"{share:.0%}" for share in at)
        print(f"{rung.title:22}{length:>24}{ratio:>28}   {shares}")
    print(("releasable: " if results["releasable"] else "NOT releasable: ") + results["verdict"])


def draft_length(figures: dict) -> int:
    return len(figures["acceptance_at"])
