"""Terminal statuses of a request and their reasons, with the sentences that users read."""

from __future__ import annotations

import numpy as np

# --- terminal statuses of a request (uint8 codes) -------------------------------------------------
COMPLETED = np.int64(0)
REJECTED = np.int64(1)
SHED = np.int64(2)
FAILED = np.int64(3)
CANCELED = np.int64(4)
UNFINISHED = np.int64(5)
NOT_ARRIVED = np.int64(6)

STATUS_NAMES = (
    "completed",
    "rejected",
    "shed",
    "failed",
    "canceled",
    "unfinished",
    "not_arrived",
)

# --- reasons beside a status (uint8 codes) --------------------------------------------------------
NO_REASON = np.int64(0)
LENGTH = np.int64(1)
PROMPT_EXCEEDS_MAX_MODEL_LEN = np.int64(2)
PROMPT_EXCEEDS_KV_CAPACITY = np.int64(3)
PROMPT_EXCEEDS_TOKEN_BUDGET = np.int64(4)
NO_PROGRESS = np.int64(5)
KV_CAPACITY_EXHAUSTED = np.int64(6)
DEADLOCK = np.int64(7)

REASON_NAMES = (
    None,
    "length",
    "prompt_exceeds_max_model_len",
    "prompt_exceeds_kv_capacity",
    "prompt_exceeds_token_budget",
    "no_progress",
    "kv_capacity_exhausted",
    "deadlock",
)

REASON_SENTENCES = (
    "ended as asked",
    "the context reached max_model_len before the requested output was produced",
    "the prompt is as long as max_model_len or longer",
    "the prompt does not fit an empty KV pool",
    "the prompt, or the chunk that must run whole, exceeds the token budget of a pass",
    "the rank could make no progress with this request at the head of its queue",
    "the request needs more KV blocks than the pool has",
    "prefill and decode waited for each other with no event left",
)
