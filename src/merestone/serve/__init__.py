"""The OpenAI-compatible server: HTTP, chat templates, text, metrics and the command line."""
