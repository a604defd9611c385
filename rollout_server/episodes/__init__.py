"""Conversations of several turns, with tokens exactly as they were generated.
`player.py` and `multi_turn.py` play groups, `loop.py` one episode; `conversation/` keeps its tokens.
Workers, tasks, rewards and evaluations may import it.
"""
