"""Rollouts: draws and their seeds, groups completed by repetition, the sampler's limits and
retries.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from halteres.clients.inference import InferenceClient, Sampling
from halteres.clients.json_client import read_answer, until_ready
from halteres.clients.retries import Retries
from halteres.errors import EnvironmentFailed, InvalidData, NotReady, SamplerFailed, ServerError
from halteres.rollouts.groups import GroupFailed, complete, settle
from halteres.rollouts.rng import Draw, next_sampling_seed, one_rollout, rolling_out
from halteres.rollouts.sampler import ContextOverflow, Sampler
from halteres.types import FailedRollout

from .fakes import TOKENIZER, Inference

QUICK = Retries(attempts=3, first_wait_s=0.001, longest_wait_s=0.001)


def client(inference: Inference, **changes: float) -> InferenceClient:
    return InferenceClient(inference.url, **{"ready_within_s": 2.0, **changes})


def sampler(inference: Inference, max_sequence: int = 256) -> Sampler:
    return Sampler(
        client(inference),
        TOKENIZER,
        Sampling(max_new_tokens=32),
        max_sequence=max_sequence,
        retries=QUICK,
    )


def test_a_draw_is_a_function_of_seed_step_ordinal_and_split() -> None:
    draw = Draw(seed=1, step=2, ordinal=3)
    assert draw.rng().random() == Draw(seed=1, step=2, ordinal=3).rng().random()
    others = [
        Draw(seed=0, step=2, ordinal=3),
        Draw(seed=1, step=3, ordinal=2),
        Draw(seed=1, step=2, ordinal=3, split="eval"),
    ]
    assert len({d.rng().random() for d in [draw, *others]}) == 4
    seeds = {draw.sampling_seed(r, a, c) for r in range(4) for a in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_several_environments_of_one_name_draw_different_items() -> None:
    lives = [Draw(seed=1, step=2, ordinal=3, life=life) for life in range(3)]
    assert lives[0].rng().random() == Draw(seed=1, step=2, ordinal=3).rng().random(), (
        "the first: as recorded"
    )
    assert len({draw.rng().random() for draw in lives}) == 3
    assert len({draw.sampling_seed(0, 0, 0) for draw in lives}) == 3


def test_recorded_numbers_hold_on_every_machine() -> None:
    assert Draw(seed=0, step=0, ordinal=0).sampling_seed(0, 0, 0) == 340600315
    assert Draw(seed=0, step=0, ordinal=0).rng().randint(0, 10**9) == 849667892


async def test_seeds_belong_to_the_rollout_that_runs() -> None:
    assert next_sampling_seed() is None
    draw = Draw(seed=1, step=0, ordinal=0)

    async def two(rollout: int) -> list[int | None]:
        with one_rollout(rollout, 0):
            first = next_sampling_seed()
            await asyncio.sleep(0)
            return [first, next_sampling_seed()]

    with rolling_out(draw):
        together = await asyncio.gather(two(0), two(1))
    assert together == [[draw.sampling_seed(r, 0, c) for c in range(2)] for r in range(2)]
    assert next_sampling_seed() is None


async def test_a_group_is_completed_by_asking_for_what_is_missing() -> None:
    asked: list[tuple[int, int]] = []

    async def attempt(wanted: int, number: int) -> list[str | FailedRollout]:
        asked.append((wanted, number))
        failed: list[str | FailedRollout] = [FailedRollout(code="env_error", why="w")] * (
            2 if number == 0 else 0
        )
        return [*failed, *["ok"] * (wanted - len(failed))]

    rollouts, failures = await complete(4, attempt, retries=3)
    assert asked == [(4, 0), (2, 1)]
    assert (rollouts, len(failures)) == (["ok"] * 4, 2)


async def test_a_group_that_stays_incomplete_fails_with_all_that_went_wrong() -> None:
    async def attempt(wanted: int, number: int) -> list[FailedRollout]:
        return [FailedRollout(code="env_error", why=f"round {number}")] * wanted

    with pytest.raises(GroupFailed, match="round 2") as caught:
        await complete(2, attempt, retries=2)
    assert len(caught.value.failures) == 6


async def test_a_sampler_that_gave_up_is_not_asked_again() -> None:
    rounds = 0

    async def attempt(wanted: int, number: int) -> list[str]:
        nonlocal rounds
        rounds += 1
        raise SamplerFailed("It is gone.")

    with pytest.raises(GroupFailed, match="It is gone"):
        await complete(2, attempt, retries=5)
    assert rounds == 1


async def test_settling_turns_failures_into_data_and_lets_cancellation_pass() -> None:
    async def raising(error: BaseException) -> None:
        raise error

    settled = await settle(raising(EnvironmentFailed("It broke.")))
    assert settled == FailedRollout(code="env_error", why="It broke.")
    with pytest.raises(asyncio.CancelledError):
        await settle(raising(asyncio.CancelledError()))


async def test_one_request_gives_all_turns_of_a_group(inference: Inference) -> None:
    turns = await sampler(inference).chat([{"role": "user", "content": "Hi"}], 3)
    assert len(inference.requests) == 1
    assert len(turns) == 3
    assert all(len(turn.action) == len(turn.logprobs) for turn in turns)
    assert turns[0].stop_reason == "stop"
    assert turns[0].text.startswith("So the answer")


async def test_the_answer_is_cut_to_the_room_that_the_prompt_leaves(inference: Inference) -> None:
    (turn,) = await sampler(inference, max_sequence=20).sample(list(range(10, 24)))
    assert len(turn.action) == 5
    assert turn.stop_reason == "length"
    with pytest.raises(ContextOverflow, match="max_token_length is 20"):
        await sampler(inference, max_sequence=20).sample(list(range(10, 29)))
    refused = await settle(sampler(inference, max_sequence=20).sample(list(range(10, 29))))
    assert isinstance(refused, FailedRollout) and refused.prompt_tokens == 19


async def test_broken_answers_are_asked_for_again_a_few_times(inference: Inference) -> None:
    inference.failures = [500, 502]
    await sampler(inference).sample([10])
    inference.failures = [500, 500, 500]
    with pytest.raises(SamplerFailed, match="answered 500"):
        await sampler(inference).sample([10])


async def test_a_refusal_is_not_repeated(inference: Inference) -> None:
    inference.failures = [422]
    with pytest.raises(SamplerFailed, match=r"answered 422\. not now"):
        await sampler(inference).sample([10])
    assert len(inference.requests) == 1


async def test_not_ready_is_waited_for_up_to_the_deadline(inference: Inference) -> None:
    inference.failures = [503, 503]
    async with client(inference) as patient:
        await patient.generate([10], Sampling(max_new_tokens=4))
    inference.failures = [503] * 100
    async with client(inference, ready_within_s=0.2) as hasty:
        with pytest.raises(NotReady, match=r"waited for 0\.2 s\. not now"):
            await hasty.generate([10], Sampling(max_new_tokens=4))


async def test_a_server_that_is_not_there_is_not_ready() -> None:
    async with InferenceClient("http://127.0.0.1:9/v1", ready_within_s=0.1) as lonely:
        with pytest.raises(NotReady, match="cannot be reached"):
            await lonely.generate([10], Sampling(max_new_tokens=4))


async def test_the_wire_is_sglangs(inference: Inference) -> None:
    sampling = Sampling(max_new_tokens=4, temperature=0.5, top_p=0.9, stop=("x",), seed=7)
    async with InferenceClient(inference.url, model="tinker://r/sampler_weights/a") as pinned:
        await pinned.generate([10, 11], sampling, 2)
    assert inference.requests[0] == {
        "input_ids": [10, 11],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "stop": ["x"],
            "sampling_seed": 7,
        },
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "model": "tinker://r/sampler_weights/a",
    }


async def test_models_elsewhere_answer_chats_without_tokens(inference: Inference) -> None:
    elsewhere = Sampler(
        client(inference),
        TOKENIZER,
        Sampling(max_new_tokens=8),
        max_sequence=256,
        server_type="openai",
        retries=QUICK,
    )
    turns = await elsewhere.chat([{"role": "user", "content": "Hi"}], 2)
    assert [turn.text for turn in turns] == ["answer 0", "answer 1"]
    assert turns[0].logprobs == ()
    assert inference.requests[0]["messages"] == [{"role": "user", "content": "Hi"}]
    with pytest.raises(SamplerFailed, match="server_type"):
        await elsewhere.sample([10])


async def test_retries_end_with_the_last_error_as_it_was() -> None:
    calls = 0

    async def failing() -> None:
        nonlocal calls
        calls += 1
        raise ServerError(f"number {calls}")

    with pytest.raises(ServerError, match="number 3"):
        await QUICK.call(failing, on=(ServerError,))
    with pytest.raises(InvalidData):
        await QUICK.call(lambda: _raise(InvalidData("no")), on=(ServerError,))


async def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_a_server_that_says_wait_is_asked_again(inference: Inference, status: int) -> None:
    """A rate limit is no refusal: as one, it would fail the group, and many of them the run."""
    inference.failures = [status, status]
    turns = await sampler(inference).sample([1, 2, 3], 2)
    assert (len(turns), len(inference.requests)) == (2, 3)


async def test_a_server_that_says_wait_for_too_long_is_given_up_within_the_deadline(
    inference: Inference,
) -> None:
    inference.failures = [429] * 1000
    asking = sampler(inference)
    asking.client.ready_within_s = 0.2
    with pytest.raises(SamplerFailed, match="429"):
        await asking.sample([1, 2, 3])


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), ("0.5", 0.5), (None, None), ("Fri, 20 Nov 2026", None)]
)
def test_how_long_the_server_wants_us_to_wait_is_read_from_its_answer(
    header: str | None, seconds: float | None
) -> None:
    with pytest.raises(NotReady) as caught:
        read_answer("http://here", 429, b'{"detail": "slowly"}', header)
    assert caught.value.details["retry_after_s"] == seconds


async def test_the_wait_that_a_server_asks_for_is_kept_unless_it_ends_after_the_deadline() -> None:
    asked: list[float] = []

    async def limited() -> str:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise NotReady("Slowly.", retry_after_s=0.3)
        return "now"

    assert await until_ready(limited, within_s=5) == "now"
    assert asked[1] - asked[0] >= 0.3

    async def never() -> str:
        raise NotReady("Slowly.", retry_after_s=60.0)

    async with asyncio.timeout(1):
        with pytest.raises(NotReady, match="Slowly"):
            await until_ready(never, within_s=30)
