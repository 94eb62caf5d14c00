"""What OpenEnv's probe says of our service; prints one JSON object. Runs in the environment of openenv.

python openenv_program.py SERVICE_URL
"""

from __future__ import annotations

import json
import sys

from openenv.core.harness.capture.validate_llm import validate_llm

if __name__ == "__main__":
    report = validate_llm(f"{sys.argv[1]}/v1", "halteres/tiny")
    told = {
        "ok": report.ok,
        "capture_level": report.capture_level,
        "logprobs_mode": report.logprobs_mode,
        "tool_support": report.tool_support,
    }
    sys.stdout.write(f"\n{json.dumps(told)}")
