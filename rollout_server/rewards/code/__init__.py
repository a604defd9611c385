"""The reward `code`: programs in answers run in a sandbox, and their results are compared outside.
`checker.py` checks one answer, `cases.py` reads its tests, `sandbox.py` runs a program.
Rewards and tasks import this package.
"""
