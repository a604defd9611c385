"""How much memory a learner rank needs, computed before anything is loaded.
`plan.py` has the table.
Learner and driver may import it.
"""
