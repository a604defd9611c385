"""SGLang. `engine.py` implements `Engine`, `launch.py` starts the server, `admin.py` implements `ServerAdmin`.
`server_changes.py` has this project's changes inside the server.
base/seams/engines.py names it.
"""
