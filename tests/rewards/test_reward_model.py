"""A reward model's folder: what is loaded scores as what was saved, and a text's score is its
own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halteres.errors import InvalidConfig, InvalidData, NotFound
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.model_folder import (
    SAVING,
    Calibration,
    RewardFile,
    ScoringTemplate,
    read_model_folder,
    read_reward_file,
    write_reward_file,
)
from halteres.rewards.torch.model import NotWanted
from halteres.scores import REWARD_FILE, Scorable

from .torch_fixtures import sums, tiny


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHAT = [user("What is 2 + 3?"), assistant("5"), user("Sure?"), assistant("Gladly: 5")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    folder = tmp_path_factory.mktemp("models") / "reward"
    config = RewardConfig(output_dir=str(folder), max_steps=4, disable_tqdm=True)
    RewardTrainer(TINY, config, train_dataset=sums(32)).train()
    return RewardModel.load(folder)


@pytest.fixture
def folder(model: RewardModel, tmp_path: Path) -> Path:
    assert model.folder is not None
    return shutil.copytree(model.folder, tmp_path / "reward")


def test_scores_of_a_folder_are_those_that_the_trainer_had_in_memory(tmp_path: Path) -> None:
    config = RewardConfig(output_dir=str(tmp_path / "reward"), max_steps=2, disable_tqdm=True)
    trainer = RewardTrainer(TINY, config, train_dataset=sums(32))
    trainer.train()
    chats = [[user(f"What is {n} + 3?"), assistant("So it is " + "8" * n)] for n in range(1, 40)]
    assert RewardModel.load(tmp_path / "reward").score(chats) == trainer.model.score(chats)


def test_a_score_does_not_depend_on_the_texts_beside_it(model: RewardModel) -> None:
    prompt = [user("What is 4 + 4? " * 5)]
    texts = [Scorable(prompt=prompt, completion=[assistant("8" * n)]) for n in (1, 5, 40)]
    texts += [Scorable(completion=CHAT), Scorable(prompt=[user("Hi")], completion=[assistant("?")])]
    together = [one.value for one in model.score(texts)]
    alone = [model.score([text])[0].value for text in texts]
    assert together == pytest.approx(alone, abs=1e-4)
    small = RewardModel.load(model.folder or "", max_tokens_per_forward=64)
    assert [one.value for one in small.score(texts)] == pytest.approx(alone, abs=1e-4)


def test_a_text_that_cannot_be_scored_spoils_no_other_and_is_rendered_once(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = list[int]()
    forward = model.network.outputs
    monkeypatch.setattr(
        model.network, "outputs", lambda rows: passes.append(len(rows)) or forward(rows)
    )
    good: list[Any] = [CHAT, [user("Hi"), assistant("?")]]
    results = model.score_each(
        [good[0], [], [{"role": "user"}], [user("1"), {"content": "2"}], good[1]]
    )
    assert [isinstance(result, InvalidData) for result in results] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert len(passes) == 1
    assert [results[0], results[4]] == model.score(good)


def test_a_score_that_is_not_finite_is_that_texts_error(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.network.outputs

    def outputs(rows: Any) -> torch.Tensor:
        found = forward(rows).clone()
        found[0] = float("nan")
        return found

    monkeypatch.setattr(model.network, "outputs", outputs)
    first, second = model.score_each([CHAT, CHAT[:2]])
    assert isinstance(first, InvalidData) and "nan" in first.sentence
    assert not isinstance(second, InvalidData)
    with pytest.raises(InvalidData, match="Text 0 has no score"):
        model.score([CHAT, CHAT[:2]])


def test_scoring_ends_between_texts_and_passes_when_they_are_wanted_no_more(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    render, outputs = model.template.render, model.network.outputs
    monkeypatch.setattr(
        ScoringTemplate,
        "render",
        lambda _, *args, **options: done.append("render") or render(*args, **options),
    )
    monkeypatch.setattr(model.network, "outputs", lambda rows: done.append("pass") or outputs(rows))
    monkeypatch.setattr(model, "max_tokens_per_forward", 16)
    chats = [[user("Hi " * n), assistant("?")] for n in range(1, 9)]
    for most in (0, 3, 8, 10):
        done.clear()
        with pytest.raises(NotWanted):
            model.score_each(chats, lambda most=most: len(done) < most)
        assert len(done) == most
    assert done == ["render"] * 8 + ["pass"] * 2


def test_a_completion_that_holds_its_prompt_is_not_scored(model: RewardModel) -> None:
    prompt = [user("What is 2 + 3?")]
    twice, once = model.score_each(
        [
            Scorable(prompt=prompt, completion=[*prompt, assistant("5")]),
            Scorable(prompt=prompt, completion=[assistant("5")]),
        ]
    )
    assert isinstance(twice, InvalidData) and not isinstance(once, InvalidData)
    assert model.score([[*prompt, assistant("5")]]) == [once]


def test_states_are_scored_as_the_transcript_up_to_each_turn(model: RewardModel) -> None:
    states, nothing, other = model.score_states([CHAT, [user("Nobody answered.")], CHAT[2:]])
    apart = [model.score([text])[0].value for text in (CHAT[:2], CHAT, CHAT[2:])]
    assert [one.value for one in (*states, *other)] == pytest.approx(apart, abs=1e-5)
    assert states[0].num_tokens < states[1].num_tokens
    assert nothing == ()


def test_the_states_of_a_chat_are_computed_in_one_pass_unless_the_template_rewrites_history(
    model: RewardModel, folder: Path
) -> None:
    """As `when: turn` sends them: a prompt, and completions of which each goes on with the one
    before.
    """
    turns = [message for n in range(6) for message in (assistant(f"It is {n}."), user("Go on."))]
    states = [
        Scorable(prompt=[user("What is 2 + 3?")], completion=turns[: 2 * n + 1]) for n in range(6)
    ]
    before = model.network.num_computed_tokens
    together = model.score(states)
    assert model.network.num_computed_tokens - before == together[-1].num_tokens
    assert [one.value for one in together] == pytest.approx(
        [model.score([s])[0].value for s in states], abs=1e-4
    )
    rewriting = "{% for m in messages %}{{ m['content'] if loop.last else 'cut ' }} | {% endfor %}"
    (folder / "chat_template.jinja").write_text(rewriting)
    file = read_reward_file(folder)
    assert file is not None
    write_reward_file(folder, file.model_copy(update={"probes": []}))
    other = RewardModel.load(folder)
    together = other.score(states)
    assert [one.value for one in together] == pytest.approx(
        [other.score([s])[0].value for s in states], abs=1e-4
    )


def test_ranking_puts_the_best_first(model: RewardModel) -> None:
    completions = [[assistant(text)] for text in ("17", "Gladly: 5", "5")]
    scores = [
        one.value
        for one in model.score([Scorable(prompt=CHAT[:1], completion=one) for one in completions])
    ]
    assert model.rank(CHAT[:1], completions) == sorted(range(3), key=lambda place: -scores[place])


def test_a_text_that_is_too_long_is_cut_and_it_is_told(model: RewardModel) -> None:
    (score,) = model.score([[user("1 2 3 " * 700), assistant("5")]])
    assert score.truncated
    assert score.num_tokens <= 1024
    assert score.ended_with_eos


def test_changed_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] = tensors["score.weight"] * 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidData, match="not the one that was saved"):
        RewardModel.load(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(InvalidData, match="its tokens differ"):
        RewardModel.load(folder)


def test_a_calibration_of_another_template_is_refused(folder: Path) -> None:
    file = read_reward_file(folder)
    assert file is not None
    for digest in (file.template.digest, "other"):
        calibration = Calibration(temperature=2.0, template_digest=digest)
        write_reward_file(folder, file.model_copy(update={"calibration": calibration}))
        if digest == "other":
            with pytest.raises(InvalidData):
                RewardModel.load(folder)
        else:
            assert RewardModel.load(folder).calibration == calibration


def test_the_digest_is_of_weights_template_and_calibration(
    folder: Path, model: RewardModel
) -> None:
    file = read_reward_file(folder)
    assert file is not None
    loaded = RewardModel.load(folder)
    assert loaded.digest == model.digest
    digests = {loaded.digest}
    for temperature in (2.0, 3.0):
        calibration = Calibration(temperature=temperature)
        loaded.file = file.model_copy(update={"calibration": calibration})
        digests.add(loaded.digest)
    loaded.template = file.template.model_copy(update={"max_length": 7})
    digests.add(loaded.digest)
    assert len(digests) == 4


def test_a_device_is_chosen(folder: Path) -> None:
    assert RewardModel.load(folder, device="cpu").network.device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="no GPU"):
            RewardModel.load(folder, device="cuda")


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder / REWARD_FILE).write_text('{"template": 3}')
    with pytest.raises(InvalidData, match="template"):
        RewardModel.load(folder)


def test_saving_replaces_the_models_files_and_leaves_the_others(
    folder: Path, model: RewardModel
) -> None:
    (folder / "notes.txt").write_text("mine")
    model.save(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert RewardModel.load(folder).digest == model.digest


@pytest.mark.parametrize("num_moved", [0, 1, 5])
def test_a_folder_that_was_half_replaced_is_refused_until_it_is_saved_again(
    folder: Path, model: RewardModel, monkeypatch: pytest.MonkeyPatch, num_moved: int
) -> None:
    """Also one that held other things, as the folder of checkpoints does before the first save."""
    fresh = folder.with_name("fresh")
    (fresh / "checkpoint-1").mkdir(parents=True)
    moves = iter(range(100))
    replace = Path.replace

    def killed(file: Path, target: Path) -> Path:
        if file.parent.name == SAVING and next(moves) % 10 >= num_moved:
            raise KeyboardInterrupt
        return replace(file, target)

    for place in (folder, fresh):
        moves = iter(range(100))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                model.save(place)
        with pytest.raises(InvalidData, match="half replaced"):
            RewardModel.load(place)
        with pytest.raises(InvalidData, match="half replaced"):
            read_model_folder(place)
        model.save(place)
        assert RewardModel.load(place).score([CHAT]) == model.score([CHAT])


def test_a_folder_without_our_file_is_scored_by_trls_rules(
    folder: Path, model: RewardModel
) -> None:
    (folder / REWARD_FILE).unlink()
    foreign = RewardModel.load(folder)
    assert foreign.notes
    assert foreign.score([CHAT]) == model.score([CHAT])
    text = foreign.template.render(foreign.tokenizer, "2 + 3 = 5")
    assert list(text.tokens) == model.tokenizer.encode("2 + 3 = 5<|im_end|>")


def test_a_folder_that_pads_with_its_end_token_is_read_out_as_transformers_does_also_once_it_is_calibrated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads the last token that is no padding: the end token is never read."""
    (folder / REWARD_FILE).unlink()
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"pad_token_id": 2} if name == "config.json" else {"pad_token": "<|im_end|>"}
        (folder / name).write_text(json.dumps(content))
    from transformers import AutoModelForSequenceClassification

    model = RewardModel.load(folder)
    assert any("not read" in note for note in model.notes)
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    ids = model.tokenizer.encode("2 + 3 = 5<|im_end|>")
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids, ids])).logits[0].item()
    texts = ["2 + 3 = 5<|im_end|>", "2 + 3 = 5"]
    assert [score.value for score in model.score(texts)] == pytest.approx(
        [expected, expected], abs=1e-5
    )

    def other_token(tokenizer: Any, eos_token: str) -> str:
        raise InvalidData("The tokenizer has no token to pad with.")

    # as GPT-2's has none
    monkeypatch.setattr("halteres.rewards.torch.model.padding_token", other_token)
    calibration = Calibration(temperature=2.0, template_digest=model.template.digest)
    write_reward_file(folder, RewardFile(template=model.template, calibration=calibration))
    calibrated = RewardModel.load(folder)
    assert calibrated.calibration == calibration
    assert [score.value for score in calibrated.score(texts)] == pytest.approx(
        [expected, expected], abs=1e-5
    )


def edited(file: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | changes), encoding="utf-8")

    return edit


def written(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: bool((folder / file).write_bytes(content)) or None


def without_end(file: str) -> Callable[[Path], None]:
    """A file that is read from for ever."""

    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return edit


ADAPTER = {"task_type": "SEQ_CLS", "peft_type": "LORA", "base_model_name_or_path": "."}


@pytest.mark.parametrize(
    "edit",
    [
        edited("config.json", architectures=5),
        edited("config.json", hidden_size=-4),
        edited("config.json", model_type="nonsense"),
        edited("config.json", auto_map={"AutoConfig": "code.Config"}, model_type="nonsense"),
        edited("adapter_config.json", **ADAPTER),
        edited("adapter_config.json", **(ADAPTER | {"base_model_name_or_path": 5})),
        edited(REWARD_FILE, probes=[{"text": {"other": 1}, "tokens": [1], "score": 0}]),
        edited(REWARD_FILE, probes=[{"text": None, "tokens": [10**12], "score": 0}]),
        edited(REWARD_FILE, calibration={"scale": 0}),
        edited(REWARD_FILE, calibration={"temperature": float("nan")}),
        written("model.safetensors", b"nothing"),
        written("tokenizer.json", b"{}"),
        written("tokenizer_config.json", b"[]"),
        written("chat_template.jinja", b"{% for %}"),
        *(
            without_end(file)
            for file in (REWARD_FILE, "config.json", "model.safetensors", "tokenizer_config.json")
        ),
    ],
)
def test_a_hostile_folder_is_refused_as_such(folder: Path, edit: Callable[[Path], None]) -> None:
    edit(folder)
    with pytest.raises((InvalidData, NotFound)):
        RewardModel.load(folder)
    with suppress(InvalidData, NotFound):
        read_model_folder(folder)


def test_what_is_no_reward_model_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InvalidData, match="holds no reward model"):
        RewardModel.load(tiny())
    with pytest.raises(NotFound):
        RewardModel.load(tmp_path / "nowhere")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "A", "1": "B"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidData, match="2 outputs"):
        RewardModel.load(folder)
