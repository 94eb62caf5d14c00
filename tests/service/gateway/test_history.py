"""What a session's prompts are made of: sampled token ids stay what they were, or a prompt is a new
root with its reason. We chose it; the traps are those that other gateways fell into.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.inference_fixtures import TOKENIZER, speaking
from service.live_service import LiveService, serving

from .episodes import EngineTap, Episode, Messages, opened, trained, user

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
PAUSE = {"type": "function", "function": {"name": "pause"}}

STRIPPING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""A template that leaves out what was thought, as Qwen3's does."""


async def conversation(episode: Episode, num_turns: int, **more: Any) -> Messages:
    """A chat in which the program sends back what it got."""
    messages = [user("Guess a number.")]
    for _ in range(num_turns):
        choice = await episode.chat(messages, **more)
        messages += [choice["message"], user("Too low.")]
    return messages


async def test_retokenisation_drift_does_not_reach_a_prompt(scene: LiveService) -> None:
    """Trap 1. The scripted engine samples tokens that no tokeniser would make of their text."""
    tap, episode = EngineTap(scene), await opened(scene)
    messages = await conversation(episode, 4)
    for before, after in zip(tap.samplings, tap.samplings[1:], strict=False):
        whole = before.prompt + before.tokens
        assert after.prompt[: len(whole)] == whole
    rendered = TOKENIZER.apply_chat_template(messages[:-2])
    assert rendered != tap.samplings[-1].prompt
    assert TOKENIZER.decode(rendered) == TOKENIZER.decode(tap.samplings[-1].prompt)
    sequences = await episode.sequences()
    assert len(sequences["sequences"]) == 1
    assert trained(sequences) == [(one.tokens, one.logprobs) for one in tap.samplings]


async def test_a_template_that_strips_old_reasoning_begins_a_new_root(tmp_path: Path) -> None:
    """Trap 2."""
    async with speaking(tmp_path, "<think>2 + 2</think>4", STRIPPING) as (scene, speaker):
        episode = await opened(scene)
        await conversation(episode, 2)
        first, second = (await episode.view())["nodes"]
        assert (first["why_root"], second["why_root"]) == ("first", "template")
        assert (second["parent"], second["continues"]) == (None, first["id"])
        assert "2 + 2" not in TOKENIZER.decode(speaker.prompts[1])
        assert len((await episode.sequences())["sequences"]) == 2


async def test_an_answer_that_comes_back_without_its_reasoning_is_known_again(
    tmp_path: Path,
) -> None:
    """Trap 2: its tokens are others, so that it is a root; that it goes on is known all the same."""
    async with speaking(tmp_path, "<think>2 + 2</think>4") as (scene, _):
        episode = await opened(scene)
        messages = await conversation(episode, 1)
        messages[1] = {"role": "assistant", "content": "4"}
        await episode.chat(messages)
        first, second = (await episode.view())["nodes"]
        assert (second["why_root"], second["continues"]) == ("template", first["id"])


async def test_a_session_that_keeps_reasoning_goes_on_from_the_sampled_tokens(
    tmp_path: Path,
) -> None:
    """Trap 2, with the session's own choice; the program may send the reasoning back or not."""
    async with speaking(tmp_path, "<think>2 + 2</think>4", STRIPPING) as (scene, speaker):
        episode = await opened(scene, keep_reasoning=True)
        messages = await conversation(episode, 1)
        messages[1] = {"role": "assistant", "content": "4"}
        choice = await episode.chat(messages)
        await episode.chat([*messages, choice["message"], user("Again.")])
        assert [node["why_root"] for node in (await episode.view())["nodes"]] == [
            "first",
            None,
            None,
        ]
        [sequence] = (await episode.sequences())["sequences"]
        said = [*TOKENIZER.encode(speaker.says), TOKENIZER.eos_token_id]
        assert speaker.prompts[1][: len(speaker.prompts[0]) + len(said)] == [
            *speaker.prompts[0],
            *said,
        ]
        text = TOKENIZER.decode(sequence["tokens"], skip_special_tokens=False)
        assert text.count("<think>2 + 2</think>4<|im_end|>\n<|im_start|>user\n") == 2
        assert text.count("<|im_end|><|im_end|>") == 0


@pytest.mark.parametrize("arguments", ['{"b": 2, "a": 1}', '{ "a":1,\n "b":2 }'])
async def test_tool_calls_that_are_serialised_anew_are_the_sampled_ones(
    tmp_path: Path, arguments: str
) -> None:
    """Trap 3. Compared as parsed JSON; trained on as they were sampled."""
    says = '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'
    async with speaking(tmp_path, says) as (scene, speaker):
        episode = await opened(scene)
        messages = [user("Add 1 and 2.")]
        choice = await episode.chat(messages, tools=[ADD], max_tokens=64)
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        sent = {**call, "function": {"name": "add", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [sent]},
            {"role": "tool", "tool_call_id": call["id"], "content": "3"},
        ]
        await episode.chat(messages, tools=[ADD], max_tokens=64)
        first, second = (await episode.view())["nodes"]
        assert (second["parent"], second["why_root"]) == (first["id"], None)
        said = [*TOKENIZER.encode(says), TOKENIZER.eos_token_id]
        whole = speaker.prompts[0] + said
        assert speaker.prompts[1][: len(whole)] == whole
        [sequence] = (await episode.sequences())["sequences"]
        assert [one for one in sequence["masks"] if one >= 0] == said + said


async def test_reasoning_that_a_program_left_out_is_not_put_back_with_a_call(
    tmp_path: Path,
) -> None:
    """Traps 2 and 3 together."""
    says = '<think>1, 2</think>\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'
    async with speaking(tmp_path, says) as (scene, speaker):
        episode = await opened(scene)
        choice = await episode.chat([user("Add.")], tools=[ADD], max_tokens=64)
        call = choice["message"]["tool_calls"][0]
        sent = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await episode.chat([user("Add."), sent, result], tools=[ADD], max_tokens=64)
        first, second = (await episode.view())["nodes"]
        assert (second["why_root"], second["continues"]) == ("template", first["id"])
        assert "1, 2" not in TOKENIZER.decode(speaker.prompts[1])


async def test_a_system_prompt_that_differs_each_turn_is_linked_and_its_tokens_decide(
    scene: LiveService,
) -> None:
    """Trap 4."""
    episode = await opened(scene)
    system, messages = {"role": "system", "content": "It is 12:00."}, [user("Hello.")]
    choice = await episode.chat([system, *messages])
    messages += [choice["message"], user("And now?")]
    await episode.chat([{**system, "content": "It is 12:01."}, *messages])
    first, second = (await episode.view())["nodes"]
    assert (second["parent"], second["continues"]) == (None, first["id"])
    assert second["why_root"] == "system_changed"
    assert len((await episode.sequences())["sequences"]) == 2


async def test_other_tools_and_a_rewritten_answer_are_reasons_of_their_own(
    tmp_path: Path,
) -> None:
    async with speaking(tmp_path, "4") as (scene, _):
        episode = await opened(scene)
        messages = [user("2 + 2?")]
        choice = await episode.chat(messages, tools=[ADD])
        messages += [choice["message"], user("Sure?")]
        await episode.chat(messages, tools=[ADD, PAUSE])
        rewritten = [messages[0], {"role": "assistant", "content": "5"}, messages[2]]
        await episode.chat(rewritten, tools=[ADD])
        whys = [node["why_root"] for node in (await episode.view())["nodes"]]
        assert whys == ["first", "tools_changed", "history_rewritten"]


async def test_assistant_text_that_the_program_made_is_never_trained_on(
    scene: LiveService,
) -> None:
    """Trap 10: before the first answer, and in the middle."""
    tap, episode = EngineTap(scene), await opened(scene)
    messages: Messages = [user("2 + 2?"), {"role": "assistant", "content": "4"}, user("3 + 3?")]
    choice = await episode.chat(messages)
    messages += [choice["message"], user("So?"), {"role": "assistant", "content": "Sure."}]
    await episode.chat([*messages, user("Once more.")])
    sequences = await episode.sequences()
    [sequence] = sequences["sequences"]
    sampled = [token for one in tap.samplings for token in one.tokens]
    assert [mask for mask in sequence["masks"] if mask >= 0] == sampled
    assert "Sure." in TOKENIZER.decode(sequence["tokens"])


async def test_an_answer_that_goes_on_with_the_programs_words_is_trained_on_from_there(
    scene: LiveService,
) -> None:
    """A prefill, in Anthropic's shape and OpenAI's."""
    tap, episode = EngineTap(scene), await opened(scene)
    asked = [user("Count."), {"role": "assistant", "content": "One, two,"}]
    answer = await episode.whole("/v1/messages", {"messages": asked, "max_tokens": 6})
    said = "One, two," + answer["content"][0]["text"]
    await episode.chat([asked[0], {"role": "assistant", "content": said}, user("Go on.")])
    first, second = (await episode.view())["nodes"]
    assert second["parent"] == first["id"]
    sequences = await episode.sequences()
    assert trained(sequences) == [(one.tokens, one.logprobs) for one in tap.samplings]
    [sequence] = sequences["sequences"]
    assert [message["content"] for message in sequence["messages"][:2]] == ["Count.", said]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "not exact"])
async def test_tokens_and_logprobs_are_the_engines_in_every_dialect(
    tmp_path: Path, exact: bool
) -> None:
    """Chats of both shapes, completions as text and tokens, token prompts of vLLM and sglang; whole
    and streamed.
    """
    async with serving(tmp_path, exact=exact) as scene:
        tap, episode = EngineTap(scene), await opened(scene)
        messages = await conversation(episode, 2)
        await episode.streamed("/v1/chat/completions", messages=messages, max_tokens=5)
        await episode.whole("/v1/messages", {"messages": messages, "max_tokens": 5})
        await episode.streamed("/v1/messages", messages=messages, max_tokens=5)
        text = await episode.whole("/v1/completions", {"prompt": "One, two,", "max_tokens": 5})
        await episode.streamed("/v1/completions", prompt="One, two, three,", max_tokens=5)
        ids = [*TOKENIZER.encode("One, two,"), *text["choices"][0]["token_ids"], 7]
        params = {"max_tokens": 5, "logprobs": 1}
        generate = {"token_ids": ids, "sampling_params": params}
        answer = await episode.whole("/inference/v1/generate", generate)
        params = {"max_new_tokens": 5}
        sglang = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        await episode.whole("/generate", sglang)
        nodes = (await episode.view())["nodes"]
        assert [node["parent"] for node in nodes[-2:]] == [nodes[5]["id"]] * 2
        engine = sorted((one.tokens, one.logprobs) for one in tap.samplings)
        assert sorted(trained(await episode.sequences())) == engine
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == tap.samplings[-2].logprobs


async def test_what_was_sampled_survives_a_restart_and_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        episode = await opened(scene)
        messages = await conversation(episode, 2)
        before = await episode.sequences()
    async with serving(tmp_path) as scene:
        again = Episode(scene, episode.opened)
        assert await again.sequences() == {**before, "interrupted": True}
        await again.chat(messages)
        nodes = (await again.view())["nodes"]
        assert nodes[2]["parent"] == nodes[1]["id"]
        assert len((await again.sequences())["sequences"]) == 1
