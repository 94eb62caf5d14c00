"""Several ranks that train as one: the figures of one process, equal on every rank."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from halteres.config import environ
from halteres.engine.torch import TorchEngine
from halteres.models import TINY

from .rank_program import LIMITS, Found, folder, played

TESTS = Path(__file__).parents[1]
RUNS_WITHIN_S = 100

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
async def alone(place: Path) -> Found:
    """What one process makes of it, without ranks."""
    written = place / "alone.npz"
    if not written.exists():
        engine = TorchEngine(folder(), TINY, 1, LIMITS)
        try:
            np.savez(written, **await played(engine, place))
        finally:
            await engine.close()
    with np.load(written) as found:
        return dict(found)


@cache
def ran(place: Path, size: int, *options: str) -> Found:
    """What `rank_program` has written, as so many ranks; it compares them with each other."""
    place.mkdir()
    out = place / "found.npz"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(size), "--max-restarts", "0"),
            *("-m", "engine.rank_program", str(out), str(place), *options, str(size)),
        ],
        cwd=TESTS,
        env=environ.for_child(OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS)),
        capture_output=True,
        text=True,
        timeout=RUNS_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    with np.load(out) as written:
        return dict(written)


def apart(found: Found, alone: Found, kind: str, *, relative: bool = False) -> float:
    """The largest difference of what is called so."""
    worst = 0.0
    for name, expected in alone.items():
        if name.startswith(kind):
            difference = float(np.abs(found[name] - expected).max())
            if relative:
                difference /= float(np.abs(expected).max())
            worst = max(worst, difference)
    return worst


def assert_like_one(found: Found, alone: Found) -> None:
    assert apart(found, alone, "logprobs") <= 5e-5
    assert apart(found, alone, "loss", relative=True) <= 2e-4
    assert apart(found, alone, "weights") <= 1e-5
    assert apart(found, alone, "tokens") == 0
    assert apart(found, alone, "update_norm", relative=True) <= 1e-4
    assert apart(found, alone, "grad_norm", relative=True) <= 1e-4
    assert str(found["refused"]) == "nan_loss"
    assert str(found["not read"]) == "not_found"


def test_one_rank_has_the_bits_of_one_process(place: Path, alone: Found) -> None:
    found = ran(place / "1", 1)
    for name, expected in alone.items():
        assert np.array_equal(found[name], expected), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_a_sharded_base_compute_what_one_process_computes(
    size: int, place: Path, alone: Found
) -> None:
    """As below, by transformers' layers, of which each rank has a part; computed once more in the
    backward.
    """
    assert_like_one(ran(place / f"{size} sharded", size, "--shard"), alone)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_process_computes(size: int, place: Path, alone: Found) -> None:
    """Log-probabilities, losses and weights of two adapters of different ranks trained in turns,
    one made later, one dropped, one loaded; after a loss that is not finite on the last rank alone,
    and a folder that the last rank alone does not see.
    """
    assert_like_one(ran(place / f"{size}", size), alone)


@pytest.mark.parametrize("options", [(), ("--shard",)], ids=["replicated", "sharded"])
def test_two_runs_of_equal_size_have_equal_bits(options: tuple[str, ...], place: Path) -> None:
    name = " ".join(("2", *options)).replace("--shard", "sharded")
    first, second = ran(place / name, 2, *options), ran(place / f"{name} again", 2, *options)
    assert np.array_equal(first["digest"], second["digest"])
