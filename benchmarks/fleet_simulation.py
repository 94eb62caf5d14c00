"""What does a fleet of samplers do as it grows: a simulation in virtual time, seeded, in which the
code that decides is the real one.

Real: which sampler a request goes to (`service.sampling.router`), how many groups an environment
may have under way (`trajectories.diagnostics.allowance`), the queue, which groups make a batch and
which are too old (`trajectories.state`, `ingest`, `batches`). Groups are posted in the order in
which they were drawn, as environments do.

Simulated: samplers, the answers' lengths, deaths, the trainer. A sampler needs BASE_S for each
token of all its sequences and ROW_S more for each sequence: 6,300 tokens a second of 64 sequences
and 12,500 of 256, vLLM's published rates with 8 billion parameters in bfloat16 on one H100. Answers
are log-normal with a standard deviation as large as their mean, as reasoning has it.

    .venv/bin/python benchmarks/fleet_simulation.py --samplers 8 --staleness 1
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any, cast

from halteres.engine.process import State as HostState
from halteres.process import usable_cores
from halteres.service.fleet import Fleet
from halteres.service.sampling.router import Router
from halteres.trajectories import batches, diagnostics
from halteres.trajectories.environments import Environment
from halteres.trajectories.ingest import accept_all
from halteres.trajectories.options import Rules
from halteres.trajectories.posted_group import Scored
from halteres.trajectories.records import Delivery, Remembered
from halteres.trajectories.schema import BatchQuery, EnvRegistration, Registration
from halteres.trajectories.state import State

ROWS = 256  # sequences that a sampler decodes at a time; more wait there
# sequences, and tokens a second of all of them
FEW, MANY = (64, 6_300.0), (256, 12_500.0)
# seconds for a token of each sequence: BASE_S, and ROW_S for each sequence
ROW_S = (MANY[0] / MANY[1] - FEW[0] / FEW[1]) / (MANY[0] - FEW[0])
BASE_S = FEW[0] / FEW[1] - FEW[0] * ROW_S

HOUR_S = 3600.0
ADAPTER = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated."""

    samplers: int
    staleness: int  # max_staleness, in policy versions
    batch: int  # sequences
    environments: int = 1  # processes that draw; never more than groups of a batch
    train_s: float = 10.0  # of a step
    publish_s: float = 1.0  # until samplers have the new weights
    group: int = 8  # sequences of a task
    mean_tokens: float = 512.0  # of an answer
    spread: float = 1.0  # standard deviation over mean; 0: all are alike
    most_tokens: int = 4096
    slow_share: float = 0.05  # samplers that need `slow_factor` times as long
    slow_factor: float = 1.5
    hours_to_death: float = 24.0  # mean, of one sampler; inf: none dies
    restart_s: float = 120.0
    steps: int = 5  # that are counted
    warm_up: int = 2  # steps before them
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of it, over the counted steps."""

    steps_per_hour: float
    trainer_idle: float  # share of the time in which it waits for a batch
    samplers_busy: float  # share of the samplers that have something to do, mean over the time
    rows: float  # sequences that a sampler decodes at a time, mean
    too_old: float  # share of the sequences that no batch took because of their age
    deaths: int


@dataclass(slots=True, eq=False)
class Group:
    """Answers to one task, asked for by one request."""

    env: Drawer
    number: int
    lengths: list[int]
    version: int
    route: ExitStack = field(default_factory=ExitStack)
    pick: Callable[[list[Sampler]], Sampler] = field(init=False)
    left: int = 0  # answers that are not there yet


class Sampler:
    """A sampler, which is its own host: the router looks at its state alone."""

    def __init__(self, clock: Clock, factor: float) -> None:
        self.state: HostState = "ready"
        self.info = None
        self._clock, self._factor = clock, factor
        # sequences under way, by the token count of each at which they are done
        self._rows: list[tuple[float, int, Group]] = []
        self._waiting = deque[tuple[int, Group]]()
        self._tokens = 0.0  # that each sequence has been given since the beginning
        self._at, self._life, self._number = 0.0, 0, itertools.count()
        self.busy_s, self.row_s = 0.0, 0.0  # up to now; times sequences

    def start(self, group: Group) -> None:
        """Begin a group's answers."""
        self.advance()
        group.left = len(group.lengths)
        self._waiting.extend((length, group) for length in group.lengths)
        self._fill()

    def advance(self) -> None:
        """Decode up to now."""
        seconds, self._at = self._clock.now - self._at, self._clock.now
        if self._rows:
            self._tokens += seconds / self._token_s
            self.busy_s += seconds
            self.row_s += seconds * len(self._rows)

    def die(self) -> list[Group]:
        """Lose everything; returns whose answers they were."""
        self.advance()
        lost = [group for _, _, group in self._rows] + [group for _, group in self._waiting]
        self._rows.clear()
        self._waiting.clear()
        self._life += 1
        self.state = "starting"
        return list(dict.fromkeys(lost))

    @property
    def _token_s(self) -> float:
        return self._factor * (BASE_S + ROW_S * len(self._rows))

    def _fill(self) -> None:
        """Begin what there is a place for, and look again when the next one is done."""
        while self._waiting and len(self._rows) < ROWS:
            length, group = self._waiting.popleft()
            heapq.heappush(self._rows, (self._tokens + length, next(self._number), group))
        self._life += 1
        if self._rows:
            life = self._life
            seconds = (self._rows[0][0] - self._tokens) * self._token_s
            self._clock.after(max(0.0, seconds), lambda: self._next_done(life))

    def _next_done(self, life: int) -> None:
        if life != self._life:  # something else has begun, or ended, meanwhile
            return
        self.advance()
        done, _, group = heapq.heappop(self._rows)
        self._tokens = max(self._tokens, done)
        self._fill()
        group.left -= 1
        if group.left == 0:
            group.env.finished(group)


class Clock:
    """Virtual time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._coming, (self.now + seconds, next(self._number), action))

    def step(self) -> None:
        """Go on to the next thing that happens."""
        self.now, _, action = heapq.heappop(self._coming)
        action()


class Drawer:
    """One environment: it draws groups as far as the trajectory server allows, and posts them in
    the order in which they were drawn.
    """

    def __init__(self, fleet: SimulatedFleet, env: Environment) -> None:
        self.env = env
        self._fleet = fleet
        self._under_way = deque[Group]()  # drawn and not posted
        self._done = set[Group]()

    def draw(self) -> None:
        """As many groups as it may have under way."""
        room = diagnostics.allowance(self._fleet.state, self.env) - len(self._under_way)
        for _ in range(room):
            self._under_way.append(self._fleet.begin(self))

    def finished(self, group: Group) -> None:
        """All its answers are there: it is posted when it is its turn."""
        group.route.close()
        self._done.add(group)
        while self._under_way and self._under_way[0] in self._done:
            first = self._under_way.popleft()
            self._done.remove(first)
            self._fleet.post(first)
        self.draw()


class SimulatedFleet:
    """Samplers, environments, one trajectory server and one trainer."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.clock = setting, Clock()
        self._draw = random.Random(f"{setting.seed} {setting.samplers} {setting.staleness}")
        num_slow = round(setting.slow_share * setting.samplers)
        self.samplers = [
            Sampler(self.clock, setting.slow_factor if number < num_slow else 1.0)
            for number in range(setting.samplers)
        ]
        hosts: Any = self.samplers
        self._router = Router(Fleet(trainer=cast("Any", None), samplers=tuple(hosts)))
        self.state = State(Remembered(), lambda: self.clock.now, Rules())
        # environments ask every 50 ms
        self.state.envs.polling_s = self.state.envs.timeout_s = math.inf
        self._version = self._published = 0
        self._waits_since: float | None = None  # of the trainer, for a batch
        self.waited_s, self.num_steps, self.deaths = 0.0, 0, 0
        self._numbers = itertools.count()
        self._register()

    def _register(self) -> None:
        setting = self.setting
        registration = Registration(
            wandb_group="",
            wandb_project="",
            checkpoint_dir="",
            save_checkpoint_interval=0,
            num_steps=10**6,
            max_token_len=setting.most_tokens,
            batch_size=setting.batch,
            starting_step=0,
            run_id="simulated",
            max_staleness=setting.staleness,
        )
        batches.register(self.state, registration)
        self._drawers = list[Drawer]()
        for _ in range(min(setting.environments, setting.batch // setting.group)):
            asked = EnvRegistration(
                max_token_length=setting.most_tokens, weight=1.0, group_size=setting.group
            )
            env = self.state.save_env(self.state.envs.new_record(asked))
            self._drawers.append(Drawer(self, env))

    def run(self) -> Found:
        """Until all steps are done."""
        for sampler in self.samplers:
            self._die_later(sampler)
        self._ask()
        self._run_to(self.setting.warm_up)
        began, waited_s, deaths = self.clock.now, self.waited_s, self.deaths
        busy_s, row_s = self._work()
        old, taken = self._too_old()
        self._run_to(self.setting.warm_up + self.setting.steps)
        seconds = self.clock.now - began
        new_busy_s, new_row_s = self._work()
        new_old, new_taken = self._too_old()
        posted = (new_old - old) + (new_taken - taken)
        return Found(
            steps_per_hour=self.setting.steps / seconds * HOUR_S,
            trainer_idle=(self.waited_s - waited_s) / seconds,
            samplers_busy=(new_busy_s - busy_s) / seconds / len(self.samplers),
            rows=(new_row_s - row_s) / seconds / len(self.samplers),
            too_old=(new_old - old) / posted if posted else 0.0,
            deaths=self.deaths - deaths,
        )

    def _run_to(self, steps: int) -> None:
        while self.num_steps < steps:
            self.clock.step()

    def _work(self) -> tuple[float, float]:
        for sampler in self.samplers:
            sampler.advance()
        return (
            sum(one.busy_s for one in self.samplers),
            sum(one.row_s for one in self.samplers),
        )

    def _too_old(self) -> tuple[int, int]:
        """Groups that were set aside so far, and others."""
        return self.state.set_aside.total(), self.state.num_accepted

    # Samplers

    def begin(self, drawer: Drawer) -> Group:
        """Draw a task, and ask a sampler for its answers."""
        number = next(self._numbers)
        lengths = [self._length() for _ in range(self.setting.group)]
        group = Group(drawer, number, lengths, self._published)
        # tasks have prompts of their own
        routed = self._router.route(ADAPTER, number.to_bytes(16, "little"))
        group.pick = cast("Any", group.route.enter_context(routed))
        group.pick([]).start(group)
        return group

    def _length(self) -> int:
        setting = self.setting
        variance = math.log1p(setting.spread**2)
        mean = math.log(setting.mean_tokens) - variance / 2
        length = round(self._draw.lognormvariate(mean, math.sqrt(variance)))
        return max(1, min(setting.most_tokens, length))

    def _die_later(self, sampler: Sampler) -> None:
        if math.isinf(self.setting.hours_to_death):
            return
        seconds = self._draw.expovariate(1 / (self.setting.hours_to_death * HOUR_S))
        self.clock.after(seconds, lambda: self._dies(sampler))

    def _dies(self, sampler: Sampler) -> None:
        self.deaths += 1
        for group in sampler.die():
            group.pick([sampler]).start(group)
        self.clock.after(self.setting.restart_s, lambda: self._is_back(sampler))

    def _is_back(self, sampler: Sampler) -> None:
        sampler.state = "ready"
        self._die_later(sampler)

    # Trajectory server and trainer

    def post(self, group: Group) -> None:
        """The trajectory server takes a group, and the trainer a batch, if it waits for one."""
        scored = Scored(
            element=b"{}",
            size=len(group.lengths),
            env_id=group.env.env.id,
            versions=(group.version, group.version),
            key=None,
            fingerprint=0,
            problem=None,
        )
        accept_all(self.state, [scored])
        if self._waits_since is not None:
            self._take_batch()

    def _ask(self) -> None:
        self._waits_since = self.clock.now
        self._take_batch()
        for drawer in self._drawers:
            drawer.draw()

    def _take_batch(self) -> None:
        last: Delivery | None = self.state.run.last
        query = BatchQuery(policy_version=self._version, after=last.id if last else 0)
        batch = batches.next_batch(self.state, query)
        self.state.drain()
        if batch is None:
            return
        batches.count_delivered(self.state, batch.id)
        self.state.keep()
        assert self._waits_since is not None
        self.waited_s += self.clock.now - self._waits_since
        self._waits_since = None
        self.clock.after(self.setting.train_s, self._trained)

    def _trained(self) -> None:
        self._version += 1
        self.clock.after(self.setting.publish_s, self._has_published)

    def _has_published(self) -> None:
        self._published = self._version
        self.num_steps += 1
        self._ask()


SAMPLERS = (1, 4, 16, 64, 250, 1000)
STALENESS = (0, 1, 2, 3, 4)
BATCH_OF_SAMPLER = 64  # sequences, where the trainer grows with the samplers
FIXED_BATCH = 512  # where it does not


def growing(samplers: int, staleness: int) -> Setting:
    """The batch grows with the samplers, and the trainer so that its step takes as long."""
    return Setting(
        samplers=samplers,
        staleness=staleness,
        batch=BATCH_OF_SAMPLER * samplers,
        environments=max(1, samplers // 8),
    )


def fixed(samplers: int, staleness: int) -> Setting:
    """One batch and one trainer, whatever samples for it."""
    return Setting(samplers=samplers, staleness=staleness, batch=FIXED_BATCH)


def simulated(setting: Setting) -> dict[str, Any]:
    """The setting and what came of it."""
    return {**asdict(setting), **asdict(SimulatedFleet(setting).run())}


def all_simulated(most: int = SAMPLERS[-1]) -> dict[str, list[dict[str, Any]]]:
    """Both kinds for every number of samplers up to the most, and every staleness; on all cores."""
    kinds = {"growing": growing, "fixed": fixed}
    pairs = [(one, age) for one in SAMPLERS if one <= most for age in STALENESS]
    # the largest first: they take longest
    settings = [(kind, make(*pair)) for kind, make in kinds.items() for pair in pairs[::-1]]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        all_found = pool.map(simulated, [setting for _, setting in settings])
        for (kind, _), figures in zip(settings, all_found, strict=True):
            found[kind].insert(0, figures)
    return found


def main() -> None:
    """One setting, printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samplers", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--fixed", action="store_true", help="one batch and one trainer for all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    setting = growing(given.samplers, given.staleness)
    if given.fixed:
        setting = fixed(given.samplers, given.staleness)
    print(json.dumps(simulated(replace(setting, seed=given.seed)), indent=1))


if __name__ == "__main__":
    main()
