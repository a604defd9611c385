"""The tokens of a conversation: `rendering.py` makes them of messages, `reply_reader.py` reads messages from them.
`session.py` keeps the tokens of one conversation.
Players and agents import it.
"""
