"""prefill_decode_interval in the decode pool: a countdown that runs while nothing does."""

from tests.fuzz import trial
from vecsim.run.replay import replay


def split(interval, requests, prefill=1, dp_size=1, **rank):
    rank = {"backend": "sglang", "prefill_decode_interval": interval, **rank}
    pools = {"prefill": {"initial_workers": prefill}, "decode": {"initial_workers": 1}}
    return {
        "version": 1,
        "topology": {"kind": "disaggregated", **pools},
        "engine": {"rank": rank, "dp_size": dp_size},
        "requests": requests,
    }


def request(name, at_ms, prompt, output, **more):
    row = {"id": name, "arrival_time_ms": at_ms, "output_tokens": output, **more}
    if isinstance(prompt, int):
        return {**row, "input_tokens": prompt}
    return {**row, "input_tokens": len(prompt), "input_token_ids": prompt}


def column(spec, name):
    """A column of the run, which equals that of the slow model."""
    assert trial.run(spec, "vecsim", None).lines == []
    result = replay(spec).requests
    return dict(zip(result["request_id"], result[name], strict=True))


def test_somebody_comes_at_the_instant_at_which_nothing_runs_any_more():
    """The countdown goes on with him; r4 was retracted and waits for its end. (The reference's
    answer.)"""
    shared = [21, 29, 20, 16]
    requests = [
        request("r0", 1001, 1, 1),
        request("r2", 1003, 5, 2),
        request("r4", 1001, shared + [0] * 17, 4),
        request("r6", 1000, 17, 0),
        request("r7", 1001, shared + [0] * 9, 4),
        request("r9", 1000.2171462707915, 36, 6),
    ]
    timing = {"type": "fixed", "prefill_ms": 5, "decode_ms": 1}
    spec = split(7, requests, block_size=4, num_gpu_blocks=20, timing_model=timing)
    assert column(spec, "last_token_ms")["r4"] == 1022.0


def test_requests_get_pages_while_the_countdown_runs_out():
    """Nobody is there but r1 and r4, who wait for pages: the passes of the countdown take no time,
    and each of them ends with an attempt. (The reference's answer.)"""
    zeros = [0] * 70
    requests = [
        request("r0", 6, 0, 0),
        request("r1", 6, 104, 0),
        request("r2", 0, [0] * 69, 35, dp_rank=0),
        request("r3", 5, 64, 30),
        request("r4", 8, 64, 39, dp_rank=0),
        request("r5", 1, 126, 2, dp_rank=1),
        request("r6", 5, [*zeros, 2, 0, 2, 0, 0, 1, 0, 1, 2], 8),
    ]
    more = {"block_size": 64, "num_gpu_blocks": 3, "kv_transfer_bytes_per_token": 131072}
    reserved = column(split(6, requests, 2, 2, **more), "destination_reserved_ms")
    assert reserved["r1"] == reserved["r4"] == 963.9923009999999
