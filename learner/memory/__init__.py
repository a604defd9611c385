"""How much memory a learner rank needs, computed before anything is loaded.
`memory_plan.py` has the sum, the checks and the table; `sizes.py` and `passes.py` have its terms.
Learner and driver may import it.
"""
