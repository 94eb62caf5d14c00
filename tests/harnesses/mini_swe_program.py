"""mini-swe-agent on a task in a folder of its own; prints one JSON object. Runs in an environment of
its own.

python mini_swe_program.py SERVICE_URL MODEL FOLDER
"""

from __future__ import annotations

import json
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main(url: str, model: str, folder: str) -> None:
    kwargs = {"api_base": f"{url}/v1", "api_key": "tml-test", "max_tokens": 200}
    agent = DefaultAgent(
        LitellmModel(
            model_name=f"openai/{model}", model_kwargs=kwargs, cost_tracking="ignore_errors"
        ),
        LocalEnvironment(cwd=folder),
        system_template="You work by the tool bash.",
        instance_template="{{task}}",
        step_limit=4,
    )
    ended = agent.run("Finish.")
    told = {"exit_status": ended["exit_status"], "calls": agent.n_calls}
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
