"""Agent clients: programs whose agents call the tools, and what must be written into their files so that they do.

Every client is written to in the same way, by its settings file. The commands that some of them have for it (`claude
mcp add`) could not be shown beforehand, nor say how long a call may take.
"""
