"""The ground: what every process of a run uses. It has the types of trajectories, the settings, the tables of
what can be replaced, messages and network, metrics, weight pushes, and the files of runs and models.
Every package may import it. It imports none of the others.
"""
