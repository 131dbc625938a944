"""Small random specs, made to meet the edges of the scheduler. Same seed, same spec."""

from __future__ import annotations

import random

FEATURES = (
    "belady",
    "caching_off",
    "chunking_off",
    "closed_loop",
    "dp",
    "empty_prompt",
    "fifo",
    "max_model_len",
    "planned",
    "prefill_schedule_interval",
    "prefix",
    "refused",
    "sla",
    "small_pool",
    "speedup",
    "time_limit",
    "tokenization",
    "workers",
    "zero_time",
    "sglang",  # never drawn, only forced
    "trtllm",  # as well
    "disagg",  # as well
    "rush",  # as well
)

CHANCE = {
    "belady": 0.1,
    "caching_off": 0.1,
    "chunking_off": 0.2,
    "closed_loop": 0.15,
    "dp": 0.3,
    "empty_prompt": 0.2,
    "fifo": 0.35,
    "max_model_len": 0.12,
    "planned": 0.25,
    "prefill_schedule_interval": 0.6,
    "prefix": 0.6,
    "refused": 0.01,
    "sla": 0.1,
    "small_pool": 0.75,
    "speedup": 0.2,
    "time_limit": 0.1,
    "tokenization": 0.12,
    "workers": 0.35,
    "zero_time": 0.1,
}


class Draw:
    """One spec being drawn."""

    def __init__(self, seed: int, features: tuple[str, ...], without: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        drawn = {f for f in CHANCE if self.rng.random() < CHANCE[f]}
        self.on = (drawn | set(features)) - set(without)
        if "belady" in features:
            self.on -= {"dp", "closed_loop", "caching_off", "prefill_schedule_interval"}
        elif self.on & {"dp", "closed_loop", "caching_off"}:
            self.on -= {"belady"}
        if "prefill_schedule_interval" in features:
            self.on.add("dp")
            self.on -= {"belady"}
        if "dp" not in self.on:
            self.on -= {"prefill_schedule_interval"}
        if "planned" in features or "belady" in self.on:
            self.on.add("prefix")
        self.on -= set(without)
        if "trtllm" in self.on:
            self.on -= {"prefill_schedule_interval"}
        if "sglang" in self.on:
            self.on -= {"chunking_off", "fifo", "prefill_schedule_interval"}
        if "disagg" in self.on:
            self.on -= {"belady"}

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def one(self, *values):
        return self.rng.choice(values)

    # The engine

    def timing(self) -> dict:
        if "zero_time" in self.on:
            prefill, decode = self.one((0, 0), (0, 1), (10, 0), (0.0, 2.5))
            return {"type": "fixed", "prefill_ms": prefill, "decode_ms": decode}
        if self.chance(0.3):
            return {"type": "polynomial"}
        prefill = self.one(10, 5, 1, 100.0, self.rng.uniform(0.1, 20))
        decode = self.one(1, 5, 10, self.rng.uniform(0.1, 9))
        return {"type": "fixed", "prefill_ms": prefill, "decode_ms": decode}

    def sglang_rank(self) -> dict:
        r = self.rng
        page = self.one(1, 1, 1, 1, 4, 4, 16, 64)
        tokens = r.randint(16, 120) if "small_pool" in self.on else self.one(200, 1000, 16384)
        blocks = max(tokens // page, 1) + (0 if page == 1 else r.randint(0, 4))
        options = {
            "schedule_policy": self.one("fifo", "lpm"),
            "chunked_prefill_size": page * self.one(1, 2, 4, 8, 16, 32, 512, 8192),
        }
        if self.chance(0.2):
            options["max_prefill_tokens"] = self.one(16, 32, 64, 128)
        if self.chance(0.75):
            options["clip_max_new_tokens"] = self.one(1, 2, 4, 8)
        if self.chance(0.4):
            options["schedule_conservativeness"] = self.one(0.0, 0.1, 0.5, 1.5)
        rank: dict = {
            "backend": "sglang",
            "block_size": page,
            "num_gpu_blocks": blocks,
            "max_num_seqs": self.one(1, 2, 3, 4, 8, 256, 256, None),
            "timing_model": self.timing(),
            "sglang": options,
        }
        if self.chance(0.2):
            rank["prefill_decode_interval"] = self.one(1, 2, 3, 7)
        if "caching_off" in self.on:
            rank["enable_prefix_caching"] = False
        return rank

    def rank(self) -> dict:
        rank = self.sglang_rank() if "sglang" in self.on else self.vllm_rank()
        if "trtllm" in self.on:
            rank["backend"] = "trtllm"
        r = self.rng
        if "max_model_len" in self.on:
            rank["max_model_len"] = r.randint(1, 48)
        if "prefill_schedule_interval" in self.on:
            rank["prefill_schedule_interval"] = self.one(2, 3, 4, 7)
        if "speedup" in self.on:
            rank["speedup_ratio"] = self.one(0.0, 2.0, 1.5, 0.7, r.uniform(0.3, 5))
            if self.chance(0.5):
                rank["decode_speedup_ratio"] = self.one(0.0, 3.0, 1.5, r.uniform(0.3, 5))
        return rank

    def vllm_rank(self) -> dict:
        r = self.rng
        small = "small_pool" in self.on
        rank: dict = {
            "backend": "vllm",
            "block_size": self.one(2, 3, 4, 4, 4, 8, 16),
            "num_gpu_blocks": r.randint(1, 14) if small else self.one(40, 1000, 16384),
            "max_num_seqs": self.one(1, 2, 2, 3, 4, 8, 256, None),
            "max_num_batched_tokens": self.one(1, 2, 4, 5, 8, 12, 16, 32, 64, 8192, None),
            "timing_model": self.timing(),
        }
        if "caching_off" in self.on:
            rank["enable_prefix_caching"] = False
        if "chunking_off" in self.on:
            rank["enable_chunked_prefill"] = False
            if self.chance(0.8):
                rank["max_num_batched_tokens"] = self.one(40, 64, 8192)
        if "fifo" in self.on:
            rank["preemption_mode"] = "fifo"
        return rank

    # The requests

    def arrivals(self, count: int) -> list[float]:
        r = self.rng
        style = self.one("zero", "grid", "grid", "burst", "free", "late")
        if style == "zero":
            return [0] * count
        if style == "grid":
            step, span = self.one(0.5, 1, 5, 10), self.one(3, 10, 40)
            return [step * r.randint(0, span) for _ in range(count)]
        if style == "burst":
            starts = [r.uniform(0, 200) for _ in range(2)]
            return [r.choice(starts) for _ in range(count)]
        start = 1000.0 if style == "late" else 0.0
        return [start + r.uniform(0, self.one(5, 50, 300)) for _ in range(count)]

    def input_tokens(self, block: int, ceiling: int) -> int:
        style = self.rng.random()
        if "empty_prompt" in self.on and self.chance(0.25):
            return 0
        if style < 0.06:
            return 1
        if style < 0.35:
            return block * self.rng.randint(1, max(1, ceiling // block))
        if style < 0.38:
            return ceiling + self.rng.randint(0, 3 * block)
        return self.rng.randint(1, max(1, ceiling))

    def output_tokens(self) -> int:
        style = self.rng.random()
        if style < 0.15:
            return self.one(0, 1)
        return self.rng.randint(2, 8) if style < 0.7 else self.rng.randint(2, 40)

    def prompt(self, length: int, known: list[list[int]]) -> list[int]:
        """Token ids that often continue, repeat or cut what an earlier request held."""
        if known and self.chance(0.75):
            start = list(self.rng.choice(known))
            if self.chance(0.3):
                start = start[: self.rng.randint(0, len(start))]
        else:
            start = []
        alphabet = self.one(1, 2, 50)
        start += [self.rng.randrange(alphabet) for _ in range(length - len(start))]
        return start[:length]

    def requests(self, rank: dict, dp_size: int) -> list[dict]:
        r = self.rng
        count = r.randint(1, 10) if self.chance(0.9) else r.randint(11, 24)
        block = rank["block_size"]
        usual = 40 if block < 16 or rank["backend"] != "sglang" else 5 * block
        ceiling = min(block * rank["num_gpu_blocks"], usual)
        pinned = self.one(0.0, 0.5, 1.0)
        shared = 1.0 if "belady" in self.on else self.one(0.5, 1.0, 1.0)
        outgrow = self.chance(0.1)  # otherwise no request needs more than the whole pool
        known: list[list[int]] = []
        rows = []
        for k, at in enumerate(self.arrivals(count)):
            row: dict = {
                "id": f"r{k}",
                "arrival_time_ms": at,
                "input_tokens": self.input_tokens(block, ceiling),
                "output_tokens": self.output_tokens(),
            }
            if "prefix" in self.on and self.chance(shared):
                row["input_token_ids"] = self.prompt(row["input_tokens"], known)
                known.append(row["input_token_ids"])
            room = block * rank["num_gpu_blocks"] - row["input_tokens"] + 1
            if rank["backend"] == "sglang":
                room -= 1 + block
                if not outgrow and room < 1 and row["input_tokens"] > 0:
                    row["input_tokens"] = max(1, row["input_tokens"] + room - 2)
                    if "input_token_ids" in row:
                        del row["input_token_ids"][row["input_tokens"] :]
                    room = 2
            if not outgrow and room > 0:
                row["output_tokens"] = min(row["output_tokens"], room)
            if "planned" in self.on and self.chance(0.6):
                planned = row["output_tokens"]
                if self.chance(0.3):
                    planned = min(self.output_tokens(), max(0, room))
                row["output_token_ids"] = [r.randrange(3) for _ in range(planned)]
                known.append(row.get("input_token_ids", []) + row["output_token_ids"])
            if dp_size > 1 and self.chance(pinned):
                row["dp_rank"] = r.randrange(dp_size)
            rows.append(row)
        return rows

    def rush(self, rank: dict, rows: list[dict]) -> None:
        """Some come at once, share a prompt of which a part is cached, and many end with their
        first token; all of them together just fill the pool."""
        r = self.rng
        block = rank["block_size"]
        if rank["backend"] == "sglang":
            rank["max_num_seqs"] = 256
            rank["sglang"]["chunked_prefill_size"] = self.one(16 * block, 512 * block)
            rank["sglang"]["clip_max_new_tokens"] = self.one(1, 1, 2, 4)
        del rows[2:]
        tokens = [r.randrange(50) for _ in range(24 * (1 if block > 4 else block))]
        at = max(row["arrival_time_ms"] for row in rows) + 50
        cached = r.randint(1, len(tokens) // 2)
        held = cached
        for k in range(r.randint(3, 6)):
            length = cached if k == 0 else r.randint(1, len(tokens))
            own = min(self.one(0, 0, 0, 1, 3), length) if k > 0 else 0
            prompt = tokens[: length - own] + [50 + r.randrange(50) for _ in range(own)]
            row = {"id": f"rush{k}", "arrival_time_ms": at, "input_tokens": length}
            row["input_token_ids"] = prompt
            row["output_tokens"] = self.one(0, 1, 1, 1, 2, 2, 3, 5, 9)
            if k == 0:
                row["arrival_time_ms"], row["output_tokens"] = at - 20, 1
            else:
                held += length - min(cached, length - max(own, 1))
            rows.append(row)
        largest = max(row["input_tokens"] + row["output_tokens"] for row in rows)
        rank["num_gpu_blocks"] = max(-(-largest // block) + 2, -(-held // block) + r.randint(-1, 2))

    # The whole

    def payload(self) -> dict:
        r = self.rng
        rank = self.rank()
        engine: dict = {"rank": rank}
        dp_size = self.one(2, 2, 4) if "dp" in self.on else 1
        if rank["backend"] == "sglang" and "refused" not in self.on:
            options = rank["sglang"]
            # Ranks share a chunk; less than a token each is refused.
            options["chunked_prefill_size"] *= 1 if options["chunked_prefill_size"] >= 4 else 4
        if dp_size > 1:
            engine["dp_size"] = dp_size
        if "belady" in self.on:
            engine["kv_eviction_policy"] = "belady"
        workers = self.one(2, 2, 3) if "workers" in self.on else 1
        spec: dict = {
            "version": 1,
            "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
            "engine": engine,
            "requests": self.requests(rank, dp_size),
        }
        if "rush" in self.on:
            self.rush(rank, spec["requests"])
        if "disagg" in self.on:
            self.split(spec, rank, dp_size)
        if "closed_loop" in self.on:
            spec["max_in_flight"] = r.randint(1, 6)
        if "time_limit" in self.on:
            spec["max_sim_time_ms"] = self.one(0, 5, 20, 50, r.uniform(0, 300))
        if "sla" in self.on:
            spec["sla"] = self.one(
                {"ttft_ms": r.uniform(5, 60)},
                {"itl_ms": r.uniform(1, 15)},
                {"ttft_ms": r.uniform(5, 60), "itl_ms": 5.75},
                {"e2e_ms": r.uniform(10, 200)},
            )
        if "refused" in self.on:
            self.spoil(spec)
        if "tokenization" not in self.on:
            return spec
        stage = {
            "workers": self.one(1, 1, 2, 3),
            "base_ms": self.one(0, 1, 2.5, 10),
            "per_input_token_ms": self.one(0, 0.1, 1, r.uniform(0, 0.5)),
        }
        return {"spec": spec, "tokenization": stage}

    def split(self, spec: dict, rank: dict, dp_size: int) -> None:
        """Make two pools of the one; the roles may differ."""
        r = self.rng
        pools = [
            {"initial_workers": self.one(1, 1, 2, 3) if "workers" in self.on else 1}
            for _ in range(2)
        ]
        latency = self.one(0, 0, 1, 5, 10, 60, r.uniform(0, 30))
        spec["topology"] = {"kind": "disaggregated", "prefill": pools[0], "decode": pools[1]}
        if latency or self.chance(0.5):
            spec["topology"]["handoff_latency_ms"] = latency
        if self.chance(0.3):
            rank["kv_transfer_bytes_per_token"] = self.one(1000, 131072, 1000000)
            rank["kv_transfer_bandwidth"] = self.one(0.0, 0.01, 1.0, 3.7)
            rank["kv_transfer_timing_mode"] = self.one("full_prompt", "destination_missing")
        if self.chance(0.5):
            ranks = [rank, self.decode_rank(rank)]
            own = [dp_size, self.one(dp_size, dp_size, 1, 2)]
            if r.random() < 0.5:
                ranks.reverse()
            for name, config, size in zip(("prefill", "decode"), ranks, own, strict=True):
                if self.chance(0.8):
                    spec["engine"][name] = {"rank": config, "dp_size": size}
        sizes = [
            spec["engine"].get(name, spec["engine"]).get("dp_size", 1)
            for name in ("prefill", "decode")
        ]
        for row in spec["requests"]:
            if "dp_rank" in row:
                row["dp_rank"] %= sizes[1]
                if row["dp_rank"] >= sizes[0] or self.chance(0.3):
                    row["prefill_dp_rank"] = r.randrange(sizes[0])
            elif max(sizes) > 1 and self.chance(0.1):
                row["prefill_dp_rank"] = r.randrange(sizes[0])

    def decode_rank(self, rank: dict) -> dict:
        """A rank like the other one, but for memory, batch and time."""
        other = dict(rank)
        other["num_gpu_blocks"] = max(1, rank["num_gpu_blocks"] + self.one(-2, -1, 0, 3, 100))
        other["max_num_seqs"] = self.one(1, 2, 3, 256)
        other["timing_model"] = self.timing()
        if rank["backend"] != "sglang" and self.chance(0.3):
            other["block_size"] = self.one(2, 4, 8)
        return other

    def spoil(self, spec: dict) -> None:
        rank = spec["engine"]["rank"]
        first = spec["requests"][0]
        what = self.rng.randrange(5)
        if what == 0:
            first["dp_rank"] = 9
        elif what == 1:
            spec["requests"].append(dict(first))
        elif what == 2:
            rank[self.one("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens")] = 0
        elif what == 3:
            first["input_token_ids"] = [1] * (first["input_tokens"] + 1)
        else:
            first["arrival_time_ms"] = -1.0


def span(text: str) -> range:
    """Seeds "A:B", B excluded."""
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))


def make(seed: int, features: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> dict:
    """The spec of a seed: a bare spec or `{"spec", "tokenization"}`.

    `features` are forced on (and what they need), `without` forced off.
    """
    return Draw(seed, features, without).payload()


def features_of(payload: dict) -> set[str]:
    """The features a spec really uses (a shrunk spec has lost some)."""
    spec = payload.get("spec", payload)
    engine, requests = spec["engine"], spec["requests"]
    topology = spec["topology"]
    pools = [topology[name] for name in ("workers", "prefill", "decode") if name in topology]
    rank = engine["rank"]
    timing = rank.get("timing_model", {})
    present = {
        "belady": engine.get("kv_eviction_policy") == "belady",
        "caching_off": not rank.get("enable_prefix_caching", True),
        "chunking_off": not rank.get("enable_chunked_prefill", True),
        "closed_loop": spec.get("max_in_flight") is not None,
        "dp": engine.get("dp_size", 1) > 1,
        "empty_prompt": any(r["input_tokens"] == 0 for r in requests),
        "fifo": rank.get("preemption_mode") == "fifo",
        "max_model_len": rank.get("max_model_len") is not None,
        "planned": any("output_token_ids" in r for r in requests),
        "prefill_schedule_interval": rank.get("prefill_schedule_interval", 1) > 1,
        "prefix": any("input_token_ids" in r for r in requests),
        "sla": bool(spec.get("sla")),
        "small_pool": rank.get("num_gpu_blocks", 16384) < 40,
        "speedup": "speedup_ratio" in rank or "decode_speedup_ratio" in rank,
        "time_limit": spec.get("max_sim_time_ms") is not None,
        "tokenization": bool(payload.get("tokenization")),
        "workers": any(pool["initial_workers"] > 1 for pool in pools),
        "zero_time": 0 in (timing.get("prefill_ms"), timing.get("decode_ms")),
        "sglang": rank["backend"] == "sglang",
        "trtllm": rank["backend"] == "trtllm",
        "disagg": topology["kind"] == "disaggregated",
        "rush": any(r["id"].startswith("rush") for r in requests),
    }
    return {name for name, used in present.items() if used}
