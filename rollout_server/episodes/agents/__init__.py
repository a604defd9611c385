"""Agents of one's own that ask an OpenAI endpoint: their process and the endpoint.
`openai_endpoint.py` answers them from a session.
Players import it.
"""
