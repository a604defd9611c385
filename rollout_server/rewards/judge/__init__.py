"""Rewards by a judge: a chat model on an OpenAI server.
`client.py` asks it, `verdicts.py` reads what it says.
Only rewards import it.
"""
