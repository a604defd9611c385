"""The tokens of a conversation: rendering of messages, parsing of replies and calls, and the rows for training.
`session.py` keeps one conversation.
Players and agents import it.
"""
