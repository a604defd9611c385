"""The tokens of a conversation: `rendering.py` turns messages into tokens, `reply_reader.py` tokens into messages.
`session.py` keeps the tokens of one conversation.
Players and agents import this package.
"""
