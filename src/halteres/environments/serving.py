"""`serve`: keep the trainer's next batch filled.

    status ─▶ step over? (metrics, checkpoint, evaluation) ─▶ start items up to the allowance ─▶
    wait for one, or 50 ms

Promise: groups under way and on their way never exceed the allowance of the server's last answer;
they are sent in the order in which they were drawn, so that a batch is the next groups in line, not
those that were finished first, which would favour short episodes. A group that is finished early
waits for its turn; nobody's sampling waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from halteres.clients.trajectories import Address, EnvStatus
from halteres.environments.base import BaseEnv, awaited, set_up
from halteres.environments.config import EvalHandling
from halteres.environments.heartbeat import beating
from halteres.environments.item_rollout import DrawnItem, Items, SettledItem, settle_item
from halteres.environments.quarantine import FILE, Quarantine
from halteres.environments.scored import ScoredDataGroup, rollouts_of, to_wire
from halteres.environments.trajectory_link import STORED, TrajectoryLink
from halteres.errors import (
    EnvironmentFailed,
    EnvironmentGaveUp,
    HalteresError,
    InvalidData,
    SamplerFailed,
    ScorerFailed,
    boundary,
)
from halteres.rollouts.groups import as_data
from halteres.types import FailedRollout

log = logging.getLogger(__name__)

POLL_S = 0.05
LAST_WORDS_S = 2.0
WARN_AFTER_FAILED, WARN_AFTER_DROPPED = 3, 64  # groups in a row
SOLVED = 0.9  # share of answers from which on equal scores are no trouble


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The batch that a deterministic environment, the only one of its run, is filling.

    Elsewhere the trajectory server says how many groups it has room for, and whatever weights are
    newest sample them: which those are depends on what took how long. Here the batch after k others
    is sampled by the weights with which the trainer asked for the batch after k - lag others
    (before the first: by those of its first question), and holds the first groups in the order of
    draws. It is begun when that question was asked, so that rollouts go on during `lag` optimiser
    steps.

    The count is this environment's own, from the first batch that was not delivered when it began.
    Started again, it draws that batch from its beginning: what the server has already counts once,
    by its key.
    """

    lag: int  # batches that the weights may lag behind
    batch_size: int  # rollouts
    group_size: int  # rollouts
    step: int  # whole batches before it
    # of the weights that sample it; None: the trainer has not asked with them yet
    version: int | None = None
    filled: int = 0  # rollouts that it has

    @property
    def room(self) -> int:
        """Groups that may be under way; 0 until the weights are there."""
        return 0 if self.version is None else -(-(self.batch_size - self.filled) // self.group_size)

    def has_room_for(self, step: int, num_rollouts: int) -> bool:
        """Whether a group that was drawn for the batch after `step` others has a place in it: not
        where an item gave several groups, or one larger than what is missing.
        """
        return step == self.step and self.filled + num_rollouts <= self.batch_size

    def is_completed_by(self, num_rollouts: int) -> bool:
        """Whether so many rollouts more make the batch whole: then nothing else is under way."""
        return self.filled + num_rollouts >= self.batch_size

    def add(self, num_rollouts: int) -> None:
        """A group has its place; a batch that is whole makes room for the next."""
        if self.is_completed_by(num_rollouts):
            self.step, self.filled, self.version = self.step + 1, 0, None
        else:
            self.filled += num_rollouts


class Serving:
    """One environment, serving one trainer until it has enough."""

    def __init__(self, env: BaseEnv, link: TrajectoryLink) -> None:
        self._env, self._link = env, link
        folder = None
        if env.config.run_dir is not None:
            folder = Path(env.config.run_dir)
        self._quarantine = Quarantine(folder, at_once=env.config.weights_lag is None)
        self._items = Items(env)
        self._plan: BatchPlan | None = None  # of a deterministic environment
        self._delivered = 0  # batches
        self._under_way: dict[asyncio.Task[None], DrawnItem] = {}
        self._rolling_out = 0  # of them, those that are not settled
        # done once all that was drawn is sent or dropped
        self._last_turn = asyncio.get_running_loop().create_future()
        self._last_turn.set_result(None)
        self._evaluation: asyncio.Task[None] | None = None
        self._failed_in_a_row = Counter[str]()  # groups by what failed: "rollouts", "sending"
        self._dropped_in_a_row = 0
        self._num_failed_calls = 0  # of the sampler, as far as they are reported
        self._idle = False  # the last item came to nothing: the next ones wait for a poll

    async def run(self) -> None:
        """Serve until `total_steps` batches were delivered; cancel to end earlier.

        Raises:
            HalteresError: registration, too many failed groups, or a server that stayed away.
        """
        await set_up(self._env)
        async with beating():
            await self._serve()

    async def _serve(self) -> None:
        env, config = self._env, self._env.config
        url = Address.of(config.rollout_server_url).url  # without the token that may be in it
        log.info("Registering as %s at %s.", env.wandb_name, url)
        registered = await self._link.register()
        self._items = Items(env, self._link.life, self._quarantine)
        env.curr_step = self._delivered = registered.starting_step
        if config.weights_lag is not None:
            self._plan = BatchPlan(
                lag=config.weights_lag,
                batch_size=self._link.batch_size,
                group_size=config.group_size,
                step=registered.starting_step,
            )
        env.checkpoint_dir = registered.checkpoint_dir
        if registered.starting_step > 0:
            env.load_checkpoint()
        log.info("Registered as %s at step %d.", registered.name, registered.starting_step)
        try:
            await self._until_enough()
        finally:
            await self._end()

    async def _until_enough(self) -> None:
        plan = self._plan
        while True:
            # before the question: what the answer counts as queued may be in here too
            pending = len(self._under_way)
            step = None if plan is None else plan.step
            # Of the batch before the one with whose question the trainer names the weights.
            status = await self._link.status(None if plan is None else plan.step - plan.lag)
            if plan is not None and step == plan.step:
                plan.version = status.asked_version
            await self._advance(status)
            total = self._env.config.total_steps
            total = total if total > 0 else self._link.registered.num_steps
            if 0 < total <= status.current_step:
                log.info("All %d batches were delivered.", status.current_step)
                # hear the acknowledgements of the last posts, which close their step
                if self._under_way:
                    self._reap((await asyncio.wait(self._under_way, timeout=LAST_WORDS_S))[0])
                self._link.drop_undelivered()
                await self._report()
                return
            room = (
                status.allowance or 0
                if plan is None
                else plan.room
                if total <= 0 or plan.step < total
                else 0
            )
            await self._start(room - pending)
            if not self._under_way or self._idle:
                await asyncio.sleep(POLL_S)
                self._idle = False
            if self._under_way:
                first = asyncio.wait(
                    self._under_way, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._reap((await first)[0])

    async def _start(self, room: int) -> None:
        """Put up to `room` more items under way, as far as there are workers."""
        config, workers = self._env.config, self._env.config.max_workers
        if self._evaluation is not None and not self._evaluation.done():
            shares = {EvalHandling.NONE: 1.0, EvalHandling.LIMIT_TRAIN: config.eval_limit_ratio}
            workers = int(workers * shares.get(config.eval_handling, 0.0))
        for _ in range(min(room, workers - self._rolling_out)):
            if self._plan is not None and self._plan.step != self._env.curr_step:
                return  # the batch became whole meanwhile
            if self._plan is not None and self._has_older_items(self._plan.step):
                return
            try:
                drawn = await self._items.next(
                    self._plan.version if self._plan is not None else None
                )
            except EnvironmentGaveUp:
                raise
            except EnvironmentFailed as failure:
                drawn = None
                self._note_failure(self._env.curr_step + 1, -1, None, (as_data(failure),))
            if drawn is None:
                self._idle = True
                return
            if drawn.failure is not None:
                self._settle_failed(SettledItem(drawn=drawn, failures=(drawn.failure,)))
                return
            turn, self._last_turn = self._last_turn, asyncio.get_running_loop().create_future()
            self._rolling_out += 1
            task = asyncio.create_task(
                self._work(drawn, turn, self._last_turn), name=f"item {drawn.draw.ordinal}"
            )
            task.add_done_callback(
                lambda _, turn=turn, after=self._last_turn: _pass_on(turn, after)
            )
            self._under_way[task] = drawn

    def _has_older_items(self, step: int) -> bool:
        """Whether items of an earlier batch are under way, which came to more groups than it had
        room for. What they come to may concern what is drawn next, and must not depend on time.
        """
        return any(drawn.draw.step < step for drawn in self._under_way.values())

    def _reap(self, finished: set[asyncio.Task[None]]) -> None:
        for task in finished:
            del self._under_way[task]
            task.result()  # what stops the environment surfaces here

    async def _work(
        self, drawn: DrawnItem, turn: asyncio.Future[None], after: asyncio.Future[None]
    ) -> None:
        """One item, until its groups are acknowledged; they wait for their turn, one that comes to
        nothing does not.
        """
        settled = await settle_item(self._env, drawn)
        self._rolling_out -= 1
        self._items.put_back(settled.backlog)
        if settled.failures:
            self._settle_failed(settled)
            return
        if settled.groups:
            self._failed_in_a_row.pop("rollouts", None)
        tally = self._env.records.tally(drawn.batch_step)
        tally.item(settled.took_s, settled.sampling_s)
        self._note_dropped(settled)
        if settled.groups:
            # not the future itself: cancelled, it would fail whoever waits for the next
            await asyncio.wait([turn])
        for number, group in enumerate(settled.groups):
            await self._deliver(drawn, number, group)
        _pass_on(turn, after)
        await self._call("cleanup", self._env.cleanup)

    async def _deliver(self, drawn: DrawnItem, number: int, group: ScoredDataGroup) -> None:
        records, plan, num_rollouts = self._env.records, self._plan, len(rollouts_of(group))
        tally = records.tally(drawn.batch_step)
        if plan is not None and not plan.has_room_for(drawn.draw.step, num_rollouts):
            tally.count("groups/dropped/surplus")
            place = (drawn.batch_step, drawn.draw.ordinal, drawn.item)
            records.not_sent(*place, group, "surplus")
            return
        records.group(drawn.batch_step, drawn.draw.ordinal, drawn.item, group)
        has_state = type(self._env).save_checkpoint is not BaseEnv.save_checkpoint
        if plan is not None and plan.is_completed_by(num_rollouts) and has_state:
            # What it has to know of itself when it begins the next batch: started again, or
            # resumed, it begins there. Before the batch's last group is sent, which may make a
            # batch of it at once: an environment killed between the two would begin a batch whose
            # checkpoint does not exist.
            step = plan.step + 1
            await self._call("save_checkpoint", lambda: self._env.save_checkpoint(step))
        body = to_wire(group, include_messages=self._env.config.include_messages)
        try:
            posted = await self._link.send(body, f"{drawn.draw.step}/{drawn.draw.ordinal}/{number}")
        except InvalidData as error:
            refused = FailedRollout(code="refused", why=error.sentence)
            place = (drawn.batch_step, drawn.draw.ordinal, drawn.item)
            self._note_failure(*place, (refused,), "sending")
            return
        if posted.set_aside:
            log.warning("The trajectory server set a group aside: %s", posted.set_aside)
            tally.count("groups/set_aside")
            place = (drawn.batch_step, drawn.draw.ordinal)
            records.set_aside(*place, group, posted.set_aside)
            self._idle = True
        elif plan is not None:
            plan.add(num_rollouts)
        tally.count("groups/kept" if posted.status == STORED else "groups/sent")
        self._failed_in_a_row.pop("sending", None)

    def _note_dropped(self, settled: SettledItem) -> None:
        """Count what was dropped; many groups in a row that taught nothing are an alert, and in the
        end the end.

        Raises:
            EnvironmentGaveUp: there were `max_dropped_groups` of them.
        """
        step, limit = settled.drawn.batch_step, self._env.config.max_dropped_groups
        tally = self._env.records.tally(step)
        drawn = settled.drawn
        for group, reason in settled.dropped:
            self._env.records.dropped(step, drawn.draw.ordinal, drawn.item, group, reason)
            tally.count(f"groups/dropped/{reason}")
        self._idle = self._idle or not settled.groups
        number = self._dropped_in_a_row = 0 if settled.groups else self._dropped_in_a_row + 1
        if number == 0 or number % WARN_AFTER_DROPPED:
            return
        reasons = (
            ", ".join(sorted({reason for _, reason in settled.dropped})) or "nothing was collected"
        )
        evidence = f"{number} groups in a row were dropped (last: {reasons})."
        share = tally.row().get("train/percent_correct")
        if share is not None:
            evidence = f"{evidence} {share:.0%} of the step's answers were right."
        if share is not None and share >= SOLVED:
            fix = "Nothing is left to learn: only harder tasks would teach more."
        elif share == 0.0:
            fix = (
                "See whether the scorer would know a right answer; if so, make the task easier "
                "or the groups larger."
            )
        else:
            fix = (
                "Make the task easier or harder, or the groups larger, so that some answers of "
                "a task are better."
            )
        if limit and number >= limit:
            raise EnvironmentGaveUp(
                f"{self._env.title} gives the trainer nothing to learn from.", evidence, fix
            )
        log.warning("%s", evidence)
        self._env.records.notice("no_reward_variance", step, evidence, fix, percent_correct=share)

    def _settle_failed(self, settled: SettledItem) -> None:
        """Record an item whose group failed for good, and quarantine its task where that was the
        task's fault.
        """
        drawn, quarantine = settled.drawn, self._quarantine
        step, item, failures = drawn.batch_step, drawn.item, settled.failures
        if item is not None and not settled.waited_for_sampler:
            quarantine.add(drawn.draw, item, failures)
        # where nearly every group fails, that is what is said
        are_many = self._failed_in_a_row["rollouts"] + 1 >= WARN_AFTER_FAILED
        if not are_many and quarantine.share_has_grown():
            where = ""
            if self._env.config.run_dir:
                where = f" {FILE} in the run's folder lists them with their failures."
            fix = f"Mend {self._env.to_mend}."
            evidence = f"{quarantine} They are not drawn again.{where}"
            log.warning("%s", evidence)
            self._env.records.notice("tasks_quarantined", step, evidence, fix)
        self._note_failure(step, drawn.draw.ordinal, item, failures)

    def _note_failure(
        self,
        step: int,
        ordinal: int,
        item: object,
        failures: tuple[FailedRollout, ...],
        what: str = "rollouts",
    ) -> None:
        """Record a failed group; `what`: of it failed.

        Raises:
            EnvironmentFailed: it is one too many in a row.
        """
        self._idle = True
        self._env.records.failed(step, ordinal, item, failures)
        self._failed_in_a_row[what] += 1
        number, last = self._failed_in_a_row[what], failures[-1]
        fix = f"Mend {self._env.to_mend}"
        if last.code == ScorerFailed.code:
            fix = "See whether that reward answers, or take it out of env.rewards"
        elif last.code == SamplerFailed.code:
            fix = "See whether the server that it samples from answers"
        if number >= self._env.config.max_failed_groups:
            kind = EnvironmentFailed if last.code == SamplerFailed.code else EnvironmentGaveUp
            raise kind(
                f"{number} groups of {self._env.title} failed one after another.",
                f"The last: {last.why}",
                f"{fix}; max_failed_groups sets how many are put up with.",
                failure=last.code,
            )
        if number == WARN_AFTER_FAILED:
            evidence = f"{number} groups failed one after another. The last: {last.why}"
            self._env.records.notice("groups_failed", step, evidence, f"{fix}.")

    async def _advance(self, status: EnvStatus) -> None:
        """Do what is due when the trainer took batches: metrics; every so many steps a checkpoint,
        an evaluation.

        A deterministic environment's current step is the batch that it fills, so that what it
        draws, and what it saves of itself, does not depend on when the trainer took one.
        """
        before, now = (
            self._env.curr_step,
            status.current_step if self._plan is None else self._plan.step,
        )
        self._env.curr_step, self._delivered = now, status.current_step
        await self._report()
        if now == before:
            return
        interval = self._link.registered.checkpoint_interval
        if self._plan is None and interval > 0 and now // interval > before // interval:
            await self._call("save_checkpoint", lambda: self._env.save_checkpoint(now))
        every = self._env.config.steps_per_eval
        # then the supervisor evaluates pinned weights
        supervised = self._env.config.run_dir is not None
        is_due = not supervised and every > 0 and now // every > before // every
        if is_due and (self._evaluation is None or self._evaluation.done()):
            self._evaluation = asyncio.create_task(self._evaluate(now), name="evaluation")

    async def _report(self) -> None:
        """Write the figures of steps whose batch was delivered and of which nothing is under way
        any more.
        """
        first_open = min(
            (drawn.batch_step for drawn in self._under_way.values()), default=self._delivered + 1
        )
        for step, figures in self._env.records.close(
            before=min(first_open, self._delivered + 1)
        ).items():
            log.info(
                "step %d: %s",
                step,
                ", ".join(f"{name} {value:.3g}" for name, value in figures.items()),
            )
            failed_calls = self._env.server.num_failed_calls - self._num_failed_calls
            self._num_failed_calls += failed_calls
            row = {
                "step": step,
                **figures,
                **self._env.taken_counts(),
                "sampling/failed_calls": failed_calls,
                **self._quarantined(),
            }
            await self._call("wandb_log", lambda row=row: self._env.wandb_log(row))

    def _quarantined(self) -> dict[str, int]:
        """How many tasks are quarantined by now, where there are any."""
        if len(self._quarantine):
            return {"tasks/quarantined": len(self._quarantine)}
        return {}

    async def _call(self, name: str, hook: Callable[[], Awaitable[None] | None]) -> None:
        """Run one of the author's hooks; what it raises is logged, and the run goes on."""
        try:
            with boundary(EnvironmentFailed, f"{self._env.title}.{name}"):
                await awaited(hook())
        except EnvironmentFailed as error:
            log.warning("%s", error.sentence)

    async def _evaluate(self, step: int) -> None:
        try:
            with boundary(EnvironmentFailed, f"{self._env.title}.evaluate"):
                metrics = await self._env.evaluate() or self._env.last_evaluation
        except HalteresError as error:
            log.warning("The evaluation at step %d failed: %s", step, error.sentence)
            return
        log.info("evaluation at step %d: %s", step, dict(metrics))
        self._env.records.log(step, metrics, src="eval")

    async def _end(self) -> None:
        """Stop what is under way, write what is known, say goodbye."""
        tasks = [*self._under_way, *([self._evaluation] if self._evaluation else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for step, figures in self._env.records.close(before=self._env.curr_step + 2).items():
            counts = {**self._env.taken_counts(), **self._quarantined()}
            self._env.records.log(step, {**figures, **counts})
        await self._call("cleanup", self._env.cleanup)


def _pass_on(turn: asyncio.Future[None], after: asyncio.Future[None]) -> None:
    """An item is over: it is the next one's turn as soon as it would have been its own."""
    turn.add_done_callback(lambda _: None if after.done() else after.set_result(None))
