"""A worker that runs a question's `code` and answers with what it called `value`."""

from halteres.environments import cage

TEXT = f"""
import sys
sys.path.insert(0, {str(cage.WORKER_LOOP.parent)!r})
from worker_loop import serve

def answer(question):
    names = {{}}
    exec(question["code"], names)
    return {{"value": names.get("value")}}

serve(lambda opening: answer)
"""
