"""Formulas of tokens: losses, advantages, importance corrections, and their diagnostics.
`objective.py` combines them. All others are pure functions of tensors.
Only learner imports it.
"""
