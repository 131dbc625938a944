"""Slow and plain: one vLLM rank, its KV blocks, its requests and its pass, on objects and lists.

Shares no code with the kernels; `tests.models.slow_model` puts ranks together to a fleet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from fractions import Fraction

NEVER = 1 << 60
TOKEN_RANGE = 1 << 32
DEFAULT_TOKEN_STEP = 1000003
STRAINED_LIMIT = 1024


# --- time -----------------------------------------------------------------------------------------


def _quantise(seconds: float) -> float:
    """Seconds rounded to whole nanoseconds, ties to even, exactly."""
    whole, nanos = divmod(round(Fraction(seconds) * 10**9), 10**9)
    return float(whole) + float(nanos) / 1e9


def duration_ms(raw_ms: float, ratio: float) -> float:
    """What a raw duration adds to the clock, in ms."""
    seconds = _quantise(raw_ms / 1000.0)
    if ratio > 0 and ratio != 1.0:
        seconds = _quantise(seconds / ratio)
    return seconds * 1000.0


# --- KV blocks ------------------------------------------------------------------------------------


class Pool:
    """The KV blocks of one rank. A copy is private (no hash) or cached (hash and references)."""

    def __init__(self, capacity: int, forecast: Forecast | None) -> None:
        self.capacity = capacity
        self.free = capacity
        self.copies: dict[int, list] = {}  # id -> [hash or None, references]
        self.by_hash: dict[object, list[int]] = {}  # the first copy is the one lookups use
        self.idle: OrderedDict[int, None] = OrderedDict()  # release order
        self.forecast = forecast
        self.created = self.evictions = 0

    def active(self) -> int:
        return len(self.copies) - len(self.idle)

    def probe(self, block_hash) -> bool | None:
        """None: not cached. Otherwise: is the copy referenced by somebody?"""
        ids = self.by_hash.get(block_hash)
        return self.copies[ids[0]][1] > 0 if ids else None

    def reserve(self, hashes: list, fresh: int) -> list[int] | None:
        """References the copies of `hashes` and frees `fresh` blocks, or changes nothing."""
        ids = [self.by_hash[h][0] for h in hashes]
        evictions = max(0, fresh - self.free)
        if evictions > len(self.idle) - sum(i in self.idle for i in set(ids)):
            return None
        for i in ids:
            self.idle.pop(i, None)
            self.copies[i][1] += 1
        self.free -= fresh - evictions
        for _ in range(evictions):
            self._evict()
        return ids

    def _evict(self) -> None:
        self.evictions += 1
        victim = next(iter(self.idle)) if self.forecast is None else min(self.idle, key=self._rank)
        del self.idle[victim]
        block_hash = self.copies.pop(victim)[0]
        self.by_hash[block_hash].remove(victim)
        if not self.by_hash[block_hash]:
            del self.by_hash[block_hash]

    def _rank(self, copy: int) -> tuple[bool, int]:
        block_hash = self.copies[copy][0]
        return len(self.by_hash[block_hash]) == 1, -self.forecast.next_use(block_hash)

    def private(self) -> int:
        self.created += 1
        self.copies[self.created] = [None, 1]
        return self.created

    def publish(self, copy: int, block_hash) -> None:
        self.copies[copy][0] = block_hash
        self.by_hash.setdefault(block_hash, []).append(copy)

    def release(self, copy: int) -> None:
        entry = self.copies[copy]
        if entry[0] is None:
            del self.copies[copy]
            self.free += 1
            return
        entry[1] -= 1
        if entry[1] == 0:
            self.idle[copy] = None


class Forecast:
    """Belady's knowledge, shared by all workers: who will ask for which prompt block, in order."""

    def __init__(self, order: list[Request]) -> None:
        self.position = {q.index: k for k, q in enumerate(order)}
        self.uses: dict[object, list[int]] = {}
        self.retired: set[int] = set()
        for k, q in enumerate(order):
            for entry in q.blocks:
                if entry[0] is not None:
                    self.uses.setdefault(entry[0], []).append(k)

    def next_use(self, block_hash) -> int:
        return next((k for k in self.uses.get(block_hash, ()) if k not in self.retired), NEVER)

    def retire(self, q: Request) -> None:
        self.retired.add(self.position[q.index])


# --- requests -------------------------------------------------------------------------------------


class Request:
    """One request; `blocks` is its block table: [hash or None, copy or None, publish pending].

    A hash is a number that `names` gives to (hash of the block before, tokens of the block).
    """

    def __init__(
        self, index: int, authored: dict, block_size: int, names: dict[object, int] | None
    ) -> None:
        self.index = index
        self.authored_ms = float(authored["arrival_time_ms"])
        self.isl = authored["input_tokens"]
        self.plan = authored.get("output_token_ids")
        self.osl = authored["output_tokens"] if self.plan is None else len(self.plan)
        self.pin = authored.get("dp_rank")
        ids = authored.get("input_token_ids")
        base = index * DEFAULT_TOKEN_STEP
        self.tokens = (
            [(base + k) % TOKEN_RANGE for k in range(self.isl)] if ids is None else list(ids)
        )
        self.block_size = block_size
        self.names = names  # None: prefix caching is off, no hash is shared
        self.blocks: list[list] = []
        for k in range(self.isl // block_size):
            self.blocks.append([self._hash(k), None, False])
        if self.isl % block_size:
            self.blocks.append([None, None, False])
        self.allocated = self.computed = self.generated = 0
        self.fresh = True
        self.arrival_ms: float | None = None
        self.tokenized_ms: float | None = None
        self.terminal_ms: float | None = None
        self.scheduler: int = -1
        self.status = "not_arrived"
        self.reason: str | None = None
        self.verdict: tuple[str, str | None] | None = None  # becomes visible at the pass end
        self.admissions: list[tuple[float, int]] = []
        self.token_ms: list[float] = []

    def _hash(self, k: int):
        if self.names is None:
            return ("unshared", self.index, k)
        parent = self.blocks[k - 1][0] if k else None
        content = tuple(self.tokens[k * self.block_size : (k + 1) * self.block_size])
        return self.names.setdefault((parent, content), len(self.names))

    def length(self) -> int:
        return self.isl + self.generated

    def name_block(self, k: int) -> None:
        entry = self.blocks[k]
        if entry[0] is None:
            entry[0] = self._hash(k)
            entry[2] = self.names is not None

    def append_token(self) -> None:
        if self.length() % self.block_size == 0:
            self.blocks.append([None, None, False])
        if self.plan:
            self.tokens.append(self.plan[self.generated])
        else:
            self.tokens.append(("generated", self.index, self.generated))
        self.generated += 1


# --- one rank -------------------------------------------------------------------------------------


@dataclass
class Pass:
    """Decisions of one rank in one pass.

    `work`: request index -> (tokens, prompt tokens among them, prompt tokens before them).
    """

    budget: int
    work: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)
    settled: list[Request] = field(default_factory=list)
    completed: list[Request] = field(default_factory=list)
    emitted: list[Request] = field(default_factory=list)
    preempted: bool = False
    end_ms: float = 0.0
    prefill_tokens: int = 0
    ran_model: bool = False  # SGLang: something was computed
    requeued: bool = False  # SGLang: a standstill was settled without an end
    waits: bool = False  # SGLang: the last runner waits for pages of others; the reference spins


class Rank:
    reserves = False  # admission reserves blocks for the whole output

    def __init__(self, config: dict, dp_size: int, forecast: Forecast | None) -> None:
        self.block_size = config.get("block_size") or 64
        self.max_seqs = config.get("max_num_seqs", 256) or NEVER
        self.token_budget = config.get("max_num_batched_tokens", 8192) or NEVER
        self.max_model_len = config.get("max_model_len")
        self.caching = config.get("enable_prefix_caching", True)
        self.chunking = config.get("enable_chunked_prefill", True)
        self.fifo = config.get("preemption_mode", "lifo") == "fifo"
        self.interval = config.get("prefill_schedule_interval", 1)
        self.prefill_ratio = config.get("speedup_ratio", 1.0)
        self.decode_ratio = self.prefill_ratio * config.get("decode_speedup_ratio", 1.0)
        self.timing = config.get("timing_model", {"type": "polynomial"})
        self.dp_size = dp_size
        self.pool = Pool(config.get("num_gpu_blocks", 16384), forecast)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.capacity_bound = False
        self.preemptions = 0
        self.strained = 0  # passes that preempted since a request last went on

    @property
    def evictions(self) -> int:
        return self.pool.evictions

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def accept(self, q: Request) -> None:
        self.waiting.append(q)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _prefill_ms(self, batch: int, mean_isl: int, mean_prefix: int) -> float:
        if self.timing["type"] == "fixed":
            return float(self.timing["prefill_ms"])
        t = float(batch * max(0, mean_isl - mean_prefix))
        return 4.209989e-07 * (t * t) + 1.518344e-02 * t + 1.650142e01

    def _decode_ms(self, context: int) -> float:
        if self.timing["type"] == "fixed":
            return float(self.timing["decode_ms"])
        p = min(context / (self.pool.capacity * self.block_size), 1.0)
        return max(-25.74 * (p * p) + 54.01 * p + 5.74, 1.0)

    def _left(self, q: Request) -> int:
        left = q.osl - q.generated
        if self.max_model_len is not None:
            left = min(left, self.max_model_len - q.length())
        return max(0, left)

    def _lookup(self, q: Request) -> tuple[int, int]:
        """Tokens found in the cache, and how many of them somebody references now."""
        hits = active = 0
        if self.caching:
            for block_hash, _, _ in q.blocks:
                referenced = None if block_hash is None else self.pool.probe(block_hash)
                if referenced is None:
                    break
                hits += 1
                active += referenced
        if q.osl - q.generated > 0:
            hits = min(hits, max(0, q.length() - 1) // self.block_size)
        return hits * self.block_size, min(active, hits) * self.block_size

    def _release_blocks(self, q: Request) -> None:
        for entry in reversed(q.blocks):
            if entry[1] is not None:
                self.pool.release(entry[1])
                entry[1] = None
            entry[2] = False
        q.allocated = 0

    def _preempt(self) -> Request | None:
        if not self.running:
            return None
        victim = self.running.pop(0 if self.fifo else -1)
        victim.fresh = False
        victim.computed = 0
        self.preemptions += 1
        self._release_blocks(victim)
        self.waiting.insert(0, victim)
        return victim

    def _grow(self, q: Request, target: int, reuse: int) -> bool:
        have, want = self.blocks_of(q.allocated), self.blocks_of(target)
        if want > have:
            reuse = max(0, reuse - have)
            hashes = [q.blocks[k][0] for k in range(have, have + reuse)]
            shared = self.pool.reserve(hashes, want - have - reuse)
            if shared is None:
                return False
            for k in range(have, want):
                entry = q.blocks[k]
                if k - have < reuse:
                    entry[1], entry[2] = shared[k - have], False
                else:
                    entry[1] = self.pool.private()
                    entry[2] = self.caching and entry[0] is not None
        q.allocated = max(q.allocated, target)
        return True

    def _schedule(self, q: Request, p: Pass, cached: int) -> str:
        """Gives `q` its share of the pass: "ok", "blocked", or "self" (it preempted itself)."""
        base = q.computed + cached
        prefix = min(base, q.isl)
        missing = q.length() - base
        if not self.chunking and q.isl - prefix > p.budget:
            return "blocked"
        take = min(missing, p.budget)
        if take == 0 and missing > 0:
            return "blocked"
        after = base + take
        while after > q.allocated and not self._grow(q, after, cached // self.block_size):
            victim = self._preempt()
            if victim is None:
                return "blocked"
            p.preempted = True
            undone = p.work.pop(victim.index, None)
            if undone:
                p.budget += undone[0]
            if victim is q:
                return "self"
        q.computed = after
        for k in range(base // self.block_size, after // self.block_size):
            q.name_block(k)
            entry = q.blocks[k]
            if entry[2]:
                entry[2] = False
                self.pool.publish(entry[1], entry[0])
        p.work[q.index] = (take, max(0, min(after, q.isl) - prefix), prefix)
        p.budget -= take
        return "ok"

    @staticmethod
    def _built(q: Request) -> bool:
        return q.computed >= q.isl and q.allocated >= q.isl

    def start(self, now: float, step: int) -> Pass:
        """One whole pass, computed at its start."""
        p = Pass(self.token_budget)
        defer = (
            self.dp_size > 1
            and step % self.interval != 0
            and not self.capacity_bound
            and any(map(self._built, self.running))
        )
        self._schedule_running(p, defer)
        self._schedule_waiting(p, defer, now)
        self._settle_overcommitment(p, defer)
        if not defer and not p.preempted:
            self.capacity_bound = bool(self.waiting)
        if self.pool.forecast:
            for q in p.admitted:
                if q.index in p.work:
                    self.pool.forecast.retire(q)
        self._price_and_apply(p, now)
        return p

    def _schedule_running(self, p: Pass, defer: bool) -> None:
        i = 0
        while i < len(self.running) and p.budget > 0:
            q = self.running[i]
            if defer and not self._built(q):
                i += 1
                continue
            answer = self._schedule(q, p, 0)
            if answer == "ok":  # not corrected when a victim stood before i
                i += 1
            elif answer == "blocked":
                break

    def _schedule_waiting(self, p: Pass, defer: bool, now: float) -> None:
        while not p.preempted and len(self.running) < self.max_seqs and self.waiting:
            q = self.head()
            if q is None:
                break
            reason = self._rejection(q)
            if reason:
                self._drop_head(q, "rejected", reason)
                p.rejected.append(q)
                continue
            before = p.budget
            if not self._admit(q, p, defer, now):
                if self.running or p.rejected or self.may_still_start(q):
                    break
                self.settle_head(p)
                continue
            if before == 0:
                break

    def head(self) -> Request | None:
        """The waiting request that is looked at next."""
        return self.waiting[0]

    def may_still_start(self, q: Request) -> bool:
        """Whether something but a running request may let the refused head in."""
        return False

    def _rejection(self, q: Request) -> str | None:
        if self.max_model_len is not None and q.isl >= self.max_model_len:
            return "prompt_exceeds_max_model_len"
        if q.fresh and self.blocks_of(q.length()) > self.pool.capacity:
            return "prompt_exceeds_kv_capacity"
        return None

    def _admit(self, q: Request, p: Pass, defer: bool, now: float) -> bool:
        need = self.blocks_of(q.length())
        cached = 0
        if q.isl:
            cached, active = self._lookup(q)
            if need - active // self.block_size > self.pool.capacity - self.pool.active():
                return False
            if defer and q.length() - cached > 1:
                return False
        elif need > self.pool.capacity:
            # The reference lets an empty prompt past cache, gate and interval, whatever it has
            # generated; here the one that it would admit and preempt for ever has to wait.
            return False
        if self._schedule(q, p, cached) != "ok":
            return False
        self.waiting.remove(q)
        self.running.append(q)
        q.admissions.append((now, cached))
        p.admitted.append(q)
        return True

    def _drop_head(self, q: Request, status: str, reason: str) -> None:
        self.waiting.remove(q)
        q.verdict = (status, reason)
        if self.pool.forecast:
            self.pool.forecast.retire(q)

    def settle_head(self, p: Pass) -> None:
        """The rank is empty and its head cannot start: no later event could ever let it."""
        q = self.waiting[0]
        too_long = self.blocks_of(q.length()) > self.pool.capacity
        if too_long:
            reason = "kv_capacity_exhausted" if q.generated else "prompt_exceeds_kv_capacity"
        elif not self.chunking and q.isl > self.token_budget:
            reason = "prompt_exceeds_token_budget"
        else:
            reason = "no_progress"
        self._drop_head(q, "failed" if q.generated else "rejected", reason)
        p.settled.append(q)

    def _settle_overcommitment(self, p: Pass, defer: bool) -> None:
        """Empty prompts, let in past the gate, hold up each other: the last one has to fail."""
        if p.rejected or p.settled or any(q.computed >= q.length() for q in self.running):
            self.strained = 0
            return
        self.strained += p.preempted
        waits = self.reserves and not defer and p.budget == self.token_budget
        empty = [q for q in self.running if q.isl == 0]
        if empty and (waits or self.strained > STRAINED_LIMIT):
            q = empty[-1]
            p.budget += p.work.pop(q.index, (0,))[0]
            self.running.remove(q)
            self._release_blocks(q)
            q.verdict = ("failed", "kv_capacity_exhausted")
            p.settled.append(q)
            self.strained = 0

    def _price_and_apply(self, p: Pass, now: float) -> None:
        end = now
        prompts = [w for w in p.work.values() if w[1] > 0]
        if prompts:
            n = len(prompts)
            mean_isl = sum(prefix + prompt for _, prompt, prefix in prompts) // n
            mean_prefix = sum(prefix for _, _, prefix in prompts) // n
            end += duration_ms(self._prefill_ms(n, mean_isl, mean_prefix), self.prefill_ratio)
            p.prefill_tokens = sum(w[0] for w in prompts)
        ready = [q for q in self.running if q.computed >= q.length()]
        p.completed = [q for q in ready if self._left(q) == 0]
        p.emitted = [q for q in ready if self._left(q) > 0]
        for q in p.completed:
            self._finish(q)
        decodes = [q for q in p.emitted if self._decodes(q, p)]
        if decodes:
            context = sum(q.length() for q in decodes)
            end += duration_ms(self._decode_ms(context), self.decode_ratio)
        for q in p.emitted:
            q.append_token()
            if self._left(q) == 0:
                p.completed.append(q)
                self._finish(q)
        p.end_ms = end

    def _decodes(self, q: Request, p: Pass) -> bool:
        """Whether the token that `q` emits costs a decode step."""
        return q.generated > 0 or p.work.get(q.index, (0, 0))[1] == 0

    def _finish(self, q: Request) -> None:
        self.running.remove(q)
        self._release_blocks(q)
        q.verdict = ("completed", "length" if q.generated < q.osl else None)
