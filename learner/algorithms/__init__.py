"""Formulas of tokens: losses, advantages, corrections of importance, and their diagnostics.
`objective.py` puts them together. All are pure functions of tensors.
Only learner imports it.
"""
