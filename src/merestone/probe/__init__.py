"""The qualification suite: what a server must show, asked over HTTP of any OpenAI-like URL."""
