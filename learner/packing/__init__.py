"""Which sequences go into which microbatch, and their attention mask.
`plan.py` decides, `microbatches.py` makes the tensors.
Only learner imports it.
"""
