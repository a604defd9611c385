"""Players: they turn a prompt into a group of finished episodes.
`player.py` plays single turns, `env_runner.py` environments.
Workers and evaluations import it.
"""
