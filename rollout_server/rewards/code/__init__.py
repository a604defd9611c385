"""Rewards for programs: their test cases run in a sandbox, and results are compared outside.
`checker.py` checks one answer.
Rewards and tasks import it.
"""
