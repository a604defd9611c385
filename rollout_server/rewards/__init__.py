"""Rewards of answers: rules, mathematics, programs, judges and models.
`scoring.py` scores a group, `base.py` lists the rewards.
Tasks, workers and evaluations may import this package.
"""
