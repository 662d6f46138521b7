"""The embedded pair: its data, its size, and how well its teacher answers."""

from __future__ import annotations

import hashlib
import json
import random

import pyarrow.parquet as pq
import pytest

import bugs
from artifacts import ROOT, check_file
from model import Config
from records import ADAPTERS, is_usable
from tiny import check_teacher, make_data
from tiny.text import SOURCES, data_tasks, fresh_task, general_document, teacher_document

TINY = ROOT / "tiny"
REAL_COLUMNS = {
    s["name"]: s["columns"]
    for s in json.loads((ROOT / "data_manifest.json").read_text())["sources"]
}


def test_making_the_data_again_gives_the_same_bytes(tmp_path):
    make_data.main(make_data.parse_args(["--out", str(tmp_path)]))
    kept = json.loads((TINY / "data_manifest.json").read_text())
    assert json.loads((tmp_path / "data_manifest.json").read_text()) == kept
    for source in kept["sources"]:
        check_file(TINY / source["file"], source, "")


def test_the_schemas_are_those_of_the_real_data_sets():
    for source in json.loads((TINY / "data_manifest.json").read_text())["sources"]:
        table = pq.read_table(TINY / source["file"])
        assert sorted(table.column_names) == sorted(REAL_COLUMNS[source["name"]])
        rows = [ADAPTERS[source["schema"]](row) for row in table.to_pylist()]
        assert all(is_usable(row.messages) and row.reference for row in rows)
        prompts = {row.messages[0]["content"] for row in rows}
        assert len(prompts) == len(rows) == source["rows"]


def test_pretraining_text_shares_no_prompt_with_the_data():
    prompts = {t.messages[0]["content"] for tasks in data_tasks(0).values() for t in tasks}
    rng, problems = random.Random(5), bugs.bug_repairs(2, 200)
    drawn = [fresh_task(rng, problems, prompts) for _ in range(3000)]
    assert not prompts & {t.messages[0]["content"] for t in drawn}
    assert {t.source for t in drawn} == set(SOURCES)


def test_the_general_corpus_never_speaks_in_the_teachers_voice():
    problems = bugs.bug_repairs(2, 60)
    for seed in range(300):
        spoken = general_document(random.Random(seed), problems)
        task = fresh_task(random.Random(seed), problems, ())
        assert spoken[0] == task.messages
        assert spoken[1] in task.others and task.answer not in task.others


def test_text_is_seeded_and_varied():
    problems = bugs.bug_repairs(2, 60)

    def draw(seed):
        rng = random.Random(seed)
        return [teacher_document(rng, problems) for _ in range(400)]

    first = draw(1)
    assert first == draw(1)
    prompts = [messages[-1]["content"] for messages, _ in first]
    assert len(set(prompts)) > 340
    languages = {
        w
        for p in prompts
        for w in ("Ordena", "Classe", "Sortiere", "Ordina", "Coloque")
        if p.startswith(w)
    }
    assert len(languages) == 5


def test_the_pair_is_small_and_what_the_architecture_says():
    size = sum(p.stat().st_size for p in TINY.rglob("*") if p.is_file())
    assert size < 20_000_000
    architecture = json.loads((TINY / "architecture.json").read_text())
    for which in ("base", "teacher"):
        for file in architecture[which]["files"]:
            check_file(TINY / which / file["path"], file, "")
    config = vars(Config.from_file(TINY / "base/config.json"))
    assert config == {k: architecture["dimensions"][k] for k in config}
    tokenizers = {
        hashlib.sha256((TINY / w / "tokenizer.json").read_bytes()).digest()
        for w in ("base", "teacher")
    }
    assert len(tokenizers) == 1


def test_the_teacher_answers_most_unseen_prompts_and_the_base_fewer():
    """A small sample of what benchmarks/tiny_teacher.json keeps for all rows."""
    found = check_teacher.check(["teacher", "base"], rows=20)
    assert found["teacher"]["all"] >= 0.9
    assert min(found["teacher"].values()) >= 0.8
    assert found["base"]["all"] <= found["teacher"]["all"] - 0.05


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("#### {n}", True), ("so it is\n#### {n}", True), ("#### 1{n}", False), ("no idea", False)],
)
def test_the_checker_can_say_no(text, verdict):
    task = data_tasks(0)["gsm8k"][0]
    assert check_teacher.judge([task], [text.format(n=task.short)]) == [verdict]


def test_code_is_judged_by_running_it():
    task = data_tasks(0)["personas_code"][0]
    assert check_teacher.judge([task, task], [task.answer, "def f(): return 1"]) == [True, False]
    assert all(check_teacher.judge([task] * len(task.others), list(task.others)))
