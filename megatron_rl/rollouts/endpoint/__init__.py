"""The policy as an OpenAI endpoint: an agent that knows only a `base_url` is trained."""
