"""async_rl/base/weights/parcels.py under a name that vLLM's workers can import: its environment has no async_rl."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve().parents[4] / "async_rl" / "base" / "weights" / "parcels.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("async_rl_parcels", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_parcels = _module()
Rebuilder = _parcels.Rebuilder
holds_nan = _parcels.holds_nan
is_parcel = _parcels.is_parcel
