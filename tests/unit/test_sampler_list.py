"""What `inference.samplers` may say, and what is refused in one sentence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from halteres.config.resolution import ranks_problems, sampler_problems
from halteres.config.sampler_list import Sampler, as_given, as_text, key_variables, samplers_of
from halteres.config.settings import InferenceSettings
from halteres.runs.servers import service_arguments


def test_samplers_are_a_number_of_engines_or_a_list() -> None:
    for given, expected in (
        (2, 2),
        ("2", 2),
        ("own,vllm", ("own", "vllm")),
        (["own", "http://gpu2:8000 VLLM_KEY"], ("own", "http://gpu2:8000 VLLM_KEY")),
    ):
        samplers = InferenceSettings.model_validate({"samplers": given}).samplers
        assert samplers == expected
        assert as_given(as_text(samplers)) == expected
    assert samplers_of(2) == (Sampler("own"), Sampler("own"))
    listed = ("own", "vllm", "http://gpu2:8000/ VLLM_KEY", "http://gpu3:8000")
    assert samplers_of(listed)[2:] == (
        Sampler("remote", "http://gpu2:8000", "VLLM_KEY"),
        Sampler("remote", "http://gpu3:8000"),
    )
    assert key_variables(listed) == ("VLLM_KEY",)


@pytest.mark.parametrize(
    "given",
    [
        ["own", 2],
        "2,http://a:1",
        65,
        -1,
        True,
        "nobody",
        [],
        ["ftp://a"],
        ["vllm KEY"],
        [""],
        1.5,
        ["http://a:1/v1"],
        ["http://a:1 HOME"],
        ["http://a:1", "http://a:1/"],
    ],
)
def test_anything_else_is_refused_with_the_rule(given: object) -> None:
    with pytest.raises(ValidationError) as refused:
        InferenceSettings.model_validate({"samplers": given})
    (first, *_) = refused.value.errors()
    assert first["loc"][0] == "samplers"


def test_what_a_run_wants_that_its_samplers_cannot_do_is_refused() -> None:
    def fields(given: object, **wants: bool) -> list[str]:
        wanted = {"is_deterministic": False, "trains_unembed": False, **wants}
        return [one.field for one in sampler_problems(given, **wanted)]  # type: ignore[arg-type]

    assert fields(("vllm",), is_deterministic=True) == ["trainer.deterministic"]
    assert fields(("own", "vllm"), is_deterministic=True) == ["trainer.deterministic"]
    assert fields(("vllm", "http://a:1"), trains_unembed=True) == ["trainer.train_unembed"]
    assert fields(("own", "vllm"), trains_unembed=True) == []
    assert fields(2, is_deterministic=True, trains_unembed=True) == []


def test_what_several_ranks_need_and_a_run_does_not_give_is_refused() -> None:
    def fields(**given: object) -> list[str]:
        return [one.field for one in ranks_problems(InferenceSettings.model_validate(given))]

    assert fields(shard=True) == ["inference.shard"]
    assert fields(shard=True, samplers=1) == []
    assert fields(trainer_ranks=2, shard=True, samplers="vllm") == []
    assert fields(trainer_ranks=2, engine="scripted") == ["inference.trainer_ranks"]
    assert fields(shard=True, samplers=1, engine="scripted") == ["inference.shard"]
    assert fields(engine="scripted") == []


def test_a_run_gives_its_service_the_number_of_ranks() -> None:
    words = service_arguments(InferenceSettings(trainer_ranks=2, shard=True, samplers=1))
    given = dict(zip(words[:-1:2], words[1::2], strict=True))
    assert given["--trainer-ranks"] == "2"
    assert words[-1] == "--shard"


def test_a_service_is_told_what_its_vllms_must_take_and_without_them_nothing() -> None:
    own = service_arguments(InferenceSettings(samplers=2), lora_rank=8, context=512)
    assert own == ("--engine", "torch", "--samplers", "2", "--dtype", "auto")
    words = service_arguments(
        InferenceSettings(samplers=("vllm", "http://a:1")), lora_rank=8, context=512
    )
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--samplers"] == "vllm,http://a:1"
    assert (given["--lora-rank"], given["--context"], given["--vllm"]) == ("8", "512", "vllm")
