"""The settings with which weights can't travel as adapters or as changed values."""

from __future__ import annotations

import dataclasses

import pytest

from async_rl.config import ModelConfig, WeightSyncConfig
from async_rl.config.check import SettingsError
from async_rl.config.compact import check_compact_type
from tests.kit.configs import make_config


def test_a_sparse_push_is_refused_where_auto_gives_float32() -> None:
    sparse = dataclasses.replace(make_config(), weight_sync=WeightSyncConfig(delta=True))
    check_compact_type(sparse.weight_sync, sparse.model, "cuda")
    check_compact_type(sparse.weight_sync, ModelConfig(path="none", dtype="bfloat16"), "cpu")
    with pytest.raises(SettingsError, match=r"^weight_sync\.delta"):
        check_compact_type(sparse.weight_sync, sparse.model, "cpu")
