"""Training before RL: SFT and reward models, and the pretraining term.
async_rl/tools/stages.py and api may import it.
"""
