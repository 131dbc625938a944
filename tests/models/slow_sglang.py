"""Slow and plain: one SGLang rank, its radix tree, its pass, on objects and lists.

Shares no code with the kernels; `tests.models.slow_model` puts ranks together to a fleet.
"""

from __future__ import annotations

from tests.models import slow_rank
from tests.models.slow_rank import NEVER, Forecast, Pass, duration_ms

LOOKAHEAD = 20  # tokens of room per survivor of a retraction
LPM_LIMIT = 128
DUPLICATE_TOKENS = 32


class Request(slow_rank.Request):
    """`mat`: tokens with KV; `cached`: pages of its path that it locks in the tree, to `node`."""

    def __init__(self, index: int, authored: dict, page: int, names: dict) -> None:
        super().__init__(index, authored, page, names)
        self.page_names: list[int] = []
        self.max_out = self.osl
        self.mat = self.cached = self.pages = 0
        self.node: Node | None = None
        self.requeued = False

    def remaining(self) -> int:
        return max(0, self.max_out - self.generated)

    def page_keys(self, count: int) -> list[int]:
        """A number for each of the first pages, which stands for all tokens up to its end."""
        known, size = self.page_names, self.block_size
        for k in range(len(known), count):
            content = tuple(self.tokens[k * size : (k + 1) * size])
            parent = known[-1] if known else None
            known.append(self.names.setdefault((parent, content), len(self.names)))
        return known[:count]


# --- the radix tree -------------------------------------------------------------------------------


class Node:
    def __init__(self, key: list, parent: Node | None, time: int) -> None:
        self.key = key
        self.parent = parent
        self.time = time
        self.locks = 0
        self.children: dict[int, Node] = {}


class Tree:
    def __init__(self, forecast: Forecast | None) -> None:
        self.forecast = forecast
        self.clock = 0
        self.root = Node([], None, 0)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def nodes(self) -> list[Node]:
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return found[1:]

    def evictable(self) -> int:
        return sum(len(n.key) for n in self.nodes() if n.locks == 0)

    @staticmethod
    def _common(a: list, b: list) -> int:
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        return n

    def probe(self, pages: list) -> int:
        """Pages found, without a trace."""
        node, at = self.root, 0
        while at < len(pages) and pages[at] in node.children:
            node = node.children[pages[at]]
            n = self._common(node.key, pages[at:])
            at += n
            if n < len(node.key):
                break
        return at

    def match(self, pages: list) -> Node:
        """The node that ends with `pages`, all of which are there; touches and splits."""
        t = self.tick()
        node, at = self.root, 0
        while at < len(pages):
            node = node.children[pages[at]]
            node.time = t
            n = self._common(node.key, pages[at:])
            at += n
            if n < len(node.key):
                node = self._split(node, n)
        return node

    def _split(self, child: Node, n: int) -> Node:
        prefix = Node(child.key[:n], child.parent, child.time)
        prefix.locks = child.locks
        prefix.parent.children[prefix.key[0]] = prefix
        child.key = child.key[n:]
        child.parent = prefix
        prefix.children[child.key[0]] = child
        return prefix

    def lock(self, node: Node, step: int) -> None:
        while node is not self.root:
            node.locks += step
            node = node.parent

    def insert(self, start: Node, pages: list) -> tuple[Node, int]:
        """Puts `pages` below `start`. Returns where they end and how many were there already."""
        t = self.tick()
        node = start
        while node is not self.root:
            node.time = t
            node = node.parent
        node, at, duplicates = start, 0, 0
        while at < len(pages):
            own = node.locks == 0 or (node is start and node.locks == 1)
            if node is not self.root and not node.children and own:
                node.key = node.key + pages[at:]
                node.time = t
                break
            child = node.children.get(pages[at])
            if child is None:
                child = Node(pages[at:], node, self.tick())
                node.children[pages[at]] = child
                node = child
                break
            child.time = t
            n = self._common(child.key, pages[at:])
            at += n
            duplicates += n
            node = child if n == len(child.key) else self._split(child, n)
        return node, duplicates

    def evict(self, count: int) -> int:
        """Frees up to `count` pages, least recently used leaf first, each from its tail.

        With a forecast, page by page: the leaf first whose last page is needed latest.
        """
        freed = 0
        while freed < count:
            leaves = [n for n in self.nodes() if n.locks == 0 and not n.children]
            if not leaves:
                break
            leaf = min(leaves, key=self._rank)
            take = 1 if self.forecast else min(count - freed, len(leaf.key))
            freed += take
            self._cut(leaf, take)
        return freed

    def _cut(self, leaf: Node, count: int) -> None:
        """Takes the last `count` pages off a leaf."""
        if count == len(leaf.key):
            del leaf.parent.children[leaf.key[0]]
        else:
            leaf.key = leaf.key[:-count]

    def _rank(self, leaf: Node) -> tuple[int, int]:
        return 0 if self.forecast is None else -self.forecast.next_use(leaf.key[-1]), leaf.time


# --- one rank -------------------------------------------------------------------------------------


class Group:
    """What the ranks of one worker share: the passes for which prefills are put off."""

    def __init__(self, config: dict) -> None:
        self.interval = config.get("prefill_decode_interval", 0)
        self.left = 0
        self.ranks: list[Rank] = []

    def close(self, passes: list[Pass]) -> None:
        if any(p.prefill_tokens for p in passes):
            self.left = self.interval
        elif self.left > 0:
            self.left -= 1
            if not any(p.ran_model for p in passes):
                for r in self.ranks:
                    r.ratio = r.init_ratio


class Rank:
    def __init__(self, config: dict, dp_size: int, group: Group, forecast: Forecast | None) -> None:
        options = config.get("sglang", {})
        self.page = config.get("block_size") or 1
        self.block_size = self.page
        self.capacity = self.free = config.get("num_gpu_blocks", 16384)
        self.max_seqs = config.get("max_num_seqs", 256) or NEVER
        self.max_model_len = config.get("max_model_len")
        self.caching = config.get("enable_prefix_caching", True)
        self.lpm = options.get("schedule_policy", "fifo") == "lpm"
        self.max_prefill = options.get("max_prefill_tokens", 16384)
        self.chunk = options.get("chunked_prefill_size", 8192) // dp_size
        self.clip = options.get("clip_max_new_tokens", 4096)
        conservativeness = float(options.get("schedule_conservativeness", 1.0))
        if dp_size > 1:
            conservativeness *= 0.3
        self.init_ratio = 0.7 * conservativeness
        self.min_ratio = self.init_ratio * 0.14
        self.ratio_step = (self.init_ratio - self.min_ratio) / 600.0
        self.ratio = self.init_ratio
        self.prefill_ratio = config.get("speedup_ratio", 1.0)
        self.decode_ratio = self.prefill_ratio * config.get("decode_speedup_ratio", 1.0)
        self.timing = config.get("timing_model", {"type": "polynomial"})
        self.forecast = forecast
        self.tree = Tree(forecast)
        self.group = group
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stripped: list[Request] = []  # half-prefilled ones that had to give their pages back
        self.preemptions = 0
        self.evictions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def accept(self, q: Request) -> None:
        q.node = self.tree.root
        if self.max_model_len is not None:
            q.max_out = min(q.osl, max(0, self.max_model_len - q.isl))
        self.waiting.append(q)

    # pages and the tree

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _ceil(self, tokens: int) -> int:
        return self._pages(tokens) * self.page

    def _available(self) -> int:
        return self.free + self.tree.evictable()

    def _evict(self, count: int) -> None:
        if count > 0:
            freed = self.tree.evict(count)
            self.evictions += freed
            self.free += freed

    def _cache(self, q: Request) -> None:
        """Enters what `q` has computed into the tree, and holds on to it."""
        full = q.mat // self.page
        if not self.caching or full <= q.cached:
            return
        end, duplicates = self.tree.insert(q.node, q.page_keys(full)[q.cached :])
        self.tree.lock(end, 1)
        self.free += duplicates
        self.tree.lock(q.node, -1)
        q.node, q.cached = end, full

    def _finish(self, q: Request) -> None:
        full = q.mat // self.page
        if self.caching:
            self.free += q.pages - full
            if full:
                _, duplicates = self.tree.insert(q.node, q.page_keys(full)[q.cached :])
                self.free += duplicates
            self.tree.lock(q.node, -1)
        else:
            self.free += q.pages
        q.verdict = ("completed", "length" if q.generated < q.osl else None)

    def _give_up(self, q: Request) -> None:
        """Back to nothing computed; what is in the tree stays there."""
        self.free += q.pages - q.cached
        self.tree.lock(q.node, -1)
        q.node = self.tree.root
        q.mat = q.pages = q.cached = 0

    def _retire(self, q: Request) -> None:
        """Belady's forecast: no more use for the prompt of `q`."""
        if self.forecast is not None:
            self.forecast.retire(q)

    # the pass

    def start(self, now: float, _step: int) -> Pass:
        p = Pass(0)
        self._reject(p)
        if self.lpm and self.caching and len(self.waiting) <= LPM_LIMIT:
            self._reorder()
        batch = [] if self.group.left > 0 else self._form_batch(p, now)
        retracted: list[Request] = []
        estimate = None
        finished: list[Request]
        if batch:
            finished = self._prefill(p, batch, now)
        else:
            finished, retracted, estimate = self._decode(p, now)
        p.completed = finished
        for q in finished:
            self._finish(q)
        self.waiting += retracted + self.stripped
        self.stripped.clear()
        for q in p.rejected + p.settled:
            self._retire(q)
        if estimate is not None:
            self.ratio = estimate
        elif not batch:
            self.ratio = max(self.ratio - self.ratio_step, self.min_ratio)
        return p

    def _reject(self, p: Pass) -> None:
        if self.max_model_len is None:
            return
        for q in [q for q in self.waiting if q.isl >= self.max_model_len]:
            self.waiting.remove(q)
            q.verdict = ("rejected", "prompt_exceeds_max_model_len")
            p.rejected.append(q)

    def _reorder(self) -> None:
        first_tokens = self._ceil(DUPLICATE_TOKENS)
        seen = set()
        ranked = []
        for q in self.waiting:
            score = self.tree.probe(q.page_keys(q.length() // self.page)) * self.page
            duplicate = False
            if score <= DUPLICATE_TOKENS and q.length() >= first_tokens:
                head = tuple(q.tokens[:first_tokens])
                duplicate = head in seen
                seen.add(head)
            ranked.append((duplicate, -score, q))
        ranked.sort(key=lambda entry: entry[:2])
        self.waiting = [q for _, _, q in ranked]

    def _form_batch(self, p: Pass, now: float) -> list[tuple[Request, int]]:
        """(request, tokens there before) of everybody that computes in this pass."""
        rest = self._room()
        budget, chunk_budget = self.max_prefill, self.chunk
        batch: list[tuple[Request, int]] = []
        while len(batch) < self.max_seqs - len(self.running) and self.waiting:
            q = self.waiting[0]
            start = self._start_of(q)
            left = q.length() - start
            chunk = left
            if self._ceil(left) > chunk_budget:
                chunk = min(chunk_budget // self.page * self.page, left)
            cost = self._ceil(chunk)
            out = 0 if chunk < left else min(q.remaining(), self.clip)
            if (
                (chunk == 0 and left > 0)
                or cost + out >= rest
                or cost > budget
                or cost > chunk_budget
                or not self._allocate(q, start, start + chunk, now)
            ):
                if batch or self.running or p.rejected or self.may_still_start(q):
                    break
                self._settle_head(p)
                rest = self._room()
                continue
            self.waiting.pop(0)
            batch.append((q, start))
            rest -= cost + out
            budget -= cost
            chunk_budget -= cost
            if chunk_budget <= 0:
                break
        return batch

    def may_still_start(self, q: Request) -> bool:
        """Whether something but a running request may let the refused head in."""
        return False

    def _room(self) -> float:
        reserved = 0.0
        for q in self.running:
            reserved += min(q.remaining(), self.clip) * self.ratio
        return self._available() * self.page - reserved

    def _start_of(self, q: Request) -> int:
        if q.mat or not self.caching:
            return q.mat
        limit = q.length() if q.max_out == 0 else q.length() - 1
        return self.tree.probe(q.page_keys(max(0, limit) // self.page)) * self.page

    def _allocate(self, q: Request, start: int, end: int, now: float) -> bool:
        if q.mat == 0:
            node = self.tree.match(q.page_keys(start // self.page))
            self.tree.lock(node, 1)
            need = self._pages(end) - start // self.page
            if need > self._available():
                self.tree.lock(node, -1)
                return False
            q.node, q.cached, q.pages = node, start // self.page, start // self.page
            q.admissions.append((now, start))
        else:
            need = self._pages(end) - q.pages
            if need > self._available():
                return False
        self._evict(need - self.free)
        self.free -= need
        q.pages += need
        q.mat = end
        return True

    def _prefill(self, p: Pass, batch: list[tuple[Request, int]], now: float) -> list[Request]:
        new = []
        for q, _ in batch:
            if q.mat < q.length():
                self._cache(q)
                self.waiting.insert(0, q)
            else:
                new.append(q)
            self._retire(q)
        p.end_ms = now
        worked = [(q.mat, start) for q, start in batch if q.mat > start]
        if worked:
            n = len(worked)
            tokens = n * (sum(end for end, _ in worked) // n - sum(at for _, at in worked) // n)
            p.prefill_tokens = sum(end - at for end, at in worked)
            p.ran_model = True
            if tokens > 0:
                p.end_ms = now + duration_ms(self._prefill_ms(float(tokens)), self.prefill_ratio)
        empty = [q for q in new if q.remaining() == 0]
        last = [q for q in new if q.remaining() == 1]
        others = [q for q in new if q.remaining() > 1]
        need = sum(max(0, self._pages(q.length() + 1) - q.pages) for q in others)
        if self.free < need:
            self._evict(need - self.free)
        for q in others + last:
            self._cache(q)
        fits = self.free >= need
        if fits:
            self.free -= need
            for q in others:
                q.pages = self._pages(q.length() + 1)
                q.mat += 1
        emitted = [q for q in new if q in last or (fits and q in others)]
        for q in emitted:
            q.append_token()
        p.emitted = emitted
        self.running += [q for q in new if q in others]
        return empty + last

    def _decode(self, p: Pass, now: float) -> tuple[list[Request], list[Request], float | None]:
        retracted: list[Request] = []
        p.end_ms = now
        need = self._growth()
        while self._available() < need and len(self.running) > 1:
            if not retracted:
                self.running.sort(key=lambda q: (-q.generated, q.isl))
            victim = self.running.pop()
            self._give_up(victim)
            self.preemptions += 1
            retracted.append(victim)
            room = LOOKAHEAD * len(self.running) - self.free * self.page
            self._evict(self._pages(max(0, room)))
            need = self._growth()
        estimate = None
        if retracted:
            n = len(self.running)
            out = sum(q.generated for q in self.running)
            estimate = min(1.0, (out + LOOKAHEAD * n) / (sum(q.max_out for q in self.running) + 1))
        if self.running and self._available() < need:
            self._settle_runner(p)
        if not self.running:
            return [], retracted, estimate
        p.ran_model = True
        self._evict(need - self.free)
        self.free -= need
        context = sum(q.length() for q in self.running)
        p.end_ms = now + duration_ms(self._decode_ms(context), self.decode_ratio)
        for q in self.running:
            q.pages = max(q.pages, self._pages(q.length() + 1))
            q.mat += 1
            q.append_token()
        p.emitted = list(self.running)
        finished = [q for q in self.running if q.remaining() == 0]
        self.running = [q for q in self.running if q.remaining() > 0]
        return finished, retracted, estimate

    def _growth(self) -> int:
        return sum(max(0, self._pages(q.length() + 1) - q.pages) for q in self.running)

    def _prefill_ms(self, tokens: float) -> float:
        if self.timing["type"] == "fixed":
            return float(self.timing["prefill_ms"])
        return 4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens + 1.650142e01

    def _decode_ms(self, context: int) -> float:
        if self.timing["type"] == "fixed":
            return float(self.timing["decode_ms"])
        load = min(context / (self.capacity * self.page), 1.0)
        return max(-25.74 * (load * load) + 54.01 * load + 5.74, 1.0)

    # where the reference stands still

    def _settle_head(self, p: Pass) -> None:
        """Nothing runs and the head cannot be admitted."""
        q = self.waiting.pop(0)
        total = self.capacity * self.page
        first = min(self._ceil(q.length()), self.chunk // self.page * self.page)
        if self._ceil(q.length()) + min(q.remaining(), self.clip) >= total:
            reason = "kv_capacity_exhausted" if q.generated else "prompt_exceeds_kv_capacity"
        elif first > self.max_prefill or (first == 0 and q.length() > 0):
            reason = "prompt_exceeds_token_budget"
        else:
            reason = "no_progress"
        self._give_up(q)
        q.verdict = ("failed" if q.generated else "rejected", reason)
        p.settled.append(q)

    def _settle_runner(self, p: Pass) -> None:
        """The last running request cannot grow."""
        q = self.running[0]
        if self._pages(q.length() + 1) > self.capacity:
            self.running.pop()
            self._give_up(q)
            q.verdict = ("failed", "kv_capacity_exhausted")
            p.settled.append(q)
            return
        while self._available() < self._growth():
            holder = next(h for h in self.waiting if h.pages)
            self.waiting.remove(holder)
            self._give_up(holder)
            if holder.requeued:
                failed = holder.generated > 0
                holder.verdict = ("failed" if failed else "rejected", "no_progress")
                p.settled.append(holder)
            else:
                holder.requeued = True
                self.stripped.append(holder)
                p.requeued = True
