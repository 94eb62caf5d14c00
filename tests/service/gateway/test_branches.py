"""What a session is trained on: every branch, every sampled token once. Pure, but for the nodes, which
a real session made.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from deadlines import until

from service.inference_fixtures import TOKENIZER, speaking
from service.live_service import LiveService

from .episodes import EngineTap, Messages, opened, trained, user


async def test_one_sampled_token_has_one_loss_owner(scene: LiveService) -> None:
    """Trap 13: two branches share their beginning, which is masked in the second."""
    tap, episode = EngineTap(scene), await opened(scene)
    messages = [user("Plan.")]
    choice = await episode.chat(messages)
    messages += [choice["message"]]
    for ask in ("Left?", "Right?"):
        await episode.chat([*messages, user(ask)])
    sequences = await episode.sequences()
    first, second = sequences["sequences"]
    assert trained(sequences) == [(one.tokens, one.logprobs) for one in tap.samplings]
    shared = len(tap.samplings[0].prompt) + len(tap.samplings[0].tokens)
    assert first["tokens"][:shared] == second["tokens"][:shared]
    assert [mask for mask in first["masks"][:shared] if mask >= 0] == tap.samplings[0].tokens
    assert set(second["masks"][:shared]) == {-100}
    assert set(second["logprobs"][:shared]) == {1.0}
    assert [turn["sequence"] for turn in sequences["turns"]] == [0, 0, 1]


async def test_an_answer_that_a_program_threw_away_is_dropped(scene: LiveService) -> None:
    """It sampled the same prompt again, and went on from that answer."""
    tap, episode = EngineTap(scene), await opened(scene)
    messages = [user("Plan.")]
    await episode.chat(messages)
    choice = await episode.chat(messages)
    before = await episode.view()
    assert (before["discarded"], len(before["branches"])) == ([], 2)
    await episode.chat([*messages, choice["message"], user("Go on.")])
    view = await episode.view()
    assert view["discarded"] == [view["nodes"][0]["id"]]
    assert view["untrained_tokens"] == {"discarded": len(tap.samplings[0].tokens)}
    kept = [(one.tokens, one.logprobs) for one in tap.samplings[1:]]
    assert trained(await episode.sequences()) == kept
    assert view["trainable_tokens"] == sum(len(tokens) for tokens, _ in kept)


async def test_several_answers_to_one_request_are_nodes_each(scene: LiveService) -> None:
    tap, episode = EngineTap(scene), await opened(scene)
    asked = {"messages": [user("Plan.")], "n": 3, "max_tokens": 8}
    answer = await episode.whole("/v1/chat/completions", asked)
    chosen = answer["choices"][1]["message"]
    await episode.chat([user("Plan."), chosen, user("Go on.")])
    view = await episode.view()
    assert len(view["nodes"]) == 4
    assert view["nodes"][3]["parent"] == view["nodes"][1]["id"]
    assert trained(await episode.sequences()) == [
        (tap.samplings[at].tokens, tap.samplings[at].logprobs) for at in (1, 3)
    ]
    await episode.streamed("/v1/chat/completions", messages=[user("Again.")], n=2, max_tokens=4)
    assert len((await episode.view())["nodes"]) == 6


async def test_a_subagent_is_a_branch_of_its_own_and_turns_stand_in_order_of_time(
    tmp_path: Path,
) -> None:
    async with speaking(tmp_path, "4") as (scene, _):
        episode = await opened(scene)
        main = [user("Delegate.")]
        choice = await episode.chat(main)
        await episode.chat([user("You are a subagent.")])
        await episode.chat([*main, choice["message"], user("It says 4.")])
        sequences = await episode.sequences()
        nodes = [turn["node"] for turn in sequences["turns"]]
        view = await episode.view()
        assert nodes == [node["id"] for node in view["nodes"]]
        owners = [turn["sequence"] for turn in sequences["turns"]]
        assert (owners[0] == owners[2], owners[0] != owners[1]) == (True, True)
        texts = [TOKENIZER.decode(one["tokens"]) for one in sequences["sequences"]]
        assert sum("subagent" in text for text in texts) == 1


async def test_a_call_that_is_being_recorded_when_the_reward_comes_is_a_turn_of_it(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward waits: `turn_rewards` has one for it, and a group's body is the same every time."""
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    journal, holding = scene.service.journal, asyncio.Event()
    settle = journal.settle

    def held(*given: Any) -> asyncio.Future[None]:
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def later() -> None:
            holding.set()
            await release.wait()
            await settle(*given)
            recorded.set_result(None)

        tasks.append(asyncio.create_task(later()))
        return recorded

    release, tasks = asyncio.Event(), list[asyncio.Task[None]]()
    monkeypatch.setattr(journal, "settle", held)
    call = asyncio.create_task(episode.chat([user("Last.")]))
    await holding.wait()
    reward = asyncio.create_task(episode.reward(reward=1.0, turn_rewards=[0.5, 0.5]))
    await until(lambda: any(one.is_closing for one in scene.gateway.sessions.all()))
    release.set()
    await asyncio.gather(call, reward, *tasks)
    assert len((await episode.sequences())["turns"]) == 2


async def test_what_ends_after_its_session_is_left_out(scene: LiveService) -> None:
    episode = await opened(scene)
    await episode.chat([user("Hello.")])
    held = scene.engine.block("sample")
    late = asyncio.create_task(episode.chat([user("Late.")]))
    await held.inside()
    await episode.reward(reward=1.0)
    held.release()
    await late
    view = await episode.view()
    assert [node["untrained"] for node in view["nodes"]] == [None, "late"]
    assert len((await episode.sequences())["turns"]) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_program_sends_back_each_turn_stands_behind_the_prompt_it_was_sampled_from(
    scene: LiveService, seed: int
) -> None:
    """Sixty calls at random: histories that go on, branch, are resampled, rewritten, cut, under
    another system message, whole and streamed, in two dialects.
    """
    chance = random.Random(seed)
    tap, episode = EngineTap(scene), await opened(scene)
    histories: list[Messages] = [[user("Begin.")]]
    for number in range(60):
        history = [dict(message) for message in chance.choice(histories[-8:])]
        if chance.random() < 0.15:
            chance.choice(history)["content"] += " (rewritten)"
        if chance.random() < 0.1 and len(history) > 2:
            del history[0:2]
        system = [{"role": "system", "content": f"It is {number}."}]
        shown = (system if chance.random() < 0.1 else []) + history
        asked = {"max_tokens": chance.randint(1, 9)}
        if chance.random() < 0.3:
            events = await episode.streamed("/v1/chat/completions", messages=shown, **asked)
            deltas = (event["choices"][0]["delta"] for event in events if event != "[DONE]")
            text = "".join(delta.get("content", "") for delta in deltas)
        elif chance.random() < 0.3 and shown is history:
            answer = await episode.whole("/v1/messages", {"messages": history, **asked})
            text = answer["content"][0]["text"]
        else:
            text = (await episode.chat(shown, **asked))["message"]["content"]
        if chance.random() < 0.85 and len(history) < 12:
            answer = {"role": "assistant", "content": text}
            histories.append([*history, answer, user(f"Step {number}.")])
    view, sequences = await episode.view(), await episode.sequences()
    by_node = dict(zip((node["id"] for node in view["nodes"]), tap.samplings, strict=True))
    untrained = {node["id"] for node in view["nodes"] if node["untrained"]}
    assert sorted(turn["node"] for turn in sequences["turns"]) == sorted(set(by_node) - untrained)
    assert {node["untrained"] for node in view["nodes"]} == {None, "discarded"}
    for turn in sequences["turns"]:
        sequence, sampling = sequences["sequences"][turn["sequence"]], by_node[turn["node"]]
        tokens, start, stop = sequence["tokens"], turn["start"], turn["stop"]
        assert tokens[:start] == sampling.prompt
        assert tokens[start:stop] == sequence["masks"][start:stop] == sampling.tokens
        assert sequence["logprobs"][start:stop] == sampling.logprobs
    num_trained = sum(mask >= 0 for one in sequences["sequences"] for mask in one["masks"])
    assert num_trained == sum(len(by_node[turn["node"]].tokens) for turn in sequences["turns"])
