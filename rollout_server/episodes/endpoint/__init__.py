"""The HTTP endpoint of agents: chat completions and responses, as OpenAI's, and messages, as Anthropic's."""
