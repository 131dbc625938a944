"""Where prefill/decode fleets place requests, and what they find there."""

from vecsim.replaying import replay

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
