"""The operations of the fast paths by name: Triton kernels, or their plain torch twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernels import attention, chunk, fused, linear, packed_linear


class Ops(NamedTuple):
    linear: Callable
    gate_up: Callable
    head: Callable
    decode_attention: Callable
    chunk_attention: Callable
    add_norm: Callable
    rotate_and_store: Callable
    silu_up: Callable
    advance: Callable


TRITON = Ops(
    linear.linear,
    linear.gate_up,
    linear.head,
    attention.decode_attention,
    chunk.chunk_attention,
    fused.add_norm,
    fused.rotate_and_store,
    fused.silu_up,
    fused.advance,
)
PLAIN = Ops(
    linear.linear_plain,
    linear.gate_up_plain,
    linear.head_plain,
    attention.decode_attention_plain,
    chunk.chunk_attention_plain,
    fused.add_norm_plain,
    fused.rotate_and_store_plain,
    fused.silu_up_plain,
    fused.advance_plain,
)
# The same over kernels/packed_linear.py's matrices.
PACKED_TRITON = TRITON._replace(
    linear=packed_linear.linear,
    gate_up=packed_linear.gate_up,
    head=packed_linear.head,
    advance=packed_linear.advance,
)
PACKED_PLAIN = PLAIN._replace(
    linear=packed_linear.linear_packed_plain,
    gate_up=packed_linear.gate_up_packed_plain,
    head=packed_linear.head_packed_plain,
    advance=packed_linear.advance_packed_plain,
)
