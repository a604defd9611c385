"""Named combinations of algorithm.* keys. `algorithm.preset` sets those that the user did not."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},  # the defaults
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {"advantage": "rloo"},
    "remax": {"advantage": "remax"},
    "reinforce_pp": {"advantage": "reinforce_pp", "clip": {"high": 0.2}},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip": {"high": 0.2}},
    "ppo": {"advantage": "gae", "old_logprobs": "rollout", "clip": {"high": 0.2, "dual": 0.0}},
    "decoupled_ppo": {"advantage": "gae", "clip": {"high": 0.2}},
    "vtrace": {"advantage": "vtrace", "gae_lambda": 1.0, "clip": {"high": 0.2}},
    "cispo": {"loss": "cispo", "old_logprobs": "rollout", "clip": {"low": 1.0, "high": 4.0}},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip": {"low": 3e-4, "high": 4e-4}},
    "dppo_tv": {"loss": "dppo_tv", "old_logprobs": "rollout"},
    "m2po": {"correction": {"masks": {"m2po": 0.04}}},
    "icepop": {"correction": {"kind": "token_tis", "cap": float("inf"), "masks": {"token": [0.5, 5.0]}}},
}
