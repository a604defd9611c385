"""Rewards of answers: rules, mathematics, programs, judges and models.
`scoring.py` lists the rewards and scores a group; `contract.py` is what a reward function promises.
Tasks, workers and evaluations may import this package.
"""
