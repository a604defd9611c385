"""What every process of a run uses: the types of trajectories, the settings, the tables of exchangeable parts, messages
and network, metrics, weight pushes, and the files of runs and models.
All packages may import this package. It imports none of the others.
"""
