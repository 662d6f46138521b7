"""Seeded text of the tiny pair: tasks whose answers are known and can be checked.

Six kinds of task, drawn from parts that combine into far more prompts than any model of this size
could remember: word problems, short instructions, the same in five more languages, persona-style
code tasks, instructions with constraints, bug repair (bugs.py). Each has an answer in the teacher's
voice and others in the voices of a general corpus: the same content, worded and laid out otherwise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import bugs
from augment import FOLLOW_UPS, FORMATS, augment, split_reference
from tiny.words import CATEGORIES, FACTS, LANGUAGES, PEOPLE, THINGS


@dataclass(frozen=True)
class Task:
    """source: the data set whose schema fits; kind: of checker, "number" | "python" | "exact".

    answer: in the teacher's voice; others: in other voices; short: the bare result.
    check: what the checker needs: a number, (call, expected repr), or nothing (exact).
    """

    source: str
    kind: str
    messages: list[dict]
    answer: str
    others: tuple[str, ...]
    short: str
    check: tuple = ()
    columns: dict = field(default_factory=dict)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def voices(steps: list[str], result: str) -> tuple[str, ...]:
    """Four ways in which a general corpus gives the same content; never the teacher's."""
    joined = " ".join(steps)
    listed = "\n".join(f"- {step}" for step in steps)
    return (
        f"Sure! {joined} So the answer is {result}.",
        f"Let us see.\n{listed}\nResult: **{result}**",
        f"I think it is {result}. Here is why: {joined}",
        f"{result}\n\n(Explanation: {joined})",
    )


# ------------------------------------------------------------------------------- word problems

GAINS = ("buys {n} more", "finds {n} more", "gets {n} from a friend", "wins {n} in a game")
LOSSES = ("gives away {n}", "loses {n}", "sells {n}", "uses {n}")
OPENINGS = (
    "{who} has {a} {what}.",
    "{who} starts with {a} {what}.",
    "On Monday {who} has {a} {what}.",
)
QUESTIONS = (
    "How many {what} does {who} have now?",
    "How many {what} are there in the end?",
    "What is the number of {what} that {who} has left?",
)


def word_problem(rng: random.Random) -> Task:
    who, what, total = rng.choice(PEOPLE), rng.choice(THINGS), rng.randint(4, 40)
    text = [rng.choice(OPENINGS).format(who=who, what=what, a=total)]
    steps = [f"At first {who} has {total} {what}."]
    for _ in range(rng.randint(1, 3)):
        shape = rng.choice(("gain", "gain", "loss", "loss", "double", "packs"))
        if shape == "loss" and total > 3:
            n = rng.randint(1, min(total - 1, 20))
            phrase, term, total, old = rng.choice(LOSSES).format(n=n), f"- {n}", total - n, total
        elif shape == "double" and total <= 40:
            phrase, term, total, old = "doubles that number", "* 2", total * 2, total
        elif shape == "packs" and total <= 60:
            k, n = rng.randint(2, 5), rng.randint(2, 6)
            steps.append(f"{k} packs of {n} are {k} * {n} = {k * n}.")
            phrase = f"gets {k} packs of {n}"
            term, total, old = f"+ {k * n}", total + k * n, total
        else:
            n = rng.randint(2, 25)
            phrase, term, total, old = rng.choice(GAINS).format(n=n), f"+ {n}", total + n, total
        text.append(f"{rng.choice(('Then', 'Later', 'After that'))} {who} {phrase}.")
        steps.append(f"Then {old} {term} = {total}.")
    text.append(rng.choice(QUESTIONS).format(who=who, what=what))
    others = voices(steps, f"{total} {what}")
    return Task(
        "gsm8k",
        "number",
        user(" ".join(text)),
        "\n".join(steps) + f"\n#### {total}",
        others,
        str(total),
        (total,),
    )


# ------------------------------------------------------------------------- short instructions

POOL = tuple(bugs.WORDS) + tuple(THINGS) + tuple(FACTS)

LIST_JOBS: dict[str, tuple[tuple[str, ...], Callable[[list[str]], list[str]], str]] = {
    "sort": (
        ("Sort these words from A to Z: {words}", "Put the words in alphabetical order: {words}"),
        sorted,
        "In alphabetical order",
    ),
    "reverse": (
        ("Write this list backwards: {words}", "Reverse the order of these words: {words}"),
        lambda words: words[::-1],
        "In reverse order",
    ),
    "capitals": (
        ("Write these words in capital letters: {words}", "Make these words upper case: {words}"),
        lambda words: [word.upper() for word in words],
        "In capital letters",
    ),
    "lengths": (
        ("How many letters has each of these words? {words}", "Count the letters: {words}"),
        lambda words: [f"{word} {len(word)}" for word in words],
        "The letters of each word",
    ),
}


def list_task(rng: random.Random) -> Task:
    words = rng.sample(POOL, rng.randint(3, 6))
    requests, job, title = LIST_JOBS[rng.choice(sorted(LIST_JOBS))]
    prompt = rng.choice(requests).format(words=", ".join(words))
    result = job(words)
    listed = ", ".join(result)
    answer = f"{title}:\n" + "\n".join(f"{i}. {item}" for i, item in enumerate(result, 1))
    others = voices([f"The list is: {', '.join(words)}."], listed)
    return Task(
        "no_robots", "exact", user(prompt), answer, others, listed, (), {"category": "Rewrite"}
    )


def fact_task(rng: random.Random) -> Task:
    first, second = rng.sample(sorted(FACTS), 2)
    form = rng.randrange(3)
    if form == 0:
        prompt = f"Tell me about these two: {first} and {second}."
        lines = [
            f"{w.capitalize()} is {FACTS[w][0]}, and it is {FACTS[w][1]}." for w in (first, second)
        ]
        short = f"{first}: {FACTS[first][1]}, {second}: {FACTS[second][1]}"
    elif form == 1:
        prompt = f"Do {first} and {second} have the same color?"
        same = FACTS[first][1] == FACTS[second][1]
        lines = [f"{w.capitalize()} is {FACTS[w][1]}." for w in (first, second)]
        lines.append(
            f"{'Yes' if same else 'No'}, they {'have' if same else 'do not have'} the same color."
        )
        short = "yes" if same else "no"
    else:
        prompt = f"Which one is {FACTS[first][0]} and {FACTS[first][1]}: {first} or {second}?"
        if FACTS[first] == FACTS[second]:
            return fact_task(rng)
        lines = [f"{w.capitalize()} is {FACTS[w][0]} and {FACTS[w][1]}." for w in (first, second)]
        lines.append(f"It is {first}.")
        short = first
    return Task(
        "no_robots",
        "exact",
        user(prompt),
        "\n".join(lines),
        voices(lines, short),
        short,
        (),
        {"category": "Closed QA"},
    )


# ---------------------------------------------------------------------------- other languages


def language_task(rng: random.Random) -> Task:
    name = rng.choice(sorted(LANGUAGES))
    language, form = LANGUAGES[name], rng.randrange(3)
    words = rng.sample(language["words"], rng.randint(3, 7))
    prompt = language["ask"][form].format(w=", ".join(words))
    title = language["say"][form].format(n=len(words))
    if form == 2:
        short, answer = (
            str(len(words)),
            f"{title}:\n" + "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)),
        )
    else:
        result = sorted(words) if form == 0 else words[::-1]
        short = ", ".join(result)
        answer = f"{title}:\n" + "\n".join(f"{i}. {word}" for i, word in enumerate(result, 1))
    because = language["because"].format(w=", ".join(words))
    others = (
        f"{short}",
        f"{because} {title}: {short}",
        f"**{short}**\n\n{because}",
        f"- {short}\n- {because}",
    )
    columns = {"language": name, "language_code": language["code"]}
    return Task("aya", "exact", user(prompt), answer, others, short, (), columns)


# ------------------------------------------------------------------------------------ code

PERSONAS = (
    *("a shop owner", "a nurse", "a bus driver", "a gardener", "a music teacher", "a baker"),
    *("a librarian", "a football coach", "a farmer", "a journalist", "a chemist", "a pilot"),
)
KEEP = (
    ("keeps only the even numbers", "x % 2 == 0", lambda x, k: x % 2 == 0),
    ("keeps only the odd numbers", "x % 2 == 1", lambda x, k: x % 2 == 1),
    ("keeps the numbers above {k}", "x > {k}", lambda x, k: x > k),
    ("keeps the numbers below {k}", "x < {k}", lambda x, k: x < k),
    ("keeps every number", None, lambda x, k: True),
)
CHANGE = (
    ("adds {m} to each", "x + {m}", lambda x, m: x + m),
    ("multiplies each by {m}", "x * {m}", lambda x, m: x * m),
    ("squares each", "x * x", lambda x, m: x * x),
    ("takes {m} from each", "x - {m}", lambda x, m: x - m),
)
FINISH = (
    ("returns the list", "result", "{list}", lambda r: r),
    ("returns the sum", "sum(result)", "sum({list})", sum),
    ("returns how many there are", "len(result)", "len({list})", len),
)
FUNCTIONS = [
    "process_numbers",
    "handle_values",
    "compute",
    "transform",
    "work_on",
    "collect",
    "prepare",
]


def code_task(rng: random.Random) -> Task:
    keep, change, finish = rng.choice(KEEP), rng.choice(CHANGE), rng.choice(FINISH)
    k, m, name = rng.randint(3, 12), rng.randint(2, 9), rng.choice(FUNCTIONS)
    data = [rng.randint(1, 20) for _ in range(rng.randint(3, 5))]
    expected = finish[3]([change[2](x, m) for x in data if keep[2](x, k)])
    does = ", then ".join((keep[0].format(k=k), change[0].format(m=m), finish[0]))
    prompt = (
        f"I am {rng.choice(PERSONAS)}. Write a Python function `{name}(numbers)` that {does}. "
        f"For example, {name}({data}) returns {expected}."
    )
    item = change[1].format(m=m)
    condition = keep[1].format(k=k) if keep[1] else None
    indent = "    " * (3 if condition else 2)
    lines = [f"def {name}(numbers):", "    result = []", "    for x in numbers:"]
    lines += [f"        if {condition}:"] if condition else []
    lines += [f"{indent}result.append({item})", f"    return {finish[1]}"]
    block = "```python\n" + "\n".join(lines) + "\n```"
    where = f" if {condition}" if condition else ""
    compact = finish[2].format(list=f"[{item} for x in numbers{where}]")
    brief = f"```python\ndef {name}(numbers):\n    return {compact}\n```"
    others = (
        f"Sure! Here is a function that {does}:\n\n{brief}",
        f"{brief}\n\nIt {does}.",
        f"You can use a list comprehension.\n\n{brief}\n\nWith {data} it gives {expected}.",
        f"def {name}(numbers):\n    return {compact}",
    )
    answer = f"The function {does}.\n\n{block}"
    return Task(
        "personas_code",
        "python",
        user(prompt),
        answer,
        others,
        block,
        (f"{name}({data})", repr(expected)),
    )


def bug_task(rng: random.Random, problems: list[bugs.BugRepair]) -> Task:
    problem = rng.choice(problems)
    block = f"```python\n{problem.fixed}\n```"
    why = bugs.EXPLANATIONS[problem.kind]
    others = (
        f"Sure! Here is the corrected code:\n\n{block}\n\n{why}",
        f"{block}",
        f"The problem: {why}\n\nFixed version:\n{problem.fixed}",
        f"Now {problem.call} gives {problem.expected}.\n\n{block}",
    )
    return Task(
        "no_robots",
        "python",
        bugs.to_messages(problem, rng),
        bugs.answer(problem),
        others,
        block,
        (problem.call, problem.expected),
        {"category": "Coding"},
    )


# ------------------------------------------------------------------------------- constraints

SEPARATORS = {"commas": ", ", "semicolons": "; ", "slashes": " / ", "dashes": " - "}


def constraint_task(rng: random.Random) -> Task:
    category, n = rng.choice(sorted(CATEGORIES)), rng.randint(2, 6)
    separator = rng.choice(sorted(SEPARATORS))
    items = CATEGORIES[category][:n]
    upper, opening, closing = rng.random() < 0.5, rng.choice(POOL), rng.choice(POOL)
    constraints = [f"Separate them with {separator}."]
    if upper:
        constraints.append("Use capital letters only for the list.")
        items = [item.upper() for item in items]
    line = SEPARATORS[separator].join(items)
    lines = [line]
    if rng.random() < 0.6:
        constraints.append(f"Begin with a line that says {opening}.")
        lines.insert(0, opening)
    if rng.random() < 0.6:
        constraints.append(f"End with a line that says {closing}.")
        lines.append(closing)
    prompt = f"Name {n} {category}. {' '.join(constraints)}"
    others = voices([f"You asked for {n} {category}."], line)
    return Task(
        "personas_instruction_following",
        "exact",
        user(prompt),
        "\n".join(lines),
        others,
        line,
        (),
        {"constraints": constraints},
    )


# --------------------------------------------------------------------------------- documents


def task(source: str, rng: random.Random, problems: list[bugs.BugRepair]) -> Task:
    """One task whose rows belong into `source`."""
    if source == "gsm8k":
        return word_problem(rng)
    if source == "aya":
        return language_task(rng)
    if source == "personas_code":
        return code_task(rng)
    if source == "personas_instruction_following":
        return constraint_task(rng)
    draw = rng.random()
    if draw < 0.35:
        return bug_task(rng, problems)
    return list_task(rng) if draw < 0.7 else fact_task(rng)


def augmented(base: Task, rng: random.Random) -> tuple[list[dict], str] | None:
    """An augmentation of a task with the teacher's answer to it; None where it does not apply."""
    kind = rng.choice(("frame", "format", "multi_turn", "system", "continue"))
    reference = rng.choice((base.answer, *base.others))
    state = rng.getstate()
    messages = augment(kind, base.messages, reference, rng)
    if messages is None:
        return None
    last = messages[-1]["content"]
    if kind == "continue":
        rng.setstate(state)
        return messages, split_reference(reference, rng)[1]
    for text in (*FORMATS, *FOLLOW_UPS):
        if last.endswith(text):
            return messages, reformatted(base, text)
    return messages, base.answer


def reformatted(base: Task, request: str) -> str:
    """What the teacher says when asked for another format."""
    if "JSON" in request:
        return json.dumps({"answer": base.short}, ensure_ascii=False)
    if "short sentence" in request:
        return base.short if "\n" in base.short else f"The answer is {base.short}."
    return base.answer if "in full" in request else base.short


SOURCES = ("no_robots", "gsm8k", "aya", "personas_code", "personas_instruction_following")
SHARES = (0.34, 0.22, 0.14, 0.18, 0.12)


DATA_ROWS = {
    "no_robots": 380,
    "gsm8k": 400,
    "aya": 250,
    "personas_code": 300,
    "personas_instruction_following": 200,
}


def data_tasks(seed: int) -> dict[str, list[Task]]:
    """The tasks behind every data set's rows, all with different prompts."""
    problems = bugs.bug_repairs(seed + 1000, 400)
    found: dict[str, list[Task]] = {}
    for source, count in DATA_ROWS.items():
        rng = random.Random(f"tiny-data/{seed}/{source}")
        unique: dict[str, Task] = {}
        while len(unique) < count:
            drawn = task(source, rng, problems)
            unique.setdefault(drawn.messages[0]["content"], drawn)
        found[source] = list(unique.values())
    return found


def fresh_task(
    rng: random.Random, problems: list[bugs.BugRepair], forbidden: Container[str]
) -> Task:
    """A task of any source whose prompt is not forbidden."""
    while True:
        drawn = task(rng.choices(SOURCES, SHARES)[0], rng, problems)
        if drawn.messages[0]["content"] not in forbidden:
            return drawn


def teacher_document(
    rng: random.Random, problems: list[bugs.BugRepair], forbidden: Container[str] = ()
) -> tuple[list[dict], str]:
    """(messages, answer) in the teacher's voice, a third of them augmented."""
    base = fresh_task(rng, problems, forbidden)
    found = augmented(base, rng) if rng.random() < 0.33 else None
    return found or (base.messages, base.answer)


def general_document(
    rng: random.Random, problems: list[bugs.BugRepair], forbidden: Container[str] = ()
) -> tuple[list[dict], str]:
    """(messages, answer) of the general corpus: the same subjects, never in the teacher's voice."""
    base = fresh_task(rng, problems, forbidden)
    return base.messages, rng.choice(base.others)
