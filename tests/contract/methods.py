"""Sensible arguments for every public method of the SDK's clients.

Owns: which calls the compatibility page makes.
Never: judges an answer; a method that is not in the table cannot be probed, and the generator says
so.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tinker
from clients.sdk.program.connection import Connection, plain, prompt, unique, wait
from clients.sdk.program.optimising import negative_likelihood, weighted_likelihood
from tinker import types

CLIENTS: dict[str, type] = {
    "ServiceClient": tinker.ServiceClient,
    "TrainingClient": tinker.TrainingClient,
    "SamplingClient": tinker.SamplingClient,
    "RestClient": tinker.RestClient,
    "AdminClient": tinker.AdminClient,
}

IN_THE_CLIENT = {
    "ServiceClient.create_rest_client",
    "ServiceClient.get_console_url",
    "ServiceClient.get_telemetry",
    "ServiceClient.holder",
    "TrainingClient.get_console_url",
    "TrainingClient.get_telemetry",
    "SamplingClient.create",
    "SamplingClient.get_sampler_handle",
    "SamplingClient.get_telemetry",
    "SamplingClient.on_queue_state_change",
    "RestClient.get_telemetry",
    "AdminClient.get_telemetry",
}
"""Methods that ask no server, or are the client's own machinery."""


def public_methods() -> list[str]:
    """Every public method and property, as "Client.method", client by client, in alphabetical
    order.
    """
    return [
        f"{name}.{member}"
        for name, client in CLIENTS.items()
        for member, _ in inspect.getmembers(client)
        if not member.startswith("_")
    ]


@dataclass
class LiveService:
    """A connection and what a method may need."""

    scene: Connection

    @cached_property
    def training(self) -> Any:
        """A trained model, so that optim_step and saves have something to do."""
        return self.scene.trainer()

    @cached_property
    def sampling(self) -> Any:
        return self.scene.sampler(base_model=self.scene.folder)

    @cached_property
    def session(self) -> str:
        return self.training.model_id.partition(":")[0]

    @cached_property
    def sampler_id(self) -> str:
        assert self.sampling
        return wait(self.scene.rest.get_session(self.session)).sampler_ids[0]

    def state(self) -> str:
        """The path of a new checkpoint."""
        return wait(self.training.save_state(unique("page"))).path

    def policy(self) -> str:
        """The path of new sampler weights."""
        return wait(self.training.save_weights_for_sampler(unique("page"))).path

    def export(self) -> str:
        """The path of a new export."""
        return wait(self.training.save_weights_external(unique("page"))).path

    def client(self, name: str) -> Any:
        """The object that a method is called on."""
        if name == "ServiceClient":
            return self.scene.service
        if name == "TrainingClient":
            return self.training
        if name == "AdminClient":
            return tinker.AdminClient()
        return self.sampling if name == "SamplingClient" else self.scene.rest

    def filled(self) -> None:
        """Make sure that there is a gradient to step along."""
        wait(self.training.forward_backward(plain(), "cross_entropy"))

    def step(self) -> tuple[Any, ...]:
        self.filled()
        return (types.AdamParams(learning_rate=1e-3),)


Arguments = Callable[[LiveService], tuple[Any, ...]]

PARAMS = types.SamplingParams(max_tokens=4, seed=1)
DAY = (
    datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2030, 1, 2, tzinfo=datetime.UTC),
)


def nothing(_: LiveService) -> tuple[Any, ...]:
    return ()


ARGUMENTS: dict[str, Arguments] = {
    "ServiceClient.close": lambda _: ("success",),
    "ServiceClient.copy_weights": lambda world: (world.policy(),),
    "ServiceClient.create_custom_loss": lambda _: (
        weighted_likelihood,
        {"logprobs": 1, "weights": 1},
    ),
    "ServiceClient.create_lora_training_client": lambda world: (world.scene.model, 4),
    "ServiceClient.create_sampling_client": lambda world: (world.policy(),),
    "ServiceClient.create_training_client_from_state": lambda world: (world.state(),),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda world: (
        world.state(),
    ),
    "ServiceClient.get_server_capabilities": nothing,
    "TrainingClient.create_sampling_client": lambda world: (world.policy(),),
    "TrainingClient.forward": lambda _: (plain(), "cross_entropy"),
    "TrainingClient.forward_backward": lambda _: (plain(), "cross_entropy"),
    "TrainingClient.forward_backward_custom": lambda _: (plain(), negative_likelihood),
    "TrainingClient.get_info": nothing,
    "TrainingClient.get_tokenizer": nothing,
    "TrainingClient.load_state": lambda world: (world.state(),),
    "TrainingClient.load_state_with_optimizer": lambda world: (world.state(),),
    "TrainingClient.optim_step": LiveService.step,
    "TrainingClient.save_state": lambda _: (unique("page"),),
    "TrainingClient.save_weights_and_get_sampling_client": nothing,
    "TrainingClient.save_weights_external": lambda _: (unique("page"),),
    "TrainingClient.save_weights_for_sampler": lambda _: (unique("page"),),
    "SamplingClient.compute_logprobs": lambda _: (prompt([5, 6, 7]),),
    "SamplingClient.from_sampler_handle": lambda world: (world.sampling.get_sampler_handle(),),
    "SamplingClient.get_base_model": nothing,
    "SamplingClient.get_tokenizer": nothing,
    "SamplingClient.sample": lambda _: (prompt([5, 6, 7]), 2, PARAMS),
    "RestClient.assign_session_project": lambda world: (world.session, "a-project"),
    "RestClient.copy_weights": lambda world: (world.policy(), "a-project"),
    "RestClient.delete_checkpoint": lambda world: (
        world.training.model_id,
        "/".join(world.state().split("/")[-2:]),
    ),
    "RestClient.delete_checkpoint_from_tinker_path": lambda world: (world.state(),),
    "RestClient.export_session_trace": lambda world: (world.session,),
    "RestClient.get_audit_log": nothing,
    "RestClient.get_billing_usage": lambda _: DAY,
    "RestClient.get_current_checkpoint_storage_usage": nothing,
    "RestClient.get_external_weights_urls": lambda world: (world.export(),),
    "RestClient.get_sampler": lambda world: (world.sampler_id,),
    "RestClient.get_server_capabilities": nothing,
    "RestClient.get_session": lambda world: (world.session,),
    "RestClient.get_training_run": lambda world: (world.training.model_id,),
    "RestClient.get_training_run_by_tinker_path": lambda world: (world.state(),),
    "RestClient.get_weights_info_by_tinker_path": lambda world: (world.state(),),
    "RestClient.list_checkpoints": lambda world: (world.training.model_id,),
    "RestClient.list_sessions": nothing,
    "RestClient.list_training_runs": nothing,
    "RestClient.list_user_checkpoints": nothing,
    "RestClient.publish_checkpoint_from_tinker_path": lambda world: (world.state(),),
    "RestClient.search_sessions": lambda _: (types.SessionSearchRequest(limit=5),),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda world: (world.state(), 3600),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda world: (world.state(),),
    "RestClient.whoami": nothing,
    "AdminClient.get_audit_log": nothing,
    "AdminClient.get_billing_usage": lambda _: DAY,
    "AdminClient.get_current_checkpoint_storage_usage": nothing,
}
"""By the name of the form that waits; the `_async` form takes the same."""


def base_of(method: str) -> str:
    """ "Client.save_state" for "Client.save_state_async"."""
    return method.removesuffix("_async")
