"""How many prompts of tiny/data the teacher, and the base, answer correctly.

Reads tiny/teacher, tiny/base; none of these prompts was seen in pre-training. Word problems count
by their final number, code and bug repair by running the produced program on its example in a
subprocess, everything else by equality with the known answer in any of its wordings. Prints a table
and a JSON line; the kept result is benchmarks/tiny_teacher.json.

    python -m tiny.check_teacher --out benchmarks/tiny_teacher.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from artifacts import versions, write_json
from bugs import run_programs
from labelling import TransformersEngine
from prompts import load_tokenizer, prompt_token_ids
from tiny.text import Task, data_tasks

HERE = Path(__file__).resolve().parent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["teacher", "base"])
    parser.add_argument(
        "--rows", type=int, default=120, help="of each data set, the first ones (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to keep the result in")
    return parser.parse_args(argv)


def answers(directory: Path, tasks: list[Task]) -> list[str]:
    """Greedy answers of a model to the tasks' prompts."""
    tokenizer = load_tokenizer(directory)
    eos = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    engine = TransformersEngine(directory, eos, max_tokens=192, top_k=0, batch_size=64)
    prompts = [prompt_token_ids(tokenizer, task.messages, thinking=False) for task in tasks]
    labels = engine.label(prompts)
    return [tokenizer.decode(label.output_token_ids, skip_special_tokens=True) for label in labels]


def program(text: str) -> str:
    """The fenced block of an answer, or all of it from the first `def` on."""
    fenced = re.search(r"```python\n(.*?)\n?```", text, re.DOTALL)
    bare = re.search(r"(def .*)", text, re.DOTALL)
    return fenced[1] if fenced else bare[1] if bare else ""


def judge(tasks: list[Task], texts: list[str]) -> list[bool]:
    """Whether each answer is correct."""
    python = [i for i, task in enumerate(tasks) if task.kind == "python"]
    results = run_programs([(program(texts[i]), tasks[i].check[0]) for i in python])
    ran = dict(zip(python, results, strict=True))
    verdicts = []
    for i, (task, text) in enumerate(zip(tasks, texts, strict=True)):
        if task.kind == "python":
            verdicts.append(ran[i] == task.check[1])
        elif task.kind == "number":
            found = re.findall(r"#### (-?\d+)|(?:answer is|think it is) (-?\d+)", text)
            stated = [a or b for a, b in found] or re.findall(r"\*\*(-?\d+)|^(-?\d+)", text)
            last = stated[-1] if stated else None
            last = next(filter(None, last), None) if isinstance(last, tuple) else last
            verdicts.append(last == str(task.check[0]))
        else:
            known = (task.answer, *task.others)
            verdicts.append(text.strip() in {answer.strip() for answer in known})
    return verdicts


def check(models: list[str], rows: int) -> dict[str, dict[str, float]]:
    """Share of correct answers by model and data set, bug repair apart from no_robots."""
    tasks = []
    for source, group in data_tasks(0).items():
        for task in group[:rows]:
            repair = task.columns.get("category") == "Coding"
            tasks.append(("bug_repair" if repair else source, task))
    found: dict[str, dict[str, float]] = {}
    for model in models:
        texts = answers(HERE / model, [task for _, task in tasks])
        verdicts = judge([task for _, task in tasks], texts)
        groups: dict[str, list[bool]] = {}
        for (name, _), verdict in zip(tasks, verdicts, strict=True):
            groups.setdefault(name, []).append(verdict)
        found[model] = {name: sum(group) / len(group) for name, group in groups.items()}
        found[model]["all"] = sum(verdicts) / len(verdicts)
    return found


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    found = check(args.models, args.rows)
    names = list(next(iter(found.values())))
    print(f"{'share answered correctly':34}" + "".join(f"{m:>10}" for m in found))
    for name in names:
        print(f"{name:34}" + "".join(f"{found[m][name]:>10.1%}" for m in found))
    result = {
        "command": f"python -m tiny.check_teacher --rows {args.rows}",
        "correct": found,
        "versions": versions(),
    }
    if args.out:
        write_json(args.out, result)
    print(json.dumps(found))


if __name__ == "__main__":
    main(parse_args())
