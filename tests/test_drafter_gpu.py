"""The graph engine on a CUDA GPU against eager torch. cases.md: 3, 5, 7, 11, 13.

    python -m pytest -m gpu tests/test_drafter_gpu.py

Needs torch with CUDA, numpy, safetensors and pytest.
"""

from __future__ import annotations

import random
from pathlib import Path

import exports
import pytest
import torch
from drafts import assert_same_draft
from exports import make_export, random_prompt, random_weights

from drafter import Drafter
from engines import CHUNK_BUCKETS, EXTEND_TOKENS, SHORT_CONTEXT
from model import Config, KVCache, Qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
LIMIT = 5000
# Around what is special: each size of a captured prefill, the context bucket's edge for 16 tokens,
# the limit.
LENGTHS = (
    *(1, 2, 3),
    *(size + more for size in (EXTEND_TOKENS, *CHUNK_BUCKETS) for more in (0, 1)),
    *(SHORT_CONTEXT + more for more in (-17, -16, -15, -1, 0, 1)),
    *(LIMIT - 17, LIMIT - 16, LIMIT - 15, LIMIT - 2, LIMIT - 1, LIMIT),
)


@pytest.fixture(scope="module")
def long_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exports") / "long"
    return make_export(directory, max_position_embeddings=LIMIT, num_hidden_layers=3)


@pytest.fixture(scope="module")
def eager(long_export: Path) -> Drafter:
    """The oracle: eager, float32."""
    return Drafter(long_export, "cuda", engine="torch", dtype=torch.float32, cache_bytes=0)


@pytest.fixture(scope="module")
def graph(long_export: Path) -> Drafter:
    return Drafter(long_export, "cuda", engine="graph", dtype=torch.float32)


def same_as_cold(graph: Drafter, eager: Drafter, ids: list[int], count: int, **options) -> bool:
    """Draft on both, the oracle cold; True where equal, False at a near-tie, else fails."""
    draft = graph.draft(ids, count, **options)
    eager.reset()
    expected = eager.draft(ids, count, **options)
    return assert_same_draft(draft, expected, eager.engine.model, ids)


def test_graph_in_bf16_is_what_a_gpu_gets(long_export: Path):
    drafter = Drafter(long_export)
    assert (drafter.engine.name, drafter.dtype) == ("graph", torch.bfloat16)
    assert drafter.engine.buckets == [SHORT_CONTEXT, LIMIT]
    assert list(drafter.engine._captured) == [SHORT_CONTEXT]
    assert list(drafter.engine._replay_chunk) == list(CHUNK_BUCKETS)


def test_graph_drafts_equal_eager_ones_across_bucket_edges(graph: Drafter, eager: Drafter):
    """Cold, warm and one token on; case 11 at the limit, case 13 for the tolerance."""
    equal = total = 0
    for seed, length in enumerate(LENGTHS):
        ids = random_prompt(seed, length)
        contexts = [ids, ids, [*ids, 7]] if length < LIMIT else [ids, ids]
        for context in contexts:
            equal += same_as_cold(graph, eager, context, 16)
            total += 1
    print(f"{equal} of {total} drafts equal, the rest near-ties")
    assert equal >= 0.9 * total


def test_every_decode_step_is_a_replay(graph: Drafter):
    """case 3: the host's count, and the device's (checked in every draft)."""
    engine = graph.engine
    graph.reset()
    steps, replays, extends = engine.decode_steps, engine.graph_replays, engine.extend_replays
    prompt = random_prompt(1, 100)
    draft = graph.draft(prompt, 16).token_ids
    graph.draft(prompt + draft[:4] + [5], 16)
    graph.draft(prompt, 1)
    graph.draft(prompt, 0)
    assert engine.decode_steps - steps == 30
    assert engine.graph_replays - replays == 30
    assert engine.graph_replays == engine.decode_steps
    assert engine.extend_replays - extends == 4


def test_a_graph_that_does_nothing_is_noticed(graph: Drafter, monkeypatch: pytest.MonkeyPatch):
    """case 3: here every replay is counted on the host and none reaches the device."""
    prompt = random_prompt(2, 50)
    graph.draft(prompt, 4)
    begin = type(graph.engine).begin

    def without_replay(engine, reach: int) -> None:
        begin(engine, reach)
        engine._replay_step = lambda: None

    with monkeypatch.context() as patch:
        patch.setattr(type(graph.engine), "begin", without_replay)
        with pytest.raises(RuntimeError, match="0 steps ran on the device, expected 4"):
            graph.draft(prompt, 4)
    assert len(graph.draft(prompt, 4).token_ids) == 4


def test_a_bucket_is_captured_at_first_use_beside_live_kv(long_export: Path, eager: Drafter):
    """The capture's own writes go where no request's KV is."""
    graph = Drafter(long_export, "cuda", engine="graph", dtype=torch.float32)
    ids = random_prompt(3, SHORT_CONTEXT - 20)
    assert same_as_cold(graph, eager, ids, 8)
    assert LIMIT not in graph.engine._captured
    follow_up = ids + graph.draft(ids, 8).token_ids + random_prompt(4, 20)
    draft = graph.draft(follow_up, 8)
    assert LIMIT in graph.engine._captured
    assert draft.cached_tokens == len(ids) + 7
    assert same_as_cold(graph, eager, follow_up, 8)


def test_any_order_of_requests_drafts_what_a_cold_start_does(graph: Drafter, eager: Drafter):
    """case 7: extending, rewinding, branching, switching; a small cache evicts meanwhile."""
    graph.reset()
    graph.cache.capacity = 12 * 64 * 2 * graph.kv.keys[:, :, :1].nbytes
    chance = random.Random(0)
    conversations = [random_prompt(i, 150 + i) for i in range(4)]
    equal = 0
    for _ in range(80):
        which = chance.randrange(4)
        ids = conversations[which]
        draft = graph.draft(ids, 16).token_ids
        equal += same_as_cold(graph, eager, ids, 16)
        kind = chance.random()
        if kind < 0.6:
            ids = ids + draft[: chance.randrange(17)] + [chance.randrange(512)]
        else:
            ids = ids[: chance.randrange(1, len(ids) + 1)]
            ids = ids + random_prompt(chance.randrange(100), chance.choice((1, 5, 40)))
        conversations[which] = ids[:1500]
    assert graph.cache.statistics.hits > 0 and graph.cache.statistics.evictions > 0
    assert equal >= 72


def test_ends_and_low_confidence_as_on_the_plain_path(
    graph: Drafter, eager: Drafter, tmp_path: Path
):
    """case 18: the graph computes all steps; what follows an end is dropped with its KV."""
    prompt = random_prompt(5, 60)
    plain = eager.draft(prompt, 16)
    lowest = min(plain.probabilities[1:])
    assert same_as_cold(graph, eager, prompt, 16, min_probability=lowest * 1.001)
    sizes = {"max_position_embeddings": LIMIT, "num_hidden_layers": 3}
    directory = make_export(tmp_path / "eos", eos=(plain.token_ids[4], 1000), **sizes)
    drafter = Drafter(directory, "cuda", engine="graph", dtype=torch.float32)
    first = plain.token_ids.index(plain.token_ids[4])
    draft = drafter.draft(prompt, 16)
    assert (draft.token_ids, draft.finish_reason) == (plain.token_ids[: first + 1], "stop")
    follow_up = drafter.draft(prompt + draft.token_ids + [9], 0)
    assert follow_up.cached_tokens == len(prompt) + first


def test_replays_follow_the_weights(long_export: Path, eager: Drafter):
    """case 5: nothing drafted is stored; the same prompt after a change of the final norm."""
    graph = Drafter(long_export, "cuda", engine="graph", dtype=torch.float32)
    prompt = random_prompt(6, 70)
    before = graph.draft(prompt, 16).token_ids
    assert graph.draft(prompt, 16).token_ids == before
    changed = Drafter(long_export, "cuda", engine="torch", dtype=torch.float32)
    with torch.no_grad():
        for drafter in (graph, changed):
            drafter.engine.model.model.norm.weight[::2] *= -1
    assert graph.draft(prompt, 16).token_ids != before
    assert same_as_cold(graph, changed, prompt, 16)


def test_bf16_graph_agrees_with_bf16_eager(long_export: Path):
    """Other shapes round otherwise in bf16: equal up to a margin that fits this model's logits,
    whose spread is about 0.4; the first differences are printed."""
    graph = Drafter(long_export, "cuda", engine="graph")
    eager = Drafter(long_export, "cuda", engine="torch", cache_bytes=0)
    equal = 0
    for seed in range(40):
        ids = random_prompt(seed, 20 + 13 * seed)
        eager.reset()
        expected = eager.draft(ids, 16)
        draft = graph.draft(ids, 16)
        equal += assert_same_draft(draft, expected, eager.engine.model, ids, tolerance=0.05)
    print(f"{equal} of 40 bf16 drafts equal, the rest near-ties below 0.05")


def test_cuda_float32_drafts_equal_the_cpu_ones(long_export: Path, graph: Drafter):
    cpu = Drafter(long_export, "cpu", cache_bytes=0)
    for seed, length in enumerate((5, 100, 700)):
        ids = random_prompt(seed, length)
        assert_same_draft(graph.draft(ids, 16), cpu.draft(ids, 16), cpu.engine.model, ids)


# ---------------------------------------------------------------------------------------- logits


def planted_weights(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """As trained Qwen models have them: from the first layer on, a few channels of the residual are
    thousands of times the rest, and the norms after it undo that."""
    weights = random_weights(config, seed)
    channels = [3, 40]
    weights["model.layers.0.mlp.down_proj.weight"][channels] *= 3000
    for name, weight in weights.items():
        residual = name.endswith("norm.weight") and len(weight) == config.hidden_size
        if residual and "layers.0." not in name:
            weight *= 300
            weight[channels] /= 300 * 3000
    return weights


@pytest.fixture(scope="module", params=["random", "massive activations"])
def wide_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_position_embeddings": LIMIT, "num_hidden_layers": 3, "head_dim": 128}
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "random":
            patch.setattr(exports, "random_weights", planted_weights)
        return make_export(tmp_path_factory.mktemp("exports") / "wide", seed=1, **sizes)


@torch.inference_mode()
def plain_logits(model: Qwen3, ids: list[int]) -> torch.Tensor:
    dtype = model.model.embed_tokens.weight.dtype
    kv = KVCache(model.config, len(ids), torch.device("cuda"), dtype)
    positions = torch.arange(len(ids), device="cuda")
    token_ids = torch.tensor([ids], device="cuda")
    hidden = model(token_ids, positions[None], kv.attention(positions, len(ids)))
    return model.logits(hidden[0, -1:])[0]


@torch.inference_mode()
def poison(drafter: Drafter) -> None:
    """What earlier work may have left: no result, and KV that is finite but wrong."""
    drafter.reset()
    decoder = drafter.engine.decoder
    decoder.logits.fill_(torch.nan)
    decoder._result.fill_(-1)
    drafter.kv.keys.fill_(50.0)
    drafter.kv.values.fill_(-50.0)


def repeated_logits(graph: Drafter, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The context with all drafted tokens but the last, and the logits that this one was chosen by;
    from two runs, which have to agree to the bit."""
    runs = []
    for _ in range(2):
        poison(graph)
        draft = graph.draft(ids, count)
        runs.append((draft.token_ids, draft.probabilities, graph.engine.decoder.logits.clone()))
    (tokens, probabilities, logits), again = runs
    assert (tokens, probabilities) == again[:2] and torch.equal(logits, again[2])
    assert tokens[-1] == logits.argmax().item()
    assert probabilities[-1] == pytest.approx(logits.softmax(-1).max().item(), rel=1e-4)
    return ids + tokens[:-1], logits


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


WIDE_LENGTHS = (1, 5, 8, 9, 33, 300, 2048, 2049, SHORT_CONTEXT + 4, LIMIT - 16)


def test_float32_logits_follow_the_oracle(wide_export: Path):
    """After a prefill (count 1) and after 15 steps more: every kernel, massive activations too."""
    graph = Drafter(wide_export, "cuda", engine="graph", dtype=torch.float32)
    oracle = Drafter(wide_export, "cuda", engine="torch", dtype=torch.float32).engine.model
    for length in WIDE_LENGTHS:
        for count in (1, 16):
            ids, logits = repeated_logits(graph, random_prompt(length, length), count)
            error = relative_error(logits, plain_logits(oracle, ids))
            assert error < 1e-3, f"{error:.1e} at {length}, token {count}"


def test_bf16_logits_are_as_close_as_those_of_plain_bf16(wide_export: Path):
    """Against float32 on the same bf16 weights. How far rounding carries depends on the weights
    (here up to several percent), so the plain bf16 path sets the measure."""
    graph = Drafter(wide_export, "cuda", engine="graph")
    plain = Drafter(wide_export, "cuda", engine="torch").engine.model
    oracle = Drafter(wide_export, "cuda", engine="torch", dtype=torch.float32).engine.model
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), oracle.parameters(), strict=True):
            theirs.copy_(ours)
    errors = []
    for length in WIDE_LENGTHS:
        for count in (1, 16):
            ids, logits = repeated_logits(graph, random_prompt(length, length), count)
            expected = plain_logits(oracle, ids)
            bf16 = plain_logits(plain, ids)
            errors.append((relative_error(logits, expected), relative_error(bf16, expected)))
    ours, theirs = torch.tensor(errors).square().mean(0).sqrt().tolist()
    print(f"relative error {ours:.1e}, plain bf16 {theirs:.1e}")
    assert ours < 1.3 * theirs
