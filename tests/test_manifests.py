"""The manifests and the Collector's configuration of `examples`: sound by the Kubernetes schemas, and complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parent.parent / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
COLLECTORS = sorted((EXAMPLES / "collector").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def pods(path: Path) -> list[dict[str, Any]]:
    """The pods of the workloads of a file."""
    return [one["spec"]["template"] for one in documents(path) if "template" in one["spec"]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid_by_the_schemas_of_kubernetes(path: Path) -> None:
    validator: Any = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kinds = []
    for document in documents(path):
        if document["apiVersion"].startswith("opentelemetry.io/"):  # of the Operator, which brings its own schema
            continue
        validator.validate(document, validator.latest_version(), strict=True)
        kinds.append(document["kind"])
    assert kinds


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_mounts_the_volumes_that_it_has_and_is_selected_by_its_labels(path: Path) -> None:
    for document in documents(path):
        if "template" not in document["spec"]:
            continue
        template = document["spec"]["template"]
        pod = template["spec"]
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        mounts = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]


def test_services_join_the_agent_of_their_host_by_a_folder_that_both_have() -> None:
    agent, service = pods(EXAMPLES / "kubernetes/daemonset.yaml")
    (of_agent,), (of_service,) = agent["spec"]["containers"], service["spec"]["containers"]
    (socket,) = (one["value"] for one in of_service["env"] if one["name"] == "INSTRUMENT_AGENT")
    assert socket in of_agent["command"]
    paths = {
        volume["hostPath"]["path"]
        for pod in (agent, service)
        for volume in pod["spec"]["volumes"]
        if "hostPath" in volume
    }
    mounts = {
        mount["mountPath"]
        for container in (of_agent, of_service)
        for mount in container["volumeMounts"]
        if mount["name"] == "host"
    }
    (folder,) = paths & mounts
    assert Path(folder) in Path(socket).parents
    assert agent["spec"]["securityContext"] == service["spec"]["securityContext"]


def test_the_operator_injects_what_the_dockerfile_builds() -> None:
    path = EXAMPLES / "kubernetes/operator.yaml"
    (injection,) = (one for one in documents(path) if one["kind"] == "Instrumentation")
    (pod,) = pods(path)
    annotations = pod["metadata"]["annotations"]
    assert annotations == {"instrumentation.opentelemetry.io/inject-python": injection["metadata"]["name"]}
    text = (EXAMPLES / "kubernetes/Dockerfile").read_text()
    images = {pod["spec"]["containers"][0]["image"] for path in MANIFESTS for pod in pods(path)}
    images |= {injection["spec"]["python"]["image"]}
    assert set(re.findall(r"-t (\S+)", text)) == images - {"registry.example/uninstrumented-chat:1"}
    assert set(re.findall(r"--target (\w+) -t", text)) <= set(re.findall(r" AS (\w+)", text))
    assert "COPY --from=packages /autoinstrumentation /autoinstrumentation" in text  # the folder that it copies


@pytest.mark.parametrize("path", COLLECTORS, ids=lambda path: path.name)
def test_each_part_of_a_collectors_pipelines_is_configured_and_used(path: Path) -> None:
    (config,) = documents(path)
    assert config.keys() == {"receivers", "processors", "exporters", "service"}
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert config[kind].keys() == {name for pipeline in pipelines for name in pipeline[kind]}
    assert all(pipeline["processors"][0] == "memory_limiter" for pipeline in pipelines)


def test_a_collector_keeps_slow_and_failed_requests_whole() -> None:
    (config,) = documents(EXAMPLES / "collector/tail-sampling.yaml")
    sampling = config["processors"]["tail_sampling"]
    assert {policy["type"]: policy.keys() for policy in sampling["policies"]} == {
        kind: {"name", "type", kind} for kind in ("latency", "status_code", "probabilistic")
    }
    (first,) = documents(EXAMPLES / "collector/by-trace.yaml")
    assert first["exporters"]["loadbalancing"]["routing_key"] == "traceID"
