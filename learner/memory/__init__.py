"""How much memory a learner rank needs: sum, checks and table in `memory_plan.py`, terms in `sizes.py`, `passes.py`."""
