"""The learner takes batches, updates the weights and pushes them. `loop/` is the process, `algorithms/` the formulas,
`models/` the networks, `packing.py` microbatches, `memory/` what a rank needs, `stages/` SFT and reward training.
It imports async_rl/base and buffer. Run and tools may import it.
"""
