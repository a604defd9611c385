"""The examples that `async-rl init` writes into a folder, and the code that copies them.
`starter.py` copies. Every subfolder is one starter.
Only cli.py may import this package.
"""
