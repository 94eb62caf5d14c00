"""The agent's tools: one table, put on MCP, HTTP, the command line, Python, OpenAI's format and Hermes."""
