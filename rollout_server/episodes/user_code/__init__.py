"""Calls of the user's code, with time limits and with errors that name the user's line.
`time_limits.py` ends what hangs.
Players, agents and rewards import it.
"""
