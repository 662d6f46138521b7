"""Near-duplicates, contamination, and the gate's account of both."""

from __future__ import annotations

import argparse
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import ArtifactError
from dedup import (
    NGRAM_WORDS,
    THRESHOLD,
    Exclusions,
    NearDuplicates,
    exclusion_hashes,
    read_texts,
    signature,
    windows,
    word_list,
)
from gate import Gate

WORDS = [f"word{i}" for i in range(400)]


def similarity(a: list[str], b: list[str]) -> float:
    """The true Jaccard similarity of the shingle sets that signatures estimate."""
    x, y = set(windows(a, 3)), set(windows(b, 3))
    return len(x & y) / len(x | y)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), changes=st.integers(0, 30))
def test_the_estimate_follows_the_true_similarity(seed, changes):
    """A pair clearly above the threshold is found, one clearly below it is not."""
    rng = random.Random(seed)
    text = rng.choices(WORDS, k=120)
    other = list(text)
    for _ in range(changes):
        other[rng.randrange(len(other))] = "changed"
    near = NearDuplicates()
    near.add(signature(text), "first")
    found = near.find(signature(other))
    true = similarity(text, other)
    # 64 permutations: a standard error of at most 0.0625; 4 of them below, and the bands' own loss.
    if true == 1.0:
        assert found == "first"
    if true < THRESHOLD - 0.25:
        assert found is None


def test_case_spacing_and_punctuation_do_not_hide_a_repeat():
    near = NearDuplicates()
    text = "How many apples does Ana have after she buys seven more at the market?"
    near.add(signature(word_list(text)), "a")
    assert near.find(signature(word_list(text.upper().replace(" ", "  ") + "!!"))) == "a"
    assert near.find(signature(word_list("What is the capital of a far away country?"))) is None


def write(tmp_path, name, rows):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.parquet"])
def test_thirteen_words_in_a_row_are_contamination_twelve_are_not(tmp_path, name):
    shared = WORDS[:NGRAM_WORDS]
    evaluation = " ".join(["alpha", *shared, "omega"])
    path = write(tmp_path, name, [{"question": "unrelated"}, {"question": evaluation}])
    exclusions = Exclusions([path], ["question"])

    def match(words):
        return exclusions.match(words, signature(words))

    before, after = WORDS[100:130], WORDS[200:230]
    found = match([*before, *shared, *after])
    assert found.reason == "ngram" and found.found == f"{name}:1"
    assert match([*before, *shared[:-1], *after]) is None
    assert match([*before, *shared[1:], *after]) is None


def test_a_short_evaluation_prompt_is_found_as_a_near_duplicate(tmp_path):
    path = write(tmp_path, "e.jsonl", [{"prompt": "Name three rivers of Europe, please"}])
    exclusions = Exclusions([path], ["prompt"])
    words = word_list("name three rivers of europe please")
    assert exclusions.match(words, signature(words)).reason == "near_duplicate"


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("e.jsonl", [{"text": "x"}], "row 0: no text column 'prompt'"),
        ("e.jsonl", [{"prompt": "x"}, {"prompt": 3}], "row 1: no text column"),
        ("e.csv", [], "takes .jsonl, .json or .parquet"),
        ("e.json", 5, "can't be read"),
    ],
)
def test_an_evaluation_file_that_is_not_one_is_named(tmp_path, name, rows, message):
    path = write(tmp_path, name, rows)
    with pytest.raises(ArtifactError, match=message):
        list(read_texts(path, ["prompt"]))


def test_scripts_without_spaces_are_compared_by_character(tmp_path):
    question = "請問這個城市裡總共有多少座橋樑和隧道呢"
    path = write(tmp_path, "e.jsonl", [{"prompt": question}])
    exclusions = Exclusions([path], ["prompt"])
    words = word_list("你好。" + question[:15] + "？謝謝你的回答")
    assert exclusions.match(words, signature(words)).reason == "ngram"
    assert word_list("ﬁne Ａ１") == ["fine", "a1"], "compatibility forms are the same letters"


def user(text):
    return [{"role": "user", "content": text}]


def test_the_gate_accounts_for_each_reason(tmp_path):
    long = " ".join(WORDS[:60])
    path = write(tmp_path, "e.jsonl", [{"prompt": " ".join(WORDS[300:330])}])
    gate = Gate(lambda m: len(m[0]["content"].split()), 100, Exclusions([path], ["prompt"]))
    rows = [
        ("a", long),
        ("b", long.upper()),  # equal after normalisation
        ("c", long.replace("word3 ", "other ")),  # nearly equal
        ("d", " ".join(WORDS[100:210])),  # too long
        ("e", "hello " + " ".join(WORDS[300:330])),  # contaminated
        ("f", "something else altogether"),
    ]
    with gate.part("all"):
        passed = [name for name, text in gate.see(rows) if gate.admit(user(text), name)]
    assert passed == ["a", "f"]
    reasons = {"duplicate": 1, "near_duplicate": 1, "too_long": 1, "contaminated_ngram": 1}
    assert gate.accounts["all"] == {"in": 6, "kept": 2, "dropped": reasons, "failed": 0}
    gate.write_report(tmp_path)
    report = [json.loads(line) for line in (tmp_path / "excluded.jsonl").read_text().splitlines()]
    assert report == [{"id": "e", "reason": "ngram", "repeats": "e.jsonl:0"}]
    within = [*user("Hello there"), {"role": "assistant", "content": " ".join(WORDS[300:330])}]
    with gate.part("turns"):
        gate.total += 1
        assert not gate.admit([*within, *user("go on")], "g"), "an earlier turn is looked at too"
    with gate.part("augmented"):
        near = [n for n, text in gate.see([rows[2]]) if gate.admit(user(text), n, near=False)]
    assert near == ["c"], "augmentations repeat their row by design"


@pytest.mark.parametrize("text", ["", "\n", json.dumps({"question": " ?! "}) + "\n"])
def test_an_exclusion_file_without_text_is_an_error(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(ArtifactError, match="guard against nothing"):
        Exclusions([path], ["question"])


SENTENCE = "a farmer has seventeen sheep and buys nine more every week for three whole months"


@pytest.mark.parametrize(
    ("stored", "met"),
    [
        (SENTENCE, SENTENCE.replace("seventeen", "seven\u200bteen")),
        (SENTENCE, SENTENCE.replace("whole", "who\u00adle")),
        (SENTENCE, SENTENCE.replace(" ", "\u200b")),
        (SENTENCE.replace(" ", "\u200b"), SENTENCE),
        (SENTENCE.replace("farmer", "far\u00admer"), SENTENCE.upper()),
    ],
)
def test_characters_that_are_not_seen_hide_nothing(tmp_path, stored, met):
    path = tmp_path / "evaluation.jsonl"
    path.write_text(json.dumps({"prompt": stored}) + "\n")
    gate = Gate(lambda m: 1, 100, Exclusions([path], ["prompt"]))
    with gate.part("x"):
        rows = list(gate.see([[{"role": "user", "content": f"Well: {met} indeed"}]]))
        assert not gate.admit(rows[0], "x/0")
    assert gate.accounts["x"]["dropped"] == {"contaminated_ngram": 1}


def test_prompts_that_differ_in_a_symbol_are_different_prompts():
    texts = ["What is 3 + 4?", "What is 3 - 4?", "What is 3 * 4?", "???", "🙂🙂", "+ - * /", "— —"]
    gate = Gate(lambda m: 1, 100)
    with gate.part("x"):
        for number, text in enumerate(texts):
            (row,) = gate.see([[{"role": "user", "content": text}]])
            assert gate.admit(row, f"x/{number}"), text


def test_two_exclusion_files_of_one_name_both_count(tmp_path):
    paths = [tmp_path / name / "e.jsonl" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"prompt": f"text of {path.parent.name}"}) + "\n")
    args = argparse.Namespace(exclude=paths, exclude_columns=["prompt"])
    before = exclusion_hashes(args)
    paths[0].write_text(json.dumps({"prompt": "another text"}) + "\n")
    assert exclusion_hashes(args) != before
