"""The drafter against the plain path, whatever its caches hold. cases.md: 5 – 11, 13, 15, 18."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafts import assert_same_draft, use_uncaptured_graphs
from exports import DRAFT_LENGTH, make_export, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import ArtifactError
from cache import PrefixCache, blake2b, common_prefix, to_ids
from drafter import Cancelled, Drafter
from engines import GraphEngine, TorchEngine, choose
from formats import Export
from model import KVCache, greedy

LIMIT = 512


@pytest.fixture(scope="module", params=["torch", "graph without CUDA"])
def drafter(request: pytest.FixtureRequest, export: Path) -> Drafter:
    made = Drafter(export, device="cpu")
    return made if request.param == "torch" else use_uncaptured_graphs(made)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that contexts of a test's length are prefilled in several chunks."""
    for engine in (TorchEngine, GraphEngine):
        monkeypatch.setattr(engine, "prefill_chunk", 48)


@pytest.fixture(scope="module")
def fresh(export: Path) -> Iterator[Drafter]:
    """The cold reference: forgets everything between drafts (see `cold`)."""
    yield Drafter(export, device="cpu", cache_bytes=0)


def cold(fresh: Drafter, *args, **kwargs):
    fresh.reset()
    return fresh.draft(*args, **kwargs)


# --------------------------------------------------------------------------- against references


def test_draft_is_the_plain_greedy_continuation(drafter: Drafter):
    for seed, length in enumerate((1, 2, 47, 48, 49, 200)):
        prompt = random_prompt(seed, length)
        expected = greedy(drafter.engine.model, prompt, DRAFT_LENGTH, drafter.eos_token_ids)
        draft = drafter.draft(prompt, DRAFT_LENGTH)
        assert draft.token_ids == expected.token_ids
        assert draft.finish_reason == "length"


def test_draft_equals_transformers_generate(export: Path, fresh: Drafter):
    """The same dequantised weights in the reference library, greedy."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**json.loads((export / "config.json").read_text()))
    model = Qwen3ForCausalLM(config).float()
    weights = dict(Export(export).load(torch.float32).named_parameters())
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    for seed in range(4):
        prompt = random_prompt(seed, 30 + seed)
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        assert cold(fresh, prompt, 16).token_ids == out[0, len(prompt) :].tolist()


def test_probabilities_are_the_softmax_of_the_forward_pass(drafter: Drafter):
    prompt = random_prompt(1, 20)
    draft = drafter.draft(prompt, 4)
    for i, (token, probability) in enumerate(
        zip(draft.token_ids, draft.probabilities, strict=True)
    ):
        context = prompt + draft.token_ids[:i]
        with torch.inference_mode():
            model = drafter.engine.model
            positions = torch.arange(len(context))
            kv = KVCache(model.config, len(context), drafter.device, torch.float32)
            attend = kv.attention(positions, len(context))
            hidden = model(torch.tensor([context]), positions[None], attend)
            expected = model.logits(hidden[0, -1:]).softmax(-1)[0, token].item()
        assert probability == pytest.approx(expected, rel=1e-4)


def test_chunks_beyond_the_captured_sizes_use_torchs_attention(export: Path, fresh: Drafter):
    drafter = use_uncaptured_graphs(Drafter(export, device="cpu"))
    drafter.engine._chunks = [8]
    for length in (9, 48, 49, 200):
        prompt = random_prompt(length, length)
        replays = drafter.engine.extend_replays
        assert drafter.draft(prompt, 4).token_ids == cold(fresh, prompt, 4).token_ids
        assert drafter.engine.extend_replays - replays <= 1  # what was left for the last chunk


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    assert choose(logits)[0].item() == 1


# ------------------------------------------------------------------------------------- caching


class Expected:
    """Which positions may be reused, told without blocks: what is live, and what was parked.

    Holds with memory for everything. Contexts that requests sent are kept for ever; what was
    drafted is kept with them, unless the next request carried on and took other tokens.
    """

    def __init__(self):
        self.live, self.context, self.parked = to_ids([]), 0, []

    def cached(self, ids: list[int]) -> tuple[int, int]:
        """(positions of the live cache, positions with the parked ones)."""
        ids = to_ids(ids)
        shared = common_prefix(self.live, ids)
        if shared < self.context:
            self.parked.append(self.live)
        live = min(shared, len(ids) - 1)
        return live, max([live] + [common_prefix(p, ids[:-1]) for p in self.parked])

    def drafted(self, ids: list[int], draft: list[int]) -> None:
        self.live, self.context = to_ids(ids + draft[:-1]), len(ids)


steps = st.lists(
    st.tuples(
        st.sampled_from(["new", "accept", "accept", "rewind", "branch", "repeat"]),
        st.integers(0, 3),  # which conversation
        st.integers(0, 150),  # where, or how many
        st.integers(0, 5),  # max_tokens
    ),
    min_size=2,
    max_size=12,
)


def next_context(step: tuple, conversations: list[list[int]], draft: list[int]) -> list[int]:
    """The context that a client sends next; `conversations` is updated."""
    kind, which, n, _ = step
    ids = conversations[which]
    if kind == "new" or not ids:
        ids = random_prompt(which, 1 + n)  # of one text per conversation: overlaps
    elif kind == "accept":  # some of the draft, then the target's own token
        ids = ids + draft[: n % 6] + [(n * 31) % 512]
    elif kind == "rewind":
        ids = ids[: max(1, len(ids) - n)]
    elif kind == "branch":
        ids = ids[: max(1, len(ids) - n)] + [n, which]
    conversations[which] = ids[:400]
    return conversations[which]


@pytest.mark.parametrize("blocks", [100_000, 5, 0])
@settings(max_examples=25, deadline=None)
@given(steps=steps)
def test_a_warm_cache_drafts_what_a_cold_one_does(
    drafter: Drafter, fresh: Drafter, blocks: int, steps: list[tuple]
):
    """case 7: any order of extending, rewinding, branching, repeating, switching and eviction."""
    drafter.reset()
    drafter.cache.capacity = blocks * 64 * 2 * drafter.kv.keys[:, :, :1].nbytes  # until a reset
    expected, conversations, drafts = Expected(), [[], [], [], []], [[], [], [], []]
    for step in steps:
        ids = next_context(step, conversations, drafts[step[1]])
        draft = drafter.draft(ids, step[3])
        live, everything = expected.cached(ids)
        if blocks == 100_000:
            assert draft.cached_tokens == everything
        else:
            assert live <= draft.cached_tokens <= everything
        assert drafter.cache.statistics.bytes <= drafter.cache.capacity
        assert_same_draft(draft, cold(fresh, ids, step[3]), fresh.engine.model, ids)
        expected.drafted(ids, draft.token_ids)
        drafts[step[1]] = draft.token_ids


def test_a_repeated_prompt_is_drafted_by_the_model_again(export: Path):
    """case 5: when the weights change, a repeated prompt follows them, though its KV is cached."""
    drafter = Drafter(export, device="cpu")
    prompt = random_prompt(2, 40)
    before = drafter.draft(prompt, 8).token_ids
    steps = drafter.engine.decode_steps
    assert drafter.draft(prompt, 8).token_ids == before
    assert drafter.engine.decode_steps == steps + 7
    with torch.no_grad():
        # The final norm is no part of any KV: what is cached stays valid.
        drafter.engine.model.model.norm.weight[::2] *= -1
    after = drafter.draft(prompt, 8)
    assert after.cached_tokens == len(prompt) - 1
    assert after.token_ids != before
    assert after.token_ids == greedy(drafter.engine.model, prompt, 8, ()).token_ids


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_a_follow_up_keeps_exactly_the_accepted_tokens(
    drafter: Drafter, fresh: Drafter, accepted: int
):
    """case 6: rejected KV is not used; of a fully accepted draft the last token is computed."""
    drafter.reset()
    prompt = random_prompt(3, 70)
    draft = drafter.draft(prompt, 4).token_ids
    bonus = next(t for t in range(512) if t not in draft)
    follow_up = prompt + draft[:accepted] + [bonus]
    second = drafter.draft(follow_up, 4)
    assert second.cached_tokens == len(prompt) + min(accepted, 3)
    assert second.token_ids == cold(fresh, follow_up, 4).token_ids


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_the_same_prompt_again_computes_one_position(drafter: Drafter, max_tokens: int):
    """case 8: at once, and after another conversation."""
    drafter.reset()
    prompt, other = random_prompt(4, 150), random_prompt(5, 90)
    for ids, cached in ((prompt, 0), (prompt, 149), (other, 0), (prompt, 149), (other, 89)):
        assert drafter.draft(ids, max_tokens).cached_tokens == cached


def test_conversations_do_not_leak_into_each_other(drafter: Drafter, fresh: Drafter):
    """case 9: turn about, each conversation gets what it gets alone."""
    drafter.reset()
    contexts = [random_prompt(seed, 60 + seed) for seed in range(4)]
    for _ in range(3):
        for i, ids in enumerate(contexts):
            draft = drafter.draft(ids, 6).token_ids
            assert draft == cold(fresh, ids, 6).token_ids
            contexts[i] = ids + draft[:3] + [i]


def test_colliding_keys_do_not_change_a_draft(drafter: Drafter, fresh: Drafter):
    """case 10: with two distinct keys in all, look-ups collide and drafts stay right."""
    drafter.reset()
    drafter.cache = PrefixCache(
        1 << 30, "x", torch.float32, hasher=lambda data: bytes([blake2b(data)[0] & 1])
    )
    for turn in range(12):
        ids = random_prompt(turn % 3, 130)
        assert drafter.draft(ids, 4).token_ids == cold(fresh, ids, 4).token_ids
    assert drafter.cache.statistics.collisions > 0


def test_a_cancelled_request_leaves_a_valid_state(drafter: Drafter, fresh: Drafter):
    drafter.reset()
    prompt = random_prompt(6, 200)
    for polls in range(4):
        answers = iter([False] * polls + [True] * 100)
        with pytest.raises(Cancelled):
            drafter.draft(prompt, 4, cancelled=lambda answers=answers: next(answers))
    draft = drafter.draft(prompt, 4)
    assert draft.cached_tokens >= 48  # what the cancelled ones had computed
    assert draft.token_ids == cold(fresh, prompt, 4).token_ids


@pytest.mark.parametrize("failing_chunk", [1, 2])
def test_an_exception_in_the_forward_pass_leaves_a_valid_state(
    drafter: Drafter, fresh: Drafter, monkeypatch: pytest.MonkeyPatch, failing_chunk: int
):
    """It comes after the chunk has overwritten the KV of the conversation that was live."""
    drafter.reset()
    earlier, prompt = random_prompt(6, 200), random_prompt(7, 200)
    drafter.draft(earlier, 4)
    extend, calls = drafter.engine.extend, []

    def failing(*args, **kwargs):
        calls.append(args)
        extend(*args, **kwargs)
        if len(calls) == failing_chunk:
            raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(drafter.engine, "extend", failing)
        with pytest.raises(MemoryError):
            drafter.draft(prompt, 4)
    for ids in (earlier, prompt[:60] + random_prompt(8, 40), prompt):
        assert drafter.draft(ids, 4).token_ids == cold(fresh, ids, 4).token_ids


# -------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("room", [0, 1, 3, 4, 5])
def test_a_draft_is_clamped_to_the_room_that_is_left(drafter: Drafter, room: int):
    """case 11."""
    prompt = random_prompt(9, LIMIT - room)
    draft = drafter.draft(prompt, 4)
    assert len(draft.token_ids) == min(room, 4)
    assert draft.finish_reason == ("context" if room < 4 else "length")
    expected = greedy(drafter.engine.model, prompt, min(room, 4), ())
    assert draft.token_ids == expected.token_ids


def test_a_lower_context_limit_is_kept(export: Path):
    drafter = Drafter(export, device="cpu", context_limit=100)
    assert drafter.draft(random_prompt(1, 99), 4).finish_reason == "context"
    with pytest.raises(ValueError, match="101 token ids"):
        drafter.draft(random_prompt(1, 101), 4)
    for limit in (LIMIT + 1, 0, 23):
        with pytest.raises(ArtifactError, match="--max-context"):
            Drafter(export, device="cpu", context_limit=limit)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens"),
    [([], 4), ([-1], 4), ([512], 4), ([2**40], 4), ([1], 17), ([1], -1), ([1] * (LIMIT + 1), 4)],
)
def test_arguments_out_of_range_are_refused(drafter: Drafter, token_ids: list, max_tokens: int):
    with pytest.raises(ValueError):
        drafter.draft(token_ids, max_tokens)
    assert len(drafter.draft([1], 4).token_ids) == 4


def test_no_tokens_asked_for_keeps_the_context(drafter: Drafter):
    drafter.reset()
    prompt = random_prompt(10, 80)
    draft = drafter.draft(prompt, 0)
    assert (draft.token_ids, draft.probabilities, draft.finish_reason) == ([], [], "length")
    assert drafter.draft([*prompt, 1], 2).cached_tokens == 80


def test_a_draft_ends_before_an_improbable_token(drafter: Drafter, fresh: Drafter):
    drafter.reset()
    prompt = random_prompt(11, 30)
    whole = cold(fresh, prompt, 8)
    lowest = min(whole.probabilities[1:])
    cut = whole.probabilities.index(lowest)
    draft = drafter.draft(prompt, 8, min_probability=lowest * 1.001)
    expected = next(i for i, p in enumerate(whole.probabilities) if p < lowest * 1.001)
    assert expected <= cut
    assert draft.token_ids == whole.token_ids[:expected]
    assert draft.finish_reason == "confidence"
    # The token that was not taken needed the KV of all that were.
    follow_up = prompt + draft.token_ids + [1]
    second = drafter.draft(follow_up, 4)
    assert second.cached_tokens == len(prompt) + expected
    assert second.token_ids == cold(fresh, follow_up, 4).token_ids


@pytest.mark.parametrize("graph", [False, True])
def test_a_draft_stops_at_the_first_end_and_includes_it(
    tmp_path: Path, fresh: Drafter, graph: bool
):
    """case 18: each of the two ids ends a draft, the earlier one first; KV stays right."""
    prompt = random_prompt(12, 50)
    plain = cold(fresh, prompt, 16).token_ids
    second, fifth = plain[2], plain[5]
    assert plain.index(second) == 2 and plain.index(fifth) == 5
    unused = next(t for t in range(512) if t not in plain)
    for eos, length in (((second, fifth), 3), ((fifth, unused), 6), ((unused, second), 3)):
        directory = make_export(tmp_path / f"{eos[0]}-{eos[1]}", eos=eos)
        drafter = Drafter(directory, device="cpu")
        drafter = use_uncaptured_graphs(drafter) if graph else drafter
        draft = drafter.draft(prompt, 16)
        assert draft.token_ids == plain[:length]
        assert draft.finish_reason == "stop"
        assert drafter.draft(prompt, length).finish_reason == "stop"
        follow_up = drafter.draft(prompt + plain[:length] + [unused], 4)
        assert follow_up.cached_tokens == len(prompt) + length - 1
        assert (
            follow_up.token_ids == cold(fresh, prompt + plain[:length] + [unused], 4).token_ids[:4]
        )


def test_conversation_keys_follow_tokens_and_contract(export: Path, tmp_path: Path):
    drafter = Drafter(export, device="cpu")
    keys = {drafter.draft(ids, 0).conversation_key for ids in ([1], [2], [1, 2], [258])}
    assert len(keys) == 4
    assert drafter.draft([1], 3).conversation_key in keys
    other = Drafter(make_export(tmp_path / "other", seed=5), device="cpu")
    assert other.draft([1], 0).conversation_key not in keys


# ------------------------------------------------------------------------------- loading checks


@pytest.fixture
def broken(export: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(export, tmp_path / "broken"))


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_flipped_byte_is_found(broken: Path):
    """case 15."""
    path = broken / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"sha256.*quantize\.py"):
        Drafter(broken, device="cpu")


def test_a_known_answer_that_is_not_repeated_is_found(broken: Path):
    """case 15: here the file is as stated and the forward pass is not (another rope_theta)."""
    edit(broken / "config.json", lambda c: c.update(rope_theta=10_000.0))
    with pytest.raises(ArtifactError, match=r"known answer is not repeated.*quantize\.py"):
        Drafter(broken, device="cpu")


def test_a_near_tie_in_the_known_answer_is_no_fault(broken: Path):
    """case 13: below the tolerance rounding decides, and what follows is another text."""

    def plant(margin: float):
        def change(quantization: dict) -> None:
            answer = quantization["known_answer"]
            answer["margins"][5] = margin
            answer["draft_token_ids"][5:] = [0] * (DRAFT_LENGTH - 5)

        return change

    edit(broken / "quantization.json", plant(1e-4))
    Drafter(broken, device="cpu")
    edit(broken / "quantization.json", plant(1e-2))
    with pytest.raises(ArtifactError, match="token 5"):
        Drafter(broken, device="cpu")


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "quantization.json", "config.json", "contract.json"]
)
def test_a_missing_file_is_named(broken: Path, name: str):
    (broken / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        Drafter(broken, device="cpu")


def test_an_export_without_a_known_answer_is_refused(broken: Path):
    edit(broken / "quantization.json", lambda q: q.pop("known_answer"))
    with pytest.raises(ArtifactError, match="no known answer"):
        Drafter(broken, device="cpu")


def test_a_fast_path_that_cannot_run_is_an_error(export: Path):
    with pytest.raises(ArtifactError, match="--engine graph"):
        Drafter(export, device="cpu", engine="graph")
    with pytest.raises(ArtifactError, match="there are torch, graph, persistent"):
        Drafter(export, device="cpu", engine="warp")
    if not torch.cuda.is_available():
        with pytest.raises(ArtifactError, match="no CUDA GPU"):
            Drafter(export, device="cuda")
        assert Drafter(export).engine.name == "torch"
