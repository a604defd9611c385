"""Tools that a policy may call: functions, a calculator, retrieval and MCP servers.
`tool.py` has their Protocol.
Players import it.
"""
