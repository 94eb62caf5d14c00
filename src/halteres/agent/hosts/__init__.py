"""Agent hosts: programs whose agents call the tools, and what they must be told of us.

    hosts         which hosts there are, where each keeps its settings and skills
    settings      one settings file: registering our server there, and taking it out again
    changes       a change of one file, made whole or not at all, with a backup; a plan of several
    install       all of it, and the skills in a host's folder: a plan, which can be shown or carried out

Every host is written to in the same way, by its settings file. The commands that some of them have for it (`claude mcp
add`) could not be shown beforehand, nor say how long a call may take.
"""
