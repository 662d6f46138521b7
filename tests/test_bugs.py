"""Bug-repair problems: every kind runs, fails and passes as stated; same seed, same bytes."""

from __future__ import annotations

import dataclasses
import random

import pytest

import bugs


@pytest.fixture(scope="module")
def problems():
    return bugs.bug_repairs(seed=11, count=120)


def test_there_are_at_least_fifteen_kinds_and_each_is_drawn(problems):
    assert len(bugs.KINDS) >= 15
    assert {p.kind for p in problems} == set(bugs.KINDS)
    assert set(bugs.EXPLANATIONS) == set(bugs.KINDS)


def test_problems_differ_from_each_other(problems):
    assert len({(p.fixed, p.call) for p in problems}) == len(problems)
    assert all(p.broken != p.fixed for p in problems)


def test_broken_programs_fail_and_repaired_ones_pass(problems):
    """Run once more here, apart from the run that made them."""
    broken = bugs.run_programs([(p.broken, p.call) for p in problems], limit=0.1)
    fixed = bugs.run_programs([(p.fixed, p.call) for p in problems])
    assert broken == [p.observed for p in problems]
    assert fixed == [p.expected for p in problems]
    assert all(b != f for b, f in zip(broken, fixed, strict=True))
    assert "raises TimeoutError" in broken, "no program that never ends was drawn"


def test_the_same_seed_gives_the_same_problems(problems):
    assert bugs.bug_repairs(seed=11, count=120) == problems
    assert bugs.bug_repairs(seed=12, count=20) != problems[:20]


def test_a_template_that_is_wrong_is_found(problems):
    passes = dataclasses.replace(problems[0], observed=problems[0].expected)
    with pytest.raises(ValueError, match="the broken program passes"):
        bugs.verify([passes])
    wrong = dataclasses.replace(problems[0], expected="'something else'")
    with pytest.raises(ValueError, match="the repaired program gives"):
        bugs.verify([wrong])


def test_a_program_cannot_harm_the_run():
    """An exit, an endless loop and a syntax error are results like others."""
    programs = [
        ("def f():\n    raise SystemExit(3)", "f()"),
        ("def f():\n    while True: pass", "f()"),
        ("def f(:", "f()"),
        ("def f():\n    return 5", "f()"),
    ]
    expected = ["raises SystemExit", "raises TimeoutError", "raises SyntaxError", "5"]
    assert bugs.run_programs(programs, limit=0.1) == expected


def test_the_prompt_shows_the_program_and_the_answer_repairs_it(problems):
    for problem in problems:
        messages = bugs.to_messages(problem, random.Random(1))
        assert [m["role"] for m in messages] == ["user"]
        assert problem.broken in messages[0]["content"]
        assert problem.call in messages[0]["content"]
        assert problem.expected in messages[0]["content"]
        assert problem.fixed in bugs.answer(problem)
