"""Asking an environment file about itself: whatever it does, it harms nobody and is told in a
sentence.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from halteres.config import program
from halteres.config.discovery import EnvironmentBroken
from halteres.config.environ import for_child
from halteres.config.program import (
    Description,
    EnvironmentProgram,
    describe,
    find_program,
    last_failure,
)
from halteres.errors import NotFound
from halteres.process import MOST_OUTPUT, run_caught

STANDIN = Path(__file__).parents[1] / "runs" / "standin_env.py"

ATROPOSLIB = """
    import sys
    from enum import Enum
    from pydantic import BaseModel, Field

    class Handling(Enum):
        STOP_TRAIN = "STOP_TRAIN"
        NONE = "NONE"

    class BaseEnvConfig(BaseModel):
        group_size: int = 4
        batch_size: int = -1
        eval_handling: Handling = Handling.STOP_TRAIN
        tokenizer_name: str = "somebody/else"

    class BaseEnv:
        @classmethod
        def cli(cls):
            cls.config_init()
            if sys.argv[1] not in ("serve", "process", "evaluate"):
                sys.stderr.write(f"argument commands: invalid choice: {sys.argv[1]!r}\\n")
                sys.exit(2)
"""
FOREIGN = """
    from theirs import BaseEnv, BaseEnvConfig

    class OurConfig(BaseEnvConfig):
        words: list[str] = ["a"]

    class Middle(BaseEnv):
        config_init = classmethod(lambda cls: (BaseEnvConfig(), []))

    class Ours(Middle):
        config_init = classmethod(lambda cls: (OurConfig(group_size=8), []))

    if __name__ == "__main__":
        Ours.cli()
"""


def file(tmp_path: Path, text: str, name: str = "an_env") -> EnvironmentProgram:
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return find_program(str(path))


def broken(tmp_path: Path, text: str) -> EnvironmentBroken:
    with pytest.raises(EnvironmentBroken) as caught:
        describe(file(tmp_path, text), {})
    return caught.value


def test_a_failing_import_is_told_with_its_place_and_the_end_of_the_traceback(
    tmp_path: Path,
) -> None:
    error = broken(tmp_path, "import json\n\n\ndef fall():\n    1 / 0\n\n\nfall()\n")
    assert error.what == f"The environment file {tmp_path}/an_env.py:5 is broken."
    assert (error.code, error.details["line"]) == ("environment_broken", 5)
    assert error.details["traceback"][-1] == "ZeroDivisionError: division by zero"
    assert len(error.details["traceback"]) <= 8


def test_a_failing_config_init_is_told_with_its_place(tmp_path: Path) -> None:
    error = broken(
        tmp_path,
        """
        from halteres.environments.base import BaseEnv

        class Faulty(BaseEnv):
            @classmethod
            def config_init(cls):
                raise RuntimeError("no data set")

        Faulty.cli()
        """,
    )
    assert error.what == f"The environment file {tmp_path}/an_env.py:7 is broken."
    assert "RuntimeError: no data set" in error.why


def test_a_module_that_is_missing_names_the_python_that_misses_it(tmp_path: Path) -> None:
    error = broken(tmp_path, "import no_such_module_anywhere\n")
    assert sys.executable.rpartition("/")[2] in error.why
    assert "run.interpreter names another Python" in error.why


def test_what_it_prints_besides_does_no_harm(tmp_path: Path) -> None:
    text = STANDIN.read_text().replace("if __name__", 'print("loud" * 3_000_000)\nif __name__')
    told = describe(file(tmp_path, text), {"difficulty": 4})
    assert told.config["difficulty"] == 4


def test_output_is_bounded_and_a_child_that_escapes_is_not_waited_for(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '30'], start_new_session=True)\n"
        "sys.stderr.write(str(child.pid))\n"
        "sys.stdout.write('x' * 6_000_000)\n"
    )
    began = time.monotonic()
    ended = run_caught((sys.executable, "-c", script), tmp_path, 20)
    os.kill(int(ended.err), 9)
    assert time.monotonic() - began < 15, "its child holds the streams for 30 s"
    assert (ended.code, len(ended.out)) == (0, MOST_OUTPUT)


def test_a_description_is_asked_for_once_whatever_process_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    counting = STANDIN.read_text().replace(
        "if __name__", f'open({str(tmp_path / "asked")!r}, "a").write("x")\nif __name__'
    )
    environment = file(tmp_path, counting)
    told = describe(environment, {"difficulty": 2})
    script = (
        "import sys; from halteres.config.program import describe, find_program\n"
        "print(describe(find_program(sys.argv[1]), {'difficulty': 2}).config['difficulty'])"
    )
    command = [sys.executable, "-c", script, str(environment.path)]
    other = subprocess.run(command, capture_output=True, text=True, env=for_child(), timeout=30)
    assert (other.stdout, told.config["difficulty"]) == ("2\n", 2), other.stderr
    assert (tmp_path / "asked").read_text() == "x"


def test_a_file_that_changed_or_whose_neighbour_did_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    environment = file(tmp_path, STANDIN.read_text())
    assert describe(environment, {}).config["difficulty"] == 1
    environment.path.write_text(STANDIN.read_text().replace('"difficulty": 1', '"difficulty": 77'))
    assert describe(environment, {}).config["difficulty"] == 77
    environment.path.write_text(
        STANDIN.read_text().replace('"difficulty": 1', '"difficulty": __import__("near").far')
    )
    (tmp_path / "near.py").write_text("far = 5\n")
    assert describe(environment, {}).config["difficulty"] == 5
    (tmp_path / "near.py").write_text("far = 555\n")
    assert describe(environment, {}).config["difficulty"] == 555


def test_what_is_remembered_is_bounded_and_never_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MOST_CACHED", 4)
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "cache" / "environments"
    for number in range(6):
        broken(tmp_path, f"{number} / 0\n")
    assert len(list(folder.iterdir())) <= 4
    for kept in folder.iterdir():
        kept.write_text("{ half")
    assert last_failure(tmp_path / "an_env.py") is None
    monkeypatch.setenv("HALTERES_HOME", "/dev/null/nowhere")
    assert describe(file(tmp_path, STANDIN.read_text()), {}).config["difficulty"] == 1


def test_a_file_that_failed_is_known_to_until_it_is_mended(tmp_path: Path) -> None:
    error = broken(tmp_path, "1 / 0\n")
    path = tmp_path / "an_env.py"
    assert last_failure(path) == error.sentence
    path.write_text(STANDIN.read_text())
    assert last_failure(path) is None
    assert describe(find_program(str(path)), {}).fields >= {"difficulty"}


def test_every_file_that_failed_is_known_to_whatever_becomes_of_its_neighbours(
    tmp_path: Path,
) -> None:
    failed = [file(tmp_path, f"{number} / 0\n", f"env{number}") for number in range(3)]
    for environment in failed:
        with pytest.raises(EnvironmentBroken):
            describe(environment, {})
        (tmp_path / f"beside_{environment.name}.py").write_text("")
    assert all(last_failure(environment.path) for environment in failed)


def test_a_config_init_that_is_refused_is_told_without_an_advertisement(tmp_path: Path) -> None:
    text = """
        from halteres.environments.base import BaseEnv
        from halteres.environments.config import BaseEnvConfig

        class Wrong(BaseEnv):
            @classmethod
            def config_init(cls):
                return BaseEnvConfig(group_size="many"), []

        if __name__ == "__main__":
            Wrong.cli()
        """
    error = broken(tmp_path, text)
    assert "BaseEnvConfig refuses group_size: Input should be a valid integer" in error.sentence
    assert "pydantic.dev" not in error.sentence
    assert f"python {tmp_path}/an_env.py describe" in error.sentence
    at_import = broken(
        tmp_path, text.replace("class Wrong", "BaseEnvConfig(seed=-1)\n\n        class Wrong")
    )
    assert "pydantic.dev" not in at_import.sentence + str(at_import.details["traceback"])


def test_a_file_of_another_framework_is_asked_by_a_script_of_ours(tmp_path: Path) -> None:
    """atroposlib's command line knows no `describe`; the fields are read from the class that its
    file would run.
    """
    (tmp_path / "theirs.py").write_text(textwrap.dedent(ATROPOSLIB))
    environment = file(tmp_path, FOREIGN, "ours")
    told = describe(environment, {"group_size": "16", "banana": 1, "eval_handling": "SOMETIMES"})
    assert told.fields == {"group_size", "batch_size", "eval_handling", "tokenizer_name", "words"}
    assert (told.config["group_size"], told.config["words"]) == (16, ["a"])
    assert {problem.field: problem.rule for problem in told.problems} == {
        "env.banana": "there is no such setting",
        "env.eval_handling": "must be 'STOP_TRAIN' or 'NONE'",
    }


def test_a_foreign_file_finds_its_config_in_its_project_whoever_asks_and_is_asked_again_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the users' guide: in a package, its config at a path that is relative to the
    project.
    """
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    package, config = (
        tmp_path / "project" / "theirs" / "environments",
        tmp_path / "project" / "configs" / "a.json",
    )
    for folder in (package, config.parent):
        folder.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    config.write_text('{"group_size": 8}')
    (package / "theirs.py").write_text(textwrap.dedent(ATROPOSLIB))
    reading = FOREIGN.replace("    from theirs", "    import json\n    from theirs")
    reading = reading.replace(
        "OurConfig(group_size=8)", 'OurConfig(**json.load(open("configs/a.json")))'
    )
    environment = file(package, reading, "ours")
    assert environment.working_directory == tmp_path / "project"
    told = describe(environment, {})
    assert (told.is_foreign, told.config["group_size"]) == (True, 8)
    config.write_text('{"group_size": 128}')
    assert describe(environment, {}).config["group_size"] == 128


@pytest.mark.parametrize("mark", program.PROJECT)
def test_the_working_directory_is_the_nearest_project_and_without_one_where_imports_begin(
    tmp_path: Path, mark: str
) -> None:
    package = tmp_path / "outer" / "inner" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert program.project_of(package / "env.py") == tmp_path / "outer" / "inner"
    (tmp_path / "outer" / mark).touch()
    assert program.project_of(package / "env.py") == tmp_path / "outer"
    (package / mark).touch()
    assert program.project_of(package / "env.py") == package


def test_a_working_directory_is_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "an_env.py").write_text(STANDIN.read_text())
    found = find_program(str(tmp_path / "an_env.py"), None, str(tmp_path.parent))
    assert found.working_directory == tmp_path.parent
    with pytest.raises(NotFound, match="There is no folder /nowhere") as refused:
        find_program(str(tmp_path / "an_env.py"), None, "/nowhere")
    assert "run.working_directory" in refused.value.next


def test_a_description_is_written_and_read_without_loss() -> None:
    item = {
        "field": "x",
        "got": 1,
        "rule": "input should be 2",
        "did_you_mean": None,
        "suggest": (1, 2),
    }
    found = Description.of({"schema": {"properties": {}}, "config": {"x": 1}, "problems": [item]})
    assert (found.problems[0].field, found.problems[0].rule) == ("env.x", "must be 2")
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(found))), Description) == found


def test_an_environment_that_is_asked_ends_with_whoever_asks(tmp_path: Path) -> None:
    """The asker is killed, so that its deadline and its sweeping never come."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    asked = (
        f"import time\nheld = open({fifo!r}, 'w')\nprint('up', file=held, "
        "flush=True)\ntime.sleep(600)"
    )
    asker = (
        "import sys\nfrom pathlib import Path\nfrom halteres.process import run_caught\n"
        f"run_caught([sys.executable, '-c', {asked!r}], Path({str(tmp_path)!r}), 600)"
    )
    with subprocess.Popen([sys.executable, "-c", asker], env=for_child()) as process:
        assert select.select([reading], [], [], 20)[0], "it was not started"
        assert os.read(reading, 16) == b"up\n"
        process.kill()
    assert select.select([reading], [], [], 20)[0], "it lives on"
    assert os.read(reading, 16) == b"", "its end of the pipe is closed"
    os.close(reading)


def test_an_environment_that_is_asked_has_a_lifeline_that_is_open(tmp_path: Path) -> None:
    script = "import os; print(os.fstat(int(os.environ['HALTERES_LIFELINE_FD'])).st_size)"
    assert run_caught([sys.executable, "-c", script], tmp_path, 20).out == "0\n"
