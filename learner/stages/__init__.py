"""Trainings before RL: SFT and reward models.
`pretraining.py` has their common loop.
async_rl/tools/stages.py and api may import it.
"""
