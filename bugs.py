"""Seeded bug-repair problems: small Python programs with one injected fault each.

A template draws names and constants and states a correct program, a broken one, a call, and what
the call must give, worked out independently of the program. Both programs are then run in a
subprocess with a time limit: the broken one must fail its example and the repaired one pass it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PROGRAM_SECONDS = 0.5  # limit for one program; a broken loop may never end
BATCH = 400  # programs a subprocess


@dataclass(frozen=True)
class BugRepair:
    """One problem. expected, observed: repr of the result, observed may be `raises Name`."""

    kind: str
    broken: str
    fixed: str
    call: str
    expected: str
    observed: str


class Sketch:
    """What a template draws: a program with one slot, the right and the wrong text for it."""

    def __init__(
        self, kind: str, program: str, right: str, wrong: str, args: str, expected: object
    ):
        self.kind = kind
        self.fixed = program.replace("@@", right)
        self.broken = program.replace("@@", wrong)
        name = program.split("def ", 1)[1].split("(", 1)[0]
        self.call = f"{name}({args})"
        self.expected = repr(expected)


# ----------------------------------------------------------------------------------- templates
# Each takes a random.Random and returns a Sketch. Arguments are drawn so that the fault shows.

ITEMS = ("numbers", "values", "items", "scores", "prices", "data")
WORDS = [
    "lamp",
    "river",
    "stone",
    "cloud",
    "piano",
    "tiger",
    "maple",
    "robin",
    "candle",
    "basket",
    "market",
    "garden",
]
NAMES = ("ana", "bo", "cy", "dee", "eli", "fay", "gus")


def numbers(rng: random.Random, low: int = 2, high: int = 20, size: tuple = (3, 5)) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(*size))]


def off_by_one(rng: random.Random) -> Sketch:
    name, n = rng.choice(("sum_to", "total_up_to", "add_up")), rng.randint(3, 20)
    program = (
        f"def {name}(n):\n    total = 0\n    for i in range(@@):\n"
        "        total += i\n    return total"
    )
    return Sketch("off_by_one", program, "n + 1", "n", f"{n}", n * (n + 1) // 2)


def wrong_comparison(rng: random.Random) -> Sketch:
    items, limit = rng.choice(ITEMS), rng.randint(5, 15)
    name = rng.choice(("count_above", "how_many_over", "count_greater"))
    data = numbers(rng)
    data[0] = limit + rng.randint(1, 9)
    data.append(limit - rng.randint(1, 3))
    data.append(limit - rng.randint(1, 3))
    right = sum(x > limit for x in data)
    if right == sum(x < limit for x in data):
        data.append(limit + 4)
        right += 1
    program = (
        f"def {name}({items}, limit):\n    count = 0\n    for x in {items}:\n"
        "        if x @@ limit:\n            count += 1\n    return count"
    )
    return Sketch("wrong_comparison", program, ">", "<", f"{data}, {limit}", right)


def wrong_operator(rng: random.Random) -> Sketch:
    a, b = rng.randint(3, 12), rng.randint(3, 9)
    thing, unit = rng.choice((("rectangle", "width"), ("field", "length"), ("room", "side")))
    program = f"def {thing}_area({unit}, height):\n    return {unit} @@ height"
    return Sketch("wrong_operator", program, "*", "+", f"{a}, {b}", a * b)


def wrong_initial_value(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng, 2, 6, (2, 4))
    result = 1
    for x in data:
        result *= x
    name = rng.choice(("product", "multiply_all", "times_all"))
    program = (
        f"def {name}({items}):\n    result = @@\n    for x in {items}:\n"
        "        result *= x\n    return result"
    )
    return Sketch("wrong_initial_value", program, "1", "0", f"{data}", result)


def missing_return(rng: random.Random) -> Sketch:
    factor, n = rng.randint(2, 9), rng.randint(2, 20)
    name = rng.choice(("scale", "grow", "multiply"))
    program = f"def {name}(x):\n    result = x * {factor}\n    @@"
    return Sketch("missing_return", program, "return result", "result", f"{n}", n * factor)


def wrong_variable(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng)
    name, step = rng.choice(("add_to_all", "shift", "raise_all")), rng.randint(2, 9)
    program = (
        f"def {name}({items}, step):\n    result = []\n    for x in {items}:\n"
        "        result.append(@@ + step)\n    return result"
    )
    return Sketch(
        "wrong_variable", program, "x", "step", f"{data}, {step}", [x + step for x in data]
    )


def swapped_arguments(rng: random.Random) -> Sketch:
    a, b = rng.randint(12, 30), rng.randint(2, 9)
    name = rng.choice(("difference", "left_over", "remaining"))
    program = (
        f"def subtract(a, b):\n    return a - b\n\ndef {name}(big, small):\n    return subtract(@@)"
    )
    sketch = Sketch("swapped_arguments", program, "big, small", "small, big", "", a - b)
    sketch.call = f"{name}({a}, {b})"
    return sketch


def wrong_index(rng: random.Random) -> Sketch:
    words = rng.sample(WORDS, rng.randint(3, 4))
    first = rng.random() < 0.5
    name = "first_word" if first else "last_word"
    right, wrong = ("0", "1") if first else ("-1", "0")
    program = f"def {name}(text):\n    words = text.split()\n    return words[@@]"
    text = " ".join(words)
    return Sketch("wrong_index", program, right, wrong, repr(text), words[0 if first else -1])


def missing_increment(rng: random.Random) -> Sketch:
    n, step = rng.randint(3, 6), rng.randint(2, 5)
    name = rng.choice(("countdown", "count_down", "steps_down"))
    program = (
        f"def {name}(n):\n    result = []\n    while n > 0:\n        result.append(n)\n"
        "        @@\n    return result"
    )
    expected = list(range(n * step, 0, -step))
    return Sketch("missing_increment", program, f"n -= {step}", "n -= 0", f"{n * step}", expected)


def wrong_aggregate(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng)
    data.append(data[0] + 3)
    right, wrong, name = rng.choice(
        (("max", "min", "largest"), ("min", "max", "smallest"), ("sum", "len", "total"))
    )
    expected = {"max": max, "min": min, "sum": sum}[right](data)
    program = f"def {name}({items}):\n    return @@({items})"
    return Sketch("wrong_aggregate", program, right, wrong, f"{data}", expected)


def inverted_condition(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng)
    data += [data[0] + 1]
    even = rng.random() < 0.5
    name, right, wrong = ("evens", "==", "!=") if even else ("odds", "!=", "==")
    program = f"def {name}({items}):\n    return [x for x in {items} if x % 2 @@ 0]"
    expected = [x for x in data if (x % 2 == 0) == even]
    return Sketch("inverted_condition", program, right, wrong, f"{data}", expected)


def early_return(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng)
    name = rng.choice(("add_all", "sum_all", "total"))
    program = (
        f"def {name}({items}):\n    total = 0\n    for x in {items}:\n        total += x\n"
        "@@return total"
    )
    return Sketch("early_return", program, "    ", "        ", f"{data}", sum(data))


def wrong_default(rng: random.Random) -> Sketch:
    word, times = rng.choice(WORDS), rng.randint(2, 3)
    name = rng.choice(("repeat", "copy_word", "say"))
    program = f"def {name}(word, times=@@):\n    return word * times"
    return Sketch("wrong_default", program, f"{times}", "0", repr(word), word * times)


def wrong_division(rng: random.Random) -> Sketch:
    size = rng.randint(2, 4)
    data = numbers(rng, 2, 20, (size, size))
    while sum(data) % size == 0:
        data[0] += 1
    items, name = rng.choice(ITEMS), rng.choice(("mean", "average"))
    program = f"def {name}({items}):\n    return sum({items}) @@ len({items})"
    return Sketch("wrong_division", program, "/", "//", f"{data}", sum(data) / size)


def missing_cleanup(rng: random.Random) -> Sketch:
    word = rng.choice(WORDS)
    name = rng.choice(("clean", "tidy", "normalize"))
    text = "  " + word.upper() + " "
    program = f"def {name}(text):\n    return text.@@lower()"
    return Sketch("missing_cleanup", program, "strip().", "", repr(text), word)


def wrong_slice(rng: random.Random) -> Sketch:
    word, n = rng.choice([w for w in WORDS if len(w) > 4]), rng.randint(2, 3)
    name = rng.choice(("first_letters", "prefix", "start_of"))
    program = f"def {name}(word, n):\n    return word[@@]"
    return Sketch("wrong_slice", program, ":n", "n:", f"{word!r}, {n}", word[:n])


def wrong_key(rng: random.Random) -> Sketch:
    name, age = rng.choice(NAMES), rng.randint(8, 60)
    right, wrong = rng.choice((("age", "name"), ("name", "age")))
    program = f"def get_{right}(person):\n    return person['@@']"
    person = {"name": name, "age": age}
    return Sketch("wrong_key", program, right, wrong, f"{person}", person[right])


def wrong_method(rng: random.Random) -> Sketch:
    items, data, extra = rng.choice(ITEMS), numbers(rng, 2, 9, (2, 3)), numbers(rng, 2, 9, (2, 3))
    name = rng.choice(("join_lists", "combine", "merge"))
    program = (
        f"def {name}({items}, more):\n    result = list({items})\n    result.@@(more)\n"
        "    return result"
    )
    return Sketch("wrong_method", program, "extend", "append", f"{data}, {extra}", data + extra)


def wrong_order(rng: random.Random) -> Sketch:
    items, data = rng.choice(ITEMS), numbers(rng)
    data = sorted(set(data)) + [max(data) + 2]
    rng.shuffle(data)
    down = rng.random() < 0.5
    name = "high_to_low" if down else "low_to_high"
    program = f"def {name}({items}):\n    return sorted({items}, reverse=@@)"
    right, wrong = ("True", "False") if down else ("False", "True")
    return Sketch("wrong_order", program, right, wrong, f"{data}", sorted(data, reverse=down))


def wrong_type(rng: random.Random) -> Sketch:
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    name = rng.choice(("add_text", "sum_strings", "add_inputs"))
    program = f"def {name}(a, b):\n    return @@"
    return Sketch("wrong_type", program, "int(a) + int(b)", "a + b", f"'{a}', '{b}'", a + b)


TEMPLATES: tuple[Callable[[random.Random], Sketch], ...] = (
    *(off_by_one, wrong_comparison, wrong_operator, wrong_initial_value, missing_return),
    *(wrong_variable, swapped_arguments, wrong_index, missing_increment, wrong_aggregate),
    *(inverted_condition, early_return, wrong_default, wrong_division, missing_cleanup),
    *(wrong_slice, wrong_key, wrong_method, wrong_order, wrong_type),
)
KINDS = tuple(template.__name__ for template in TEMPLATES)

EXPLANATIONS = {
    "off_by_one": "The range stopped one step too early.",
    "wrong_comparison": "The comparison pointed the wrong way.",
    "wrong_operator": "The values must be multiplied, not added.",
    "wrong_initial_value": "A product has to start at one.",
    "missing_return": "The result was never returned.",
    "wrong_variable": "The loop used the wrong variable.",
    "swapped_arguments": "The arguments were in the wrong order.",
    "wrong_index": "The index picked the wrong word.",
    "missing_increment": "The loop counter never changed.",
    "wrong_aggregate": "The wrong function was applied to the list.",
    "inverted_condition": "The condition was the wrong way round.",
    "early_return": "The return stood inside the loop.",
    "wrong_default": "The default value was wrong.",
    "wrong_division": "Whole-number division dropped the fraction.",
    "missing_cleanup": "The spaces around the text were kept.",
    "wrong_slice": "The slice took the wrong end.",
    "wrong_key": "The dictionary was read with the wrong key.",
    "wrong_method": "The list was added as one element.",
    "wrong_order": "The list was sorted in the wrong direction.",
    "wrong_type": "The texts must become numbers first.",
}


# ------------------------------------------------------------------------------------- running

DRIVER = """
import json, signal, sys
def stop(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, stop)
out = []
for program, call in json.load(sys.stdin):
    scope = {}
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    try:
        exec(program, scope)
        out.append(repr(eval(call, scope)))
    except BaseException as error:
        out.append('raises ' + type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
json.dump(out, sys.stdout)
"""


def run_programs(programs: Sequence[tuple[str, str]], limit: float = PROGRAM_SECONDS) -> list[str]:
    """Run (program, call) pairs in subprocesses, away from this one; the repr of each result.

    `raises Name` stands for an exception, `raises TimeoutError` for a program that ran longer than
    `limit` seconds. Raises RuntimeError where a subprocess as a whole fails.
    """
    results: list[str] = []
    for start in range(0, len(programs), BATCH):
        batch = list(programs[start : start + BATCH])
        run = subprocess.run(
            [sys.executable, "-I", "-c", DRIVER, str(limit)],
            input=json.dumps(batch),
            capture_output=True,
            text=True,
            timeout=10 + limit * len(batch),
        )
        if run.returncode:
            raise RuntimeError(f"the programs could not be run: {run.stderr.strip()[-300:]}")
        results += json.loads(run.stdout)
    return results


def bug_repairs(seed: int, count: int) -> list[BugRepair]:
    """`count` different problems, kinds in turn; the same seed gives the same problems.

    Every broken program was seen to fail its example here, and every repaired one to pass it.
    """
    rng = random.Random(f"bug-repairs/{seed}")
    sketches, seen = [], set()
    for attempt in range(50 * count):
        if len(sketches) == count:
            break
        sketch = TEMPLATES[attempt % len(TEMPLATES)](rng)
        if (sketch.fixed, sketch.call) not in seen:
            seen.add((sketch.fixed, sketch.call))
            sketches.append(sketch)
    observed = run_programs([(s.broken, s.call) for s in sketches], limit=0.05)
    problems = [
        BugRepair(s.kind, s.broken, s.fixed, s.call, s.expected, o)
        for s, o in zip(sketches, observed, strict=True)
    ]
    verify(problems)
    return problems


def verify(problems: Sequence[BugRepair]) -> None:
    """Raise ValueError unless every broken program fails its example, every repaired one passes."""
    fixed = run_programs([(p.fixed, p.call) for p in problems])
    for problem, result in zip(problems, fixed, strict=True):
        if result != problem.expected:
            raise ValueError(
                f"{problem.kind}: the repaired program gives {result} for {problem.call}, "
                f"expected {problem.expected}"
            )
        if problem.observed == problem.expected:
            raise ValueError(f"{problem.kind}: the broken program passes {problem.call}")


# ---------------------------------------------------------------------------------------- text

REQUESTS = (
    "This function has a bug:\n\n{code}\n\n{call} should give {expected}, but it gives {observed}. "
    "Fix it.",
    "Please repair this program.\n\n{code}\n\nFor {call} I expect {expected} and get {observed}.",
    "{code}\n\nWhy does {call} give {observed}? It must be {expected}. Show the corrected code.",
    "Find and fix the mistake.\n\n{code}\n\nCall: {call}\nExpected: {expected}\nGot: {observed}",
)


def to_messages(problem: BugRepair, rng: random.Random) -> list[dict]:
    """The user's message: the broken program, its example, and what it does instead."""
    observed = problem.observed
    if observed == "raises TimeoutError":
        observed = "no result, it never ends"
    elif observed.startswith("raises "):
        observed = f"a {observed.split()[1]}"
    text = rng.choice(REQUESTS).format(
        code=f"```python\n{problem.broken}\n```",
        call=problem.call,
        expected=problem.expected,
        observed=observed,
    )
    return [{"role": "user", "content": text}]


def answer(problem: BugRepair) -> str:
    """The repaired program, and a sentence that names the fault."""
    return f"{EXPLANATIONS[problem.kind]}\n\n```python\n{problem.fixed}\n```"
