"""What carries loss, what sees what, and how rows are filled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from profiles import random_qwen3

from artifacts import ArtifactError
from losses import ChunkedLoss, Distiller, sequence_loss
from model import load_checkpoint, packed_attention
from objectives import OBJECTIVES, Labels, cross_entropy
from packing import IGNORE, collate, make_example, pack
from parallel import World
from training import make_optimizer, train_step

EOS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("losses") / "model"
    random_qwen3(directory, vocab_size=300, seed=4)
    return load_checkpoint(directory, torch.float32)


def test_only_output_positions_carry_loss_and_the_end_is_learnt():
    example = make_example([1, 2, 3], [4, 5, EOS], 100)
    assert example.token_ids == [1, 2, 3, 4, 5]
    assert example.targets == [IGNORE, IGNORE, 4, 5, EOS]


def test_a_label_cut_off_by_length_teaches_no_end():
    """Neither the label's own cut nor the row's may put an EOS where the teacher had none."""
    cut = make_example([1, 2, 3], [4, 5, 6], 100)
    assert EOS not in cut.targets
    short = make_example([1, 2, 3], [4, 5, EOS], 4)
    assert short.token_ids == [1, 2, 3, 4]
    assert short.targets == [IGNORE, IGNORE, 4, 5]


def test_a_prompt_that_fills_the_row_is_not_an_example():
    assert make_example([1] * 5, [2], 4) is None
    assert make_example([1] * 4, [2], 4).targets == [IGNORE] * 3 + [2]
    assert make_example([1], [], 4) is None


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    seed=st.text(max_size=4),
)
def test_packing_places_every_sequence_once_and_overfills_no_row(lengths, seed):
    rows = pack(lengths, 50, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 50 for row in rows)
    assert rows == pack(lengths, 50, seed)


def test_packing_fills_rows_well():
    lengths = torch.randint(20, 200, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 512, "x")
    assert sum(lengths) / (512 * len(rows)) > 0.85
    assert rows != pack(lengths, 512, "y")


def random_examples(count):
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(300, (n,), generator=generator).tolist()

    return [make_example(ids(5 + i), ids(3 + 2 * i), 100) for i in range(count)]


def test_packed_loss_and_gradient_equal_those_of_the_sequences_alone(model):
    """Against plain cross-entropy over each sequence by itself."""
    examples = random_examples(5)
    packed = sequence_loss(model, collate([examples[:2], examples[2:]]), chunk=4)
    packed.total.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros(())
    for example in examples:
        batch = collate([[example]])
        causal = torch.zeros_like(batch.segments)
        hidden = model(batch.token_ids, batch.positions, packed_attention(causal))
        total = total + F.cross_entropy(
            model.logits(hidden[0])[batch.where], batch.targets, reduction="sum"
        )
    total.backward()
    torch.testing.assert_close(packed.total, total, rtol=1e-5, atol=1e-4)
    assert packed.positions == sum(t != IGNORE for e in examples for t in e.targets)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-4)
    model.zero_grad()


def test_gradients_that_are_not_finite_stop_the_run_before_the_weights_change(model):
    broken = copy.deepcopy(model)
    broken.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    distiller = Distiller(broken, cross_entropy)
    optimizer = make_optimizer(distiller, "adamw", 1e-3, 0.0)
    before = broken.model.norm.weight.clone()
    with pytest.raises(ArtifactError, match="--learning-rate"):
        train_step(distiller, optimizer, [collate([random_examples(2)])], World(0, 1, "cpu"))
    assert torch.equal(broken.model.norm.weight, before)


@pytest.mark.parametrize("name", ["ce", "topk-kl", "topk-tv"])
def test_chunks_give_the_loss_and_gradient_of_all_logits_at_once(model, name):
    """The gradient that is taken in the forward pass is autograd's own, importance included."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 64, generator=generator, requires_grad=True)
    weight = torch.randn(300, 64, generator=generator, requires_grad=True)
    top = torch.randn(7, 300, generator=generator).log_softmax(-1).topk(5)
    labels = Labels(top.indices[:, 0], top.indices, top.values)
    importance = torch.rand(7, generator=generator)
    objective = OBJECTIVES[name]
    total, correct = ChunkedLoss.apply(hidden, weight, labels, importance, objective, 3)
    (2.5 * total).backward()
    found = [hidden.grad.clone(), weight.grad.clone()]
    hidden.grad = weight.grad = None
    logits = hidden @ weight.t()
    expected = (objective(logits, labels) * importance).sum()
    (2.5 * expected).backward()
    torch.testing.assert_close(total, expected)
    assert correct == (logits.argmax(-1) == labels.targets).sum()
    torch.testing.assert_close(found, [hidden.grad, weight.grad])
