"""Conversations of several turns, with tokens exactly as they were generated.
`players/` play a group, `conversation/` keeps its tokens, `agents/`, `environments/` and `tools/` are the other side.
Workers, tasks and evaluations may import it.
"""
