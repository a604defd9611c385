"""Rollout: `worker/` fills slots with prompts, `engines/` generate (SGLang, vLLM, hf), `episodes/` hold conversations,
`tasks/` give prompts, `rewards/` score answers.
It imports async_rl/base and buffer. Run and tools may import it.
"""
