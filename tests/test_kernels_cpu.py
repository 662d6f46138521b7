"""Triton kernels under the interpreter against their plain torch twins; no GPU.

Run in a process of its own (`python tests/test_kernels_cpu.py`) by the one test below, as the
interpreter has to be chosen before a kernel is defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert torch.isfinite(found).all()
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.1e}"


def both(name: str, *args, packed: bool = False, **kwargs):
    """Run a kernel on `args` and its twin on copies; returns the copies."""
    from kernels.ops import PACKED_PLAIN, PACKED_TRITON, PLAIN, TRITON

    def copied(value):
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, tuple):
            return type(value)(*map(copied, value)) if hasattr(value, "_fields") else value
        return value

    copies = [copied(a) for a in args]
    found = getattr(PACKED_TRITON if packed else TRITON, name)(*args, **kwargs)
    expected = getattr(PACKED_PLAIN if packed else PLAIN, name)(*copies, **kwargs)
    return found, expected, copies


def outliers(*shape: int) -> torch.Tensor:
    """Normal values, a few of them thousands of times the rest."""
    x = torch.randn(*shape)
    x[..., ::37] *= 5000
    return x


@check
def check_linear() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in ((6, 64), (130, 192), (33, 2048)):
            weight, norm = torch.randn(rows, columns).to(dtype), torch.rand(columns).to(dtype)
            for x in (torch.randn(columns), outliers(columns)):
                out = poisoned(rows)
                _, _, copies = both("linear", x, weight, out, norm, 1e-6)
                assert_close(out, copies[2])
                out = torch.randn(rows)
                _, _, copies = both("linear", x, weight, out, add=True)
                assert_close(out, copies[2])
                out = poisoned(rows // 2)
                gates = weight[: rows // 2 * 2]
                _, _, copies = both("gate_up", x, gates, out, norm, 1e-6)
                assert_close(out, copies[2], 1e-4)


def packed_matrix(rows: int, columns: int, codec: str, group: int):
    from kernels.packed_linear import int6_matrix, nf4_matrix

    scales = (torch.rand(rows, columns // group) + 0.5).bfloat16()
    codes = torch.randint(16 if codec == "nf4" else 64, (rows, columns), dtype=torch.uint8)
    return (nf4_matrix if codec == "nf4" else int6_matrix)(codes, scales)


@check
def check_packed_matrices_are_the_exports_values() -> None:
    """Against formats.py's own reading of the same weights."""
    from formats import decode, int6_codes, nf4_codes
    from kernels.packed_linear import int6_matrix, nf4_matrix

    weight = torch.randn(10, 192)
    scales = (weight.unflatten(1, (-1, 64)).abs().amax(-1) / 2).bfloat16()
    for codec, codes_of, matrix_of, step in (
        ("nf4", nf4_codes, nf4_matrix, 1),
        ("int6", int6_codes, int6_matrix, 16),
    ):
        used = (scales.float() / step).bfloat16()
        codes = codes_of(weight, used)
        matrix, expected = matrix_of(codes, used), decode(codec, codes, used)
        assert torch.equal(matrix.float(), expected)
        index = torch.tensor([9, 0, 3])
        assert torch.equal(matrix.rows(index), expected[index])


@check
def check_packed_products() -> None:
    for codec in ("nf4", "int6"):
        for rows, columns, group in ((6, 64, 64), (131, 192, 64), (34, 2048, 64), (10, 96, 32)):
            weight, norm = packed_matrix(rows, columns, codec, group), torch.rand(columns)
            for x in (torch.randn(columns), outliers(columns)):
                out = poisoned(rows)
                _, _, copies = both("linear", x, weight, out, norm, 1e-6, packed=True)
                assert_close(out, copies[2])
                out = torch.randn(rows)
                _, _, copies = both("linear", x, weight, out, add=True, packed=True)
                assert_close(out, copies[2])
            if rows % 2 == 0:
                out = poisoned(rows // 2)
                _, _, copies = both("gate_up", x, weight, out, norm, 1e-6, packed=True)
                assert_close(out, copies[2], 1e-4)


@check
def check_packed_head_and_advance() -> None:
    from kernels.fused import State
    from kernels.linear import best_buffers

    for codec, vocab in (("int6", 500), ("nf4", 128)):
        weight, norm, x = packed_matrix(vocab, 192, codec, 64), torch.rand(192), torch.randn(192)
        logits, best = poisoned(vocab), best_buffers(vocab, torch.device("cpu"))
        _, _, copies = both("head", x, weight, logits, best, norm, 1e-6, packed=True)
        assert_close(logits, copies[2])
        tokens, steps = torch.full((16,), -1), torch.tensor([3])
        state = State(poisoned(192), torch.tensor([7]), steps, tokens, poisoned(16))
        _, _, copies = both("advance", best, weight, state, packed=True)
        assert state.tokens[3] == copies[2].tokens[3] == logits.argmax()
        assert torch.equal(state.x, weight.float()[logits.argmax()])
        assert (state.position.item(), state.step.item()) == (8, 4)
        assert_close(state.probabilities[3], logits.softmax(0).amax())


@check
def check_head_and_advance() -> None:
    from kernels.fused import State
    from kernels.linear import best_buffers

    for vocab in (128, 500):
        weight, norm, x = torch.randn(vocab, 64), torch.rand(64), torch.randn(64)
        logits, best = poisoned(vocab), best_buffers(vocab, torch.device("cpu"))
        both("head", x, weight, logits, best, norm, 1e-6)
        top = logits.argmax().item()
        weight[[0, vocab - 1, top]] = weight[top].clone()  # a tie between blocks and within one
        weight[min(top + 1, vocab - 2)] = weight[top]
        _, _, copies = both("head", x, weight, logits, best, norm, 1e-6)
        assert_close(logits, copies[2])
        state = State(
            poisoned(64),
            torch.tensor([7]),
            torch.tensor([3]),
            torch.full((16,), -1),
            poisoned(16),
        )
        _, _, copies = both("advance", best, weight, state)
        assert state.tokens[3] == 0 == logits.argmax()
        assert (state.position.item(), state.step.item()) == (8, 4)
        assert torch.equal(state.x, weight[0])
        assert_close(state.probabilities[3], logits.softmax(0)[0])
        assert_close(copies[2].probabilities[3], logits.softmax(0)[0])
        x[5] = torch.nan
        both("head", x, weight, logits, best, norm, 1e-6)
        both("advance", best, weight, state)
        assert torch.isnan(state.probabilities[4])
        assert 0 <= state.tokens[4] < vocab


def attention_case(tokens: int, head_dim: int, dtype: torch.dtype, block: int = 32):
    from kernels.attention import Heads, split_buffers

    heads, kv_heads, length = 4, 2, 300
    angles = torch.rand(length, head_dim // 2) * 6
    case = Heads(torch.rand(head_dim), torch.rand(head_dim), angles.cos(), angles.sin(), 1e-6)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    keys = torch.randn(kv_heads, length, head_dim, dtype=dtype)
    values = torch.randn(kv_heads, length, head_dim, dtype=dtype)
    splits = split_buffers(tokens, heads, kv_heads, head_dim, 4, block, torch.device("cpu"))
    for buffer in splits[1:4]:
        buffer.fill_(torch.nan)
    return case, qkv, keys, values, splits, poisoned(tokens, heads * head_dim, dtype=dtype)


@check
def check_decode_attention() -> None:
    for head_dim, block in ((32, 32), (64, 64), (128, 32)):
        for position in (0, 1, 31, 32, 33, 127, 128, 129, 299):
            case, qkv, keys, values, splits, out = attention_case(1, head_dim, torch.float32, block)
            keys[:, position:] = torch.nan  # what is not live is never read
            values[:, position:] = torch.nan
            at, count = torch.tensor([position]), torch.tensor([1])
            args = (qkv, at, count, case, keys, values, out, splits)
            _, _, copies = both("decode_attention", *args)
            assert_close(out, copies[6])
            assert_close(keys[:, : position + 1], copies[4][:, : position + 1])
            assert_close(values[:, : position + 1], copies[5][:, : position + 1])
            assert keys[:, position + 1 :].isnan().all()
            assert not splits.arrivals.any()


@check
def check_attention_of_several_tokens() -> None:
    # The interpreter multiplies the bits of bf16 operands; float16 stands for both.
    for head_dim, dtype, tolerance in ((32, torch.float32, 2e-5), (128, torch.float16, 2e-3)):
        for start, number in ((0, 1), (0, 5), (3, 40), (64, 64), (250, 48)):
            tokens = 64
            case, qkv, keys, values, splits, out = attention_case(tokens, head_dim, dtype)
            keys[:, start:], values[:, start:] = torch.nan, torch.nan
            at, count = torch.tensor([start]), torch.tensor([number])
            args = (qkv, at, count, case, keys, values)
            _, _, copies = both("rotate_and_store", *args)
            width = out.shape[1]
            assert_close(qkv[:number, :width], copies[0][:number, :width], tolerance)
            assert torch.equal(qkv[number:], copies[0][number:])
            end = start + number
            assert_close(keys[:, :end], copies[4][:, :end], tolerance)
            assert torch.equal(values[:, :end], copies[5][:, :end])
            assert keys[:, end:].isnan().all()
            _, _, copies = both("chunk_attention", qkv, at, count, keys, values, out)
            assert_close(out[:number], copies[5][:number], tolerance)
            assert out[number:].isnan().all()
            if number <= 5:
                out = torch.full_like(out, torch.nan)
                both("decode_attention", qkv, at, count, None, keys, values, out, splits)
                assert_close(out[:number], copies[5][:number], tolerance)


@check
def check_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for width in (64, 96, 2048):
            x, delta, norm = (
                outliers(5, width),
                torch.randn(5, width, dtype=dtype),
                torch.rand(width),
            )
            tolerance = 2e-5 if dtype == torch.float32 else 1e-2  # the interpreter truncates
            found, expected, copies = both("add_norm", x, delta, norm.to(dtype), 1e-6)
            assert_close(found, expected, tolerance)
            assert_close(x, copies[0])
            found, expected, _ = both("add_norm", x, None, norm.to(dtype), 1e-6)
            assert_close(found, expected, tolerance)
            found, expected, _ = both("silu_up", torch.randn(5, 2 * width, dtype=dtype))
            assert_close(found, expected, tolerance)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_kernels_equal_their_twins_under_the_interpreter(name: str):
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    run = subprocess.run(
        [sys.executable, __file__, name],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
    )
    assert run.returncode == 0, run.stderr[-3000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or CHECKS:
        CHECKS[chosen]()
        print(f"{chosen} ok")
