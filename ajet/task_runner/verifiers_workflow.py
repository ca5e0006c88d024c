"""`VerifiersWorkflow`: an episode that the package verifiers plays, on a model of ours.

Every model call goes through the gateway, so it is trained on exactly the tokens that were sampled. Used with
`ajet.task_reader.verifiers_tasks->VerifiersReader`, which says which environment.
"""

from __future__ import annotations

from ajet.environment.verifiers_client import VerifiersHost, host_options
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError, JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_runner.tuner import AjetTuner
from ajet.task_runner.workflow import Workflow

ERROR_CHARS = 2000


class VerifiersWorkflow(Workflow):
    """The reward is the mean of those of the environment's trained agents."""

    name: str = "verifiers"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        host = VerifiersHost.shared(*host_options(tuner.config.ajet.task_reader.options))
        access = tuner.as_oai_baseurl_apikey()
        index = int(workflow_task.task.metadata["index"])
        played = await host.play(index, access.base_url, access.api_key, access.model)
        said = "; ".join(played["errors"])[-ERROR_CHARS:] or "it gave no reason"
        if not played["began"]:
            raise EnvironmentUnavailableError(f"verifiers could not begin the episode: {said}")
        if not played["acted"]:
            raise EnvironmentFault(f"verifiers could not finish the episode: {said}")
        if not played["rewards"] or None in played["rewards"]:
            raise JudgeFault(f"verifiers gave the episode no reward: {said}")
        reward = sum(played["rewards"]) / len(played["rewards"])
        return WorkflowOutput(reward=reward, log_metrics=played["metrics"])
