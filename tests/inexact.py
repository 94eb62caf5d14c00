"""A service as a process whose engine is not exact: `python -c PROGRAM --engine scripted ...`."""

from __future__ import annotations

ENGINE = """
import asyncio, itertools, sys
from halteres.engine.__main__ import main
from halteres.engine.scripted import engine
class Inexact(engine.ScriptedEngine):
    def __init__(self, *given):
        super().__init__(*given, exact=False)
        self._number = itertools.count(1)
    async def sample(self, *given):
        await asyncio.sleep(0.01 * next(self._number))
        return await super().sample(*given)
engine.ScriptedEngine = Inexact
sys.exit(main())
"""
"""Each sample takes a hundredth of a second more than the one before: some are answered, others
wait.
"""

PROGRAM = f"""
import sys
from halteres.engine.process import EngineCommand
from halteres.service.server import main
argv = EngineCommand.argv
EngineCommand.argv = lambda self, path: [sys.executable, "-c", {ENGINE!r}, *argv(self, path)[3:]]
sys.exit(main())
"""
