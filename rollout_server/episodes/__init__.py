"""Conversations of several turns, kept token by token as they were generated.
`episode.py` and `multi_turn.py` play groups, `loop.py` one episode; `conversation/` keeps its tokens.
Workers, tasks, rewards and evaluations may import this package.
"""
