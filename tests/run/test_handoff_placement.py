"""Where prefill/decode fleets place requests, and what they find there."""

from vecsim.run.replay import replay

TIMING = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
PROMPT = list(range(8))


def _fleet(rows, prefill=1, decode=1, dp_size=1, **rank):
    rank = {"backend": "vllm", "timing_model": TIMING, "block_size": 4, **rank}
    return {
        "version": 1,
        "topology": {
            "kind": "disaggregated",
            "prefill": {"initial_workers": prefill},
            "decode": {"initial_workers": decode},
        },
        "engine": {"dp_size": dp_size, "rank": rank},
        "requests": [
            {"id": f"r{k}", "input_tokens": 9, "output_tokens": 2, **row}
            for k, row in enumerate(rows)
        ],
    }


def test_pinned_and_free_prompts_share_a_counter():
    # Ranks 0..5 of three prefill workers; a pin counts through the workers only.
    pins = [None, None, None, 1, None, 0, None]
    rows = [
        {"arrival_time_ms": k} | ({} if pin is None else {"prefill_dp_rank": pin})
        for k, pin in enumerate(pins)
    ]
    requests = replay(_fleet(rows, prefill=3, dp_size=2)).requests
    assert requests["prefill_worker_idx"].to_list() == [0, 1, 2, 1, 1, 4, 3]


def test_a_prompt_is_found_on_its_own_prefill_rank_only():
    # r0 and r2 go to the first worker, r1 and r3 to the second. r3 has half a prompt of r0's.
    prompts = [[*PROMPT, 8], [*PROMPT, 9], [*PROMPT, 10], [*PROMPT[:4], 4, 11, 12, 13, 14]]
    rows = [{"arrival_time_ms": 100 * k, "input_token_ids": ids} for k, ids in enumerate(prompts)]
    requests = replay(_fleet(rows, prefill=2)).requests
    assert requests["prefill_worker_idx"].to_list() == [0, 1, 0, 1]
    assert requests["reused_input_tokens"].to_list() == [0, 0, 8, 4]


# Transfers last 1 ms for each token of the blocks that a destination lacks, in blocks of 4.
BY_TOKEN = {
    "kv_transfer_bytes_per_token": 1_000_000,
    "kv_transfer_bandwidth": 1.0,
    "kv_transfer_timing_mode": "destination_missing",
}


def _transfers_ms(rows, **rank):
    """How long the transfers of a fleet with two decode workers last."""
    requests = replay(_fleet(rows, decode=2, **BY_TOKEN, **rank)).requests
    return (requests["destination_activated_ms"] - requests["destination_reserved_ms"]).to_list()


def _prompt(tail, arrival_ms=0, output=2):
    """Nine tokens, of which the first eight are those of all others with such a prompt."""
    ids = [*PROMPT, tail]
    return {"arrival_time_ms": arrival_ms, "input_token_ids": ids, "output_tokens": output}


def _other(length, arrival_ms=0):
    return {"arrival_time_ms": arrival_ms, "input_tokens": length}


def test_blocks_of_a_decoding_request_are_found():
    rows = [_prompt(8, output=500), _other(9), _prompt(9, 100)]
    assert _transfers_ms(rows) == [12.0, 12.0, 4.0]


def test_blocks_of_a_request_that_has_ended_are_found():
    rows = [_prompt(8), _other(9), _prompt(9, 100), _other(9, 200), _prompt(10, 300)]
    assert _transfers_ms(rows) == [12.0, 12.0, 4.0, 12.0, 4.0]


def test_blocks_of_a_transfer_under_way_are_not_found():
    # r2 asks at 20 ms; r0 is activated at 22.
    rows = [_prompt(8), _other(9), _prompt(9, 1)]
    assert _transfers_ms(rows) == [12.0, 12.0, 12.0]


def test_blocks_are_found_on_their_own_rank_only():
    rows = [_prompt(8), _prompt(9, 100), _prompt(10, 200), _prompt(11, 300)]
    assert _transfers_ms(rows) == [12.0, 12.0, 4.0, 4.0]


def test_of_a_half_evicted_prompt_the_beginning_is_found():
    # Five blocks a rank: r0 leaves two idle ones, of which r2, with four, evicts the second.
    rows = [_prompt(8), _other(9), _other(13, 100), _other(9, 200), _prompt(9, 300)]
    assert _transfers_ms(rows, num_gpu_blocks=5) == [12.0, 12.0, 16.0, 12.0, 8.0]
