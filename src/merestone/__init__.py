"""merestone: an LLM serving engine for hybrid recurrent models with exact request boundaries."""

__version__ = "0.1.0"
