"""The verifier's arithmetic: rounds, acceptance by position, net speed-up, the best length."""

from __future__ import annotations

import pytest

import evaluate
import rounds
from artifacts import ArtifactError
from client import Reply
from evaluate import check_ratio
from rounds import draft_rounds, matching, net_speedup, summarise

PROMPT = [1, 2, 3]


class Scripted:
    """A client whose drafts agree with `truth` for `good` tokens, then go wrong."""

    def __init__(self, truth, good, decode_ms=1.0):
        self.truth, self.good, self.decode_ms = truth, good, decode_ms
        self.requests = []

    def draft(self, token_ids, max_tokens, contract):
        self.requests.append((list(token_ids), max_tokens))
        at = len(token_ids) - len(PROMPT)
        draft = [
            token if i < self.good else -1
            for i, token in enumerate(self.truth[at : at + max_tokens])
        ]
        decode = self.decode_ms * len(draft)
        return Reply({"draft_token_ids": draft}, decode + 3.0, 0.0, 1.0, decode)


def play(length, good, max_tokens=16):
    truth = list(range(100, 100 + length))
    client = Scripted(truth, good)
    label = {"prompt_token_ids": PROMPT, "output_token_ids": truth}
    return client, draft_rounds(client, label, max_tokens, "c")


def test_a_perfect_draft_needs_one_round_for_seventeen_tokens():
    client, rounds = play(34, good=16)
    assert [r.accepted for r in rounds] == [16, 16]
    assert [r.gained for r in rounds] == [17, 17]
    assert [ids for ids, _ in client.requests][1] == PROMPT + list(range(100, 117))


def test_a_draft_that_is_always_wrong_moves_by_the_targets_own_token():
    client, rounds = play(5, good=0)
    assert [r.accepted for r in rounds] == [0] * 5
    assert [len(ids) for ids, _ in client.requests] == [3, 4, 5, 6, 7]


def test_the_context_after_a_rejection_holds_the_teachers_token():
    client, rounds = play(10, good=3)
    assert [r.accepted for r in rounds] == [3, 3, 2]
    assert client.requests[1][0] == PROMPT + [100, 101, 102, 103]


def test_no_round_asks_for_more_than_the_label_covers():
    client, rounds = play(20, good=16)
    assert [asked for _, asked in client.requests] == [16, 3]
    assert rounds[-1].accepted == 3
    assert rounds[-1].gained == 3, "nothing follows the end of the label"


@pytest.mark.parametrize(
    ("draft", "truth", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 9, 3], [1, 2, 3], 1), ([1, 2, 3], [1], 1)],
)
def test_matching_is_the_common_prefix(draft, truth, length):
    assert matching(draft, truth) == length


def test_acceptance_by_position_counts_rounds_that_reach_it():
    _, rounds = play(10, good=3)  # accepted 3 of 10 asked, 3 of 6, 2 of 2
    figures = summarise(rounds, 1.0, 16)
    assert figures["mean_accepted"] == pytest.approx(8 / 3)
    assert figures["acceptance_at"][:4] == [1.0, 1.0, 1.0, 0.0]
    assert figures["acceptance_at"][15] is None, "no round asked for 16"
    assert figures["fully_accepted"] == pytest.approx(1 / 3)


def test_fixed_overhead_is_shown_apart_from_time_per_token():
    _, rounds = play(34, good=16)
    figures = summarise(rounds, 1.0, 16)
    assert figures["overhead_ms_p50"] == pytest.approx(2.0)
    assert figures["prefill_ms_p50"] == pytest.approx(1.0)
    assert figures["decode_ms_per_token"] == pytest.approx(1.0)


def figures_for(length, good, decode_ms):
    truth = list(range(100, 100 + length))
    client = Scripted(truth, good, decode_ms)
    label = {"prompt_token_ids": PROMPT, "output_token_ids": truth}
    return summarise(draft_rounds(client, label, 16, "c"), 1.0, 16)


def test_a_well_accepted_but_slow_draft_is_called_a_loss():
    slow, fast = figures_for(170, 16, 10.0), figures_for(170, 16, 0.1)
    assert slow["mean_accepted"] == fast["mean_accepted"] == 16
    assert net_speedup(slow, 5.0)["verdict"] == "loss"
    assert net_speedup(fast, 5.0)["verdict"] == "gain"


def test_the_best_length_follows_cost_longer_is_not_better_by_itself():
    figures = figures_for(400, 4, 1.0)
    net = net_speedup(figures, 5.0)
    assert net["best_draft_length"] == 4
    assert net["speedup_at_best_length"] > net["speedup_by_length"][15]
    cheap = figures_for(400, 16, 0.001)
    assert net_speedup(cheap, 5.0)["best_draft_length"] == 16


def test_speedup_follows_the_wall_time_model():
    figures = figures_for(170, 16, 0.5)  # 17 tokens a round; 8 + 3 ms a draft
    assert net_speedup(figures, 5.0)["speedup"] == pytest.approx(17 * 5.0 / (5.0 + 11.0))


def test_a_ratio_that_is_missed_ends_with_an_error():
    results = {"base": {"mean_accepted": 2.0}, "quantised": {"mean_accepted": 2.9}}
    check_ratio(results, 1.4)
    with pytest.raises(ArtifactError, match="less than 1.5 times"):
        check_ratio(results, 1.5)
    with pytest.raises(ArtifactError, match="measure both"):
        check_ratio({"base": {"mean_accepted": 2.0}}, 1.5)


def test_models_map_to_exports_and_the_commands_that_make_them():
    import quantize

    for name, directory in evaluate.EXPORTS.items():
        args = quantize.parse_args(["--profile", "tiny", *evaluate.MAKE[name].split()])
        assert quantize.export_name(args) == directory


def test_percentiles_are_nearest_rank():
    assert rounds.percentile([1, 2], 0.5) == 1
    assert rounds.percentile([1, 2, 3], 0.5) == 2
    assert rounds.percentile(list(range(1, 101)), 0.95) == 95
    assert rounds.percentile([7], 0.95) == 7
