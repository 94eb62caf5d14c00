"""docs/settings.md cannot go stale: it is what the models say, and they say something of every
setting.
"""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from halteres.config.settings import SECTIONS
from halteres.environments.config import APIServerConfig, BaseEnvConfig

from .settings_page import PAGE, rendered, shipped, variables

MODELS = {
    **SECTIONS,
    "env": BaseEnvConfig,
    "openai": APIServerConfig,
    **{str(kind.name): type(kind.config_init()[0]) for kind in shipped()},
}


@pytest.mark.parametrize("section", MODELS)
def test_every_setting_has_a_description(section: str) -> None:
    model: type[BaseModel] = MODELS[section]
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text() == rendered(), "run scripts/settings and look at the changes"


def test_the_variables_of_a_user_are_on_the_page() -> None:
    assert {"HALTERES_HOME", "TINKER_BASE_URL", "TINKER_API_KEY", "OPENROUTER_API_KEY"} <= dict(
        variables()
    ).keys()
