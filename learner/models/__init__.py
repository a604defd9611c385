"""Networks: policy, critic and reward model, loaded, sharded, adapted (LoRA), split over ranks and exported.
`policy.py` is the policy's network.
Learner and tools may import it.
"""
