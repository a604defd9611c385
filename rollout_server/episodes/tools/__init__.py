"""Tools that a policy may call: functions, a calculator, retrieval and MCP servers.
`tool.py` has the class `Tool`, which wraps each of them.
Players import this package.
"""
