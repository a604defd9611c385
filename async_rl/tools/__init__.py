"""Commands around a training: `sweeps/` with report and plan, `doctor/`, `view/` (the page of a run),
`starters/` (what `init` writes) and `stages.py` (SFT and reward training).
Only async_rl/api.py and cli.py may import this package.
"""
