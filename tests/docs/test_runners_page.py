"""The Kubernetes manifest of docs/runners.md: a valid Deployment whose command `ajet runner` understands."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ajet.cli.main import main
from ajet.task_runner.remote import KEY_VARIABLE
from support.pages import ROOT


@pytest.fixture
def manifest() -> dict[str, Any]:
    found = re.search(r'```text title="runners\.yaml"\n(.*?)```', (ROOT / "docs" / "runners.md").read_text(), re.DOTALL)
    assert found is not None
    deployment: dict[str, Any] = yaml.safe_load(found[1])
    return deployment


def test_kubernetes_reads_it(manifest: dict[str, Any]) -> None:
    client = pytest.importorskip("kubernetes_asyncio.client")
    reader = client.ApiClient.__new__(client.ApiClient)
    reader.configuration = client.Configuration()
    read = reader.deserialize(SimpleNamespace(data=json.dumps(manifest)), "V1Deployment")
    labels = read.spec.template.metadata.labels
    assert read.spec.selector.match_labels == labels
    assert reader.sanitize_for_serialization(read) == manifest, "it knows every key"


def test_the_command_is_understood(manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "ajet"
    assert [entry["name"] for entry in container["env"]] == [KEY_VARIABLE]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEY_VARIABLE, raising=False)
        assert main(arguments) == 2
    assert f"{KEY_VARIABLE} is not set" in capsys.readouterr().err, "all but the key is there"
