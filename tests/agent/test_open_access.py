"""Without the token: what names code, a file, a server or a key is refused on every open route."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from docs.settings_page import shipped

from halteres.agent.drafts import Draft, choose, load_draft, save_draft
from halteres.agent.open_access import check_changes, check_settings
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Caller, OpenThreads, TokenNeeded
from halteres.agent.transports.http_routes import Calls, legacy_routes
from halteres.config.reach import REACHES
from halteres.config.resolution import resolve_settings
from halteres.config.settings import ENV_WIRING, SECTIONS, Settings, settings_schema, wiring_of
from halteres.runs.directory import list_runs
from halteres.runs.planning.plan import plan_run

from . import control
from .run_fixtures import make_run, supervised

WANT_TOKEN = ("code", "path", "address", "key")
VALUE = "below/here"  # of which no look says that it is more than a name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Leaf:
    """A place of a setting that can hold a text."""

    environment: str
    key: str  # section.field
    inside: Place  # what leads from the setting's value to the text
    reach: str | None

    @property
    def value(self) -> Any:
        """A value of the setting with a text in this place."""
        value: Any = VALUE
        for step in reversed(self.inside):
            value = [value] if step == 0 else {step: value}
        return value

    def __str__(self) -> str:
        return ".".join(map(str, (self.environment, self.key, *self.inside)))


def leaves(
    schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[Place, str | None]]:
    """Every place of a schema that can hold a text, and what it is declared to reach."""
    schema = {**definitions.get(str(schema.get("$ref", "")).rpartition("/")[2], {}), **schema}
    if REACHES in schema:
        yield (), schema[REACHES]
        return
    options = [*schema.get("anyOf", ()), *schema.get("allOf", ())]
    for option in options:
        yield from leaves(option, definitions)
    for name, member in schema.get("properties", {}).items():
        yield from (((name, *inside), reach) for inside, reach in leaves(member, definitions))
    for item in [schema["items"]] if "items" in schema else schema.get("prefixItems", ()):
        yield from (((0, *inside), reach) for inside, reach in leaves(item, definitions))
    if isinstance(rest := schema.get("additionalProperties"), dict):
        yield from ((("x", *inside), reach) for inside, reach in leaves(rest, definitions))
    is_fixed = "enum" in schema or "const" in schema
    may_be_anything = (
        not options and "type" not in schema and "properties" not in schema and not is_fixed
    )
    is_open_object = schema.get("type") == "object" and schema.get("additionalProperties") is True
    if (schema.get("type") == "string" and not is_fixed) or may_be_anything or is_open_object:
        yield (), None


def all_leaves() -> list[Leaf]:
    """Of all settings of ours, and of every environment that comes with the package."""
    ours = settings_schema()["$defs"]
    found = [
        Leaf("arithmetic", f"{section}.{field}", inside, reach)
        for section, model in SECTIONS.items()
        for field, schema in ours[model.__name__]["properties"].items()
        if field not in wiring_of(model)
        for inside, reach in leaves(schema, ours)
    ]
    for kind in shipped():
        schema = kind.env_config_cls.model_json_schema()
        found += [
            Leaf(str(kind.name), f"env.{field}", inside, reach)
            for field, one in schema["properties"].items()
            if field not in ENV_WIRING
            for inside, reach in leaves(one, schema.get("$defs", {}))
        ]
    return found


LEAVES = all_leaves()
REACHING = list(
    {
        (leaf.key, leaf.inside): leaf for leaf in reversed(LEAVES) if leaf.reach in WANT_TOKEN
    }.values()
)
"""Those that want the token; what every environment has is tried with one of them."""


def open_caller() -> Caller:
    return Caller(open_threads=OpenThreads())


def test_every_setting_that_can_hold_a_text_says_what_it_reaches() -> None:
    """A new one that does not say so is found here."""
    assert [str(leaf) for leaf in LEAVES if leaf.reach is None] == []
    kinds = {leaf.reach for leaf in LEAVES}
    assert kinds == {*WANT_TOKEN, "environment", "model", "id", "name", "nothing"}
    known = {"run.interpreter", "env.spool_dir", "env.rewards", "env.make", "env.search_url"}
    assert known <= {leaf.key for leaf in REACHING}


WORDS_ALONE = """
import asyncio, sys
from docs.settings_page import shipped
from halteres.config.reach import REACHES

CANARY = "canary_module:Canary-v0"
tried = [""]
OUTWARD = ("open", "import", "os.", "subprocess.", "socket.", "sqlite3.", "shutil.", "glob.")

def watch(event, arguments):
    if event.startswith(OUTWARD) and "canary_module" in repr(arguments):
        print(tried[0], event, flush=True)

sys.addaudithook(watch)
for kind in shipped():
    base, servers = kind.config_init()
    fields = kind.env_config_cls.model_json_schema()["properties"]
    words = [name for name, one in fields.items() if one.get(REACHES) == "nothing"]
    for name in words:
        tried[0] = f"{kind.name}.{name}"
        try:
            config = kind.env_config_cls.model_validate({**base.model_dump(), name: CANARY})
            env = kind(config, servers)
            asyncio.run(env.setup())
            asyncio.run(env.get_next_item())
        except Exception:
            continue
print("tried", tried[0])
"""


def test_what_reaches_nothing_is_not_opened_imported_or_passed_to_another_process(
    home: Path,
) -> None:
    """Of every environment that comes with the package, each setting that says so."""
    ended = subprocess.run(
        [sys.executable, "-c", WORDS_ALONE],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    *reached, tried = ended.stdout.splitlines()
    assert tried.startswith("tried ")
    assert reached == []


@pytest.mark.parametrize("id", ["mine:Wordle-v0", "a.b:Wordle-v0", "os:abort", "/x:y", "x,y:z-1"])
def test_an_id_that_names_a_module_wants_the_token(id: str) -> None:
    with pytest.raises(TokenNeeded):
        check_changes("text_gym", {"task": id})


@pytest.mark.parametrize("id", ["game:Sudoku-v0-easy", "rg:letter_counting", "Taxi-v3"])
def test_an_id_of_a_registry_is_set_without_the_token(id: str) -> None:
    check_changes("text_gym", {"task": id, "options": {"max_turns": 4}})


@pytest.mark.parametrize("value", ["off", "on", False, True])
def test_what_cages_scorers_is_not_changed_without_the_token(value: Any) -> None:
    """Also by the truth values that YAML makes of its words."""
    with pytest.raises(TokenNeeded):
        check_changes("arithmetic", {"cage": value})


OPEN_TOOLS = {
    "rl_list_environments",
    "rl_select_environment",
    "rl_get_current_config",
    "rl_edit_config",
    "rl_start_training",
    "rl_list_runs",
    "rl_stop_training",
    "rl_get_results",
    "rl_check_status",
    "rl_test_inference",
    "rl_health_check",
}
"""Of those that take settings, a model or an environment, the tests below try each."""


async def test_the_open_routes_are_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one is tried here before it is opened."""
    called: set[str] = set()

    async def reply(self: Calls, request: Any, name: str, *_: Any, **__: Any) -> Any:
        called.add(name)
        raise TokenNeeded.of("It is called.", "Here")

    monkeypatch.setattr(Calls, "reply", reply)
    paths = [
        (next(iter(route.methods or {"GET"})), route.path) for route in legacy_routes(Calls(), [])
    ]
    async with control.client(authorization="") as http:
        for method, path in paths:
            address = path.replace("{name:path}", "arithmetic").replace("{run_id:path}", "aaaa1111")
            await http.request(method.replace("HEAD", "GET"), address)
    assert called == OPEN_TOOLS
    takes = {"changes", "settings", "environment", "models", "value", "name", "resume_from"}
    assert {name for name in OPEN_TOOLS if takes & BY_NAME[name].arguments.model_fields.keys()} == {
        "rl_select_environment",
        "rl_edit_config",
        "rl_start_training",
        "rl_test_inference",
    }


def forms_of(value: Any) -> list[Any]:
    """A value as JSON has it, and as the texts that the environment's class reads as the same."""
    texts = (
        []
        if isinstance(value, str)
        else [json.dumps(value), yaml.safe_dump(value), f"\n  {json.dumps(value)} "]
    )
    if isinstance(value, list):
        inner = json.dumps(value[0])
        texts.append(f"[&a {inner}, *a]")
        texts.append(f"- &a {inner}\n- {{<<: *a}}" if isinstance(value[0], dict) else f"- {inner}")
    return [value, *texts]


async def refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (200, "unauthorized"), (
        path,
        body,
        answer.json(),
    )
    assert "TOKEN" in answer.json()["next"]


@pytest.mark.parametrize("environment", sorted({leaf.environment for leaf in REACHING}))
async def test_no_open_route_takes_a_setting_that_names_code_a_path_an_address_or_a_key(
    environment: str,
) -> None:
    """Each such setting, in each form of its value, on each route that sets or starts."""
    of_environment = [leaf for leaf in REACHING if leaf.environment == environment]
    async with control.client(authorization="") as http:
        await http.post(f"/environments/{environment}/select")
        before = load_draft(open_caller(), None)
        for leaf in of_environment:
            for value in forms_of(leaf.value):
                await refused(http, "/config", {"field": leaf.key, "value": value})
            for value in forms_of(leaf.value)[:2]:
                changes = {"group_size": 8, leaf.key: value}
                await refused(http, "/config", {"changes": changes})
                await refused(http, f"/environments/{environment}/select", {"changes": changes})
                await refused(http, "/runs", {"changes": changes})
                await refused(
                    http, "/runs", {"changes": changes, "environment": environment, "dry_run": True}
                )
        assert load_draft(open_caller(), None) == before
    assert not list_runs()


@pytest.mark.parametrize("key", ["env.rewards", "env.panel", "env.reward_model_path"])
async def test_a_draft_that_names_code_is_neither_started_nor_tested_nor_edited_without_the_token(
    home: Path, key: str
) -> None:
    """It was set before there was a check."""
    values = {"env.reward_model_path": "/models/mine"}
    value = values.get(key, [{"name": "mine", "function": "halteres.rewards.functions:none"}])
    (home / "drafts" / "open").mkdir(parents=True)
    changes = {key: value}
    save_draft(Draft(handle="default", is_open=True, environment="arithmetic", changes=changes))
    async with control.client(authorization="") as http:
        await refused(http, "/runs", {})
        await refused(http, "/runs", {"dry_run": True})
        await refused(http, "/test/inference", {})
        await refused(http, "/config", {"field": "group_size", "value": 8})
        assert (await http.get("/config")).json()["environment"] == "arithmetic"
        mended = (
            await http.post("/config", json={"field": key, "value": None if "path" in key else []})
        ).json()
        assert "code" not in mended
    assert not list_runs()


PREPARED = [
    {"group_size": 8},
    {"rewards": [{"name": "mine", "function": "halteres.rewards.functions:none"}]},
]


@pytest.mark.parametrize("changes", PREPARED)
async def test_a_draft_that_was_prepared_with_the_token_is_the_same_whatever_is_asked_without_it(
    home: Path, changes: dict[str, Any]
) -> None:
    """Each open route that selects, edits, starts, tests or shows, on the draft's own name."""
    file = home / "drafts" / "default.json"
    choose(Caller(), None, "arithmetic", changes)
    before = file.read_bytes()
    quick = {"inference.engine": "scripted"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/runs", {"dry_run": True}),
        ("/runs", {}),
        ("/test/inference", {}),
        ("/config", {"field": "group_size", "value": 4}),
        ("/environments/word_problems/select", {}),
        ("/runs", {"environment": "word_problems", "changes": quick, "dry_run": True}),
        ("/runs", {"environment": "word_problems", "draft": "default", "dry_run": True}),
        ("/config", {"field": "group_size", "value": 4, "draft": "default"}),
    ]
    async with control.client(authorization="") as http:
        shown = (await http.get("/config")).json()
        for path, body in asked:
            await http.post(path, json=body)
            assert file.read_bytes() == before, (path, body)
    assert shown["code"] == "no_environment"
    assert load_draft(open_caller(), None).environment == "word_problems"


async def test_a_run_with_code_in_its_settings_is_not_repeated_without_the_token() -> None:
    run = make_run()
    settings = Settings.model_validate(
        {
            "run": {"environment": "arithmetic"},
            "env": {"rewards": [{"name": "mine", "function": "os:abort"}]},
        }
    )
    (run.path / "settings.json").write_text(settings.model_dump_json())
    async with control.client(authorization="") as http:
        await refused(http, "/runs", {"resume_from": run.run_id})
        await refused(
            http,
            "/runs",
            {"resume_from": run.run_id, "changes": {"total_steps": 60}, "dry_run": True},
        )
        await refused(http, "/environments/arithmetic/select", {"settings_of": run.run_id})
    (run.path / "settings.json").write_text(Settings().model_dump_json())
    async with control.client(authorization="") as http:
        for changes in (
            {"rewards": '[{name: x, function: "os:abort"}]'},
            {"run.interpreter": "python3"},
        ):
            await refused(http, "/runs", {"resume_from": run.run_id, "changes": changes})


async def test_a_programs_reward_function_is_not_imported_without_the_token(
    home: Path, tmp_path: Path
) -> None:
    """A plan imports it; the draft was set before there was a check."""
    trace, file = tmp_path / "trace", tmp_path / "mine.py"
    score = "def score(folder, **_):\n    return [0.0] * len(folder)\n"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n{score}", encoding="utf-8")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1 + 1"}\n', encoding="utf-8")
    reward = {"env.reward": f"{file}:score"}
    changes = {"env.tasks": str(tasks), "env.command": "true {question}", **reward}
    plan_run(resolve_settings("agent", None, [], changes=changes))
    assert trace.exists()
    trace.unlink()
    (home / "drafts" / "open").mkdir(parents=True)
    save_draft(Draft(handle="default", is_open=True, environment="agent", changes=changes))
    async with control.client(authorization="") as http:
        for body in ({}, {"environment": "agent", "changes": reward}):
            await refused(http, "/runs", {**body, "dry_run": True})
            await refused(http, "/runs", body)
    assert not trace.exists() and not list_runs()


async def test_a_function_that_comes_as_a_text_never_runs(tmp_path: Path) -> None:
    """The whole way of the attack: select, set, start."""
    trace = tmp_path / "trace"
    file = tmp_path / "mine.py"
    score = "def score(completions, **_):\n    return [0.0] * len(completions)\n"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n{score}")
    reward = f'[{{name: x, function: "{file}:score"}}]'
    quick = {"inference.engine": "scripted", "group_size": 4, "batch_size": 16}
    async with control.client(authorization="") as http:
        await http.post("/environments/arithmetic/select", json={"changes": quick})
        for field in ("rewards", "panel", "env.rewards", "env.panel"):
            await refused(http, "/config", {"field": field, "value": reward})
        for value in (f"x, {tmp_path}", f" {tmp_path}", f"{tmp_path} ,x"):
            await refused(http, "/config", {"field": "reward_model_path", "value": value})
        await refused(
            http,
            "/environments/text_gym/select",
            {"changes": {"make": "os:system", "task": f"touch {trace}"}},
        )
        await refused(http, "/runs", {"changes": {**quick, "rewards": reward}})
    assert not trace.exists() and not list_runs()


FOREIGN_VALUES = [
    ["tasks.jsonl", "/etc/passwd"],
    "FILE:/etc/passwd",
    {"train": ["file:///etc/passwd"]},
    "tasks.jsonl,/etc/passwd",
    "tasks.jsonl /etc/passwd",
    '{train: "\\x2fetc/passwd"}',
    "[a, [b, {c: ../../secret}]]",
    "os:abort",
    "my_scorer.py",
    "http://stranger.example/v1",
    "~root/x",
    {"/etc/passwd": 1},
]


@pytest.mark.parametrize("value", FOREIGN_VALUES)
def test_a_setting_of_another_environment_is_judged_by_what_its_texts_look_like(value: Any) -> None:
    with pytest.raises(TokenNeeded):
        check_changes("arithmetic", {"env.files": value})


@pytest.mark.parametrize(
    "value",
    [
        "openai/gsm8k",
        "Question: {question}, and/or its answer",
        ["a", {"b": 1}],
        ".*",
        7,
        None,
        "game:Wordle-v0",
    ],
)
def test_words_and_names_of_another_environment_are_anybodys(value: Any) -> None:
    check_changes("arithmetic", {"env.words": value})


@pytest.mark.parametrize("bomb", ["[" * 15_000, "x" * 30_000, "&a [x,x,x,x,x,x,x,x,x,x]"])
def test_a_text_that_is_too_large_to_be_checked_is_refused(bomb: str) -> None:
    if bomb.startswith("&"):
        levels = [
            f"&{name} [{', '.join([f'*{before}'] * 10)}]"
            for before, name in zip("abcdefg", "bcdefgh", strict=True)
        ]
        bomb = "- " + "\n- ".join([bomb, *levels])
    with pytest.raises(TokenNeeded):
        check_changes("arithmetic", {"rewards": bomb})


async def test_what_names_nothing_beyond_the_run_is_set_without_the_token() -> None:
    own = "[{name: own, environment: true, weight: 2}]"
    changes = {
        "inference.engine": "scripted",
        "group_size": 8,
        "system_prompt": "/no_think, see http://x",
        "rewards": own,
        "tags": ["a/b", "/c"],
    }
    async with control.client(authorization="") as http:
        selected = (
            await http.post("/environments/arithmetic/select", json={"changes": changes})
        ).json()
        assert "code" not in selected, selected
        checked = (await http.post("/runs", json={"dry_run": True})).json()
        assert checked["ok"], checked


def test_what_the_policy_or_the_environment_sets_may_be_anything(home: Path) -> None:
    locks = {"env.spool_dir": "/var/spool", "run.interpreter": sys.executable}
    (home / "policy.yaml").write_text(yaml.safe_dump({"lock": locks}))
    resolved = resolve_settings("arithmetic", None, ())
    check_settings(resolved.settings, resolved.sources)
    check_changes("text_gym", {"make": "gem:make"})  # what it is already
    with pytest.raises(TokenNeeded):
        check_changes("arithmetic", {"spool_dir": "/var/spool2"})


JUDGED = {
    "env.rewards": [
        {
            "name": "j",
            "judge": {"base_url": "http://127.0.0.1:9/v1", "key_variable": "MY_JUDGE_KEY"},
        }
    ]
}
MODELLED = {"env.panel": [{"name": "m", "model": "http://127.0.0.1:9"}]}


@pytest.mark.parametrize(
    ("lock", "key"), [(JUDGED, "MY_JUDGE_KEY"), (MODELLED, "HALTERES_REWARD_KEY")]
)
async def test_without_the_token_nothing_is_started_that_spends_a_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, lock: dict[str, Any], key: str
) -> None:
    """Also where the operator's policy says who is asked: starting it is what spends the key."""
    (home / "policy.yaml").write_text(yaml.safe_dump({"lock": lock}))
    monkeypatch.setenv(key, "sk-of-the-operator")
    async with control.client(authorization="") as http:
        await http.post("/environments/arithmetic/select")
        for path, body in (("/runs", {}), ("/runs", {"dry_run": True}), ("/test/inference", {})):
            await refused(http, path, body)
            assert key in (await http.post(path, json=body)).json()["error"]
    assert not list_runs()


@pytest.mark.parametrize("at_once", [None, 1])
async def test_without_the_token_only_so_many_runs_go_on_at_once(
    home: Path, at_once: int | None
) -> None:
    """By the policy's cap; four, where it says nothing."""
    if at_once is not None:
        (home / "policy.yaml").write_text(yaml.safe_dump({"caps": {"max_open_runs": at_once}}))
    num_live = at_once or 4
    live = [make_run(f"0000000{number}", status="running") for number in range(num_live)]
    async with control.client(authorization="") as http:
        await http.post(
            "/environments/arithmetic/select", json={"changes": {"inference.engine": "scripted"}}
        )
        with ExitStack() as lives:
            for run in live:
                lives.enter_context(supervised(run))
            answer = (await http.post("/runs", json={})).json()
            assert (answer["code"], answer["cap"], answer["limit"]) == (
                "policy_cap",
                "max_open_runs",
                num_live,
            )
            assert not (await http.post("/runs", json={"dry_run": True})).json()["ok"]
            own = {
                "dry_run": True,
                "environment": "arithmetic",
                "changes": {"inference.engine": "scripted"},
            }
            known = (await http.post("/runs", json=own, headers=control.bearer())).json()
            assert known["ok"], known
        assert (await http.post("/runs", json={"dry_run": True})).json()["ok"]
