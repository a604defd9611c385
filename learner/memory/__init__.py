"""How much memory a learner rank needs, computed before anything is loaded.
`memory_plan.py` has the table, `rank_memory.py` the sum, `sizes.py` and `passes.py` its terms.
Learner and driver may import it.
"""
