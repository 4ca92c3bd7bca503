"""The files that others run Tandem by, checked without a cluster: fields against schemas, flags against the programs.

`kubernetes_schema.json` has the fields of the objects that are used here; Ray brings the schema of its own file.
"""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from cluster import router_settings, worker_settings
from cluster.process_guard import EXIT_STARTUP_ERROR
from cluster.worker_settings import WorkerSettings
from deploy.cli import app
from deploy.cluster_plan import ROUTER_EXTRA_STOP_S
from deploy.cluster_secrets import SERVER_NAME
from deploy.config import ClusterConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
POOLS = DEPLOY / "kubernetes" / "pools"
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes_schema.json").read_text())
KUBERNETES_FILES = sorted(path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml")
# What a pod's own fields stand for in arguments.
FIELDS = {"POD_NAME": "prefill-7c9d8-x2x4q", "POD_IP": "10.1.2.3"}


def objects(*paths: Path) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from yaml.safe_load_all(path.read_text())


def pod_templates(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = item.get("spec", {})
    if item["kind"] == "Deployment":
        yield spec["template"]
    if item["kind"] == "RayCluster":
        yield spec["headGroupSpec"]["template"]
        yield from (group["template"] for group in spec["workerGroupSpecs"])


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.stem}-{number}", template["spec"])
        for path in KUBERNETES_FILES
        for number, template in enumerate(template for item in objects(path) for template in pod_templates(item))
    ]


PODS = pods()
CONTAINERS = [
    (f"{name}/{container['name']}", container)
    for name, spec in PODS
    for container in (*spec.get("initContainers", ()), *spec["containers"])
]


@pytest.mark.parametrize("path", KUBERNETES_FILES, ids=lambda path: path.stem)
def test_every_field_is_one_that_kubernetes_knows(path: Path) -> None:
    for item in objects(path):
        jsonschema.validate(item, {"$ref": f"#/definitions/{item['kind']}", "definitions": SCHEMA["definitions"]})


def test_the_schema_refuses_a_field_that_is_misspelt() -> None:
    (deployment, _) = objects(POOLS / "decode.yaml")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="livenessprobe"):
        jsonschema.validate(deployment, {"$ref": "#/definitions/Deployment", "definitions": SCHEMA["definitions"]})


@pytest.mark.parametrize(("name", "spec"), PODS, ids=[name for name, _ in PODS])
def test_pods_run_as_nobody_in_particular_and_mount_what_they_name(name: str, spec: dict[str, Any]) -> None:
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["fsGroup"] == 10001
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {
        mount["name"]
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        for mount in container["volumeMounts"]
    }
    assert mounted == volumes


@pytest.mark.parametrize(("name", "container"), CONTAINERS, ids=[name for name, _ in CONTAINERS])
def test_containers_may_do_little_have_bounds_and_no_secret_in_their_environment(
    name: str, container: dict[str, Any]
) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    for variable in container.get("env", ()):
        assert "secretKeyRef" not in variable.get("valueFrom", {}), "secrets are files"
        assert not re.search("TOKEN|PASSWORD|KEY|SECRET", variable["name"])


def test_no_file_has_a_secret_of_its_own() -> None:
    assert not [item for item in objects(*KUBERNETES_FILES) if item["kind"] == "Secret"]


@pytest.mark.parametrize("path", sorted(POOLS.glob("*.yaml")), ids=lambda path: path.stem)
def test_plain_deployments_have_probes_on_ports_that_they_name(path: Path) -> None:
    for item in objects(path):
        for template in pod_templates(item):
            for container in template["spec"]["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                ports = {port["name"] for port in container["ports"]}
                for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                    probe = container[kind]
                    (asked,) = (probe[how] for how in ("tcpSocket", "httpGet") if how in probe)
                    assert asked["port"] in ports


def test_services_and_policies_select_pods_that_there_are() -> None:
    items = list(objects(*POOLS.glob("*.yaml")))
    labels = [template["metadata"]["labels"] for item in items for template in pod_templates(item)]
    selectors = [item["spec"]["selector"] for item in items if item["kind"] == "Service"]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in items if item["kind"] == "NetworkPolicy"]
    owners = [item for item in items if item["kind"] in ("Deployment", "PodDisruptionBudget")]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in owners]
    assert len(selectors) == 12
    for selector in selectors:
        assert any(selector.items() <= pod.items() for pod in labels), selector


def test_the_kustomization_has_every_file_and_the_overlay_patches_what_is_there() -> None:
    base = yaml.safe_load((POOLS / "kustomization.yaml").read_text())
    assert sorted(base["resources"]) == sorted(
        path.name for path in POOLS.glob("*.yaml") if path.name != "kustomization.yaml"
    )
    overlay = yaml.safe_load((DEPLOY / "kubernetes" / "pools-gpu" / "kustomization.yaml").read_text())
    assert (DEPLOY / "kubernetes" / "pools-gpu" / overlay["resources"][0]).resolve() == POOLS
    (patch,) = overlay["patches"]
    for name in patch["target"]["name"].split("|"):
        container = next(objects(POOLS / f"{name}.yaml"))["spec"]["template"]["spec"]["containers"][0]
        added = [step["value"] for step in yaml.safe_load(patch["patch"]) if step["path"].endswith("args/-")]
        assert worker_settings.parse_arguments(name, [*_arguments(container), *added]).backend == "triton"


def _arguments(container: dict[str, Any]) -> list[str]:
    """As Kubernetes fills them in."""
    return [re.sub(r"\$\((\w+)\)", lambda found: FIELDS[found[1]], word) for word in container["args"]]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_pods_have_flags_that_parse_and_time_to_drain(role: str) -> None:
    spec = next(objects(POOLS / f"{role}.yaml"))["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["python", "-m", f"{role}_worker"]
    settings = worker_settings.parse_arguments(role, _arguments(container))
    assert (settings.role, settings.worker_id, settings.kv_host) == (role, FIELDS["POD_NAME"], FIELDS["POD_IP"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.listen == f"{FIELDS['POD_IP']}:{ports['control']}"
    _check_metrics_can_be_scraped(settings, ports, role)
    assert spec["terminationGracePeriodSeconds"] > settings.drain_timeout_s + 5
    _check_secrets(settings, spec)


def _check_metrics_can_be_scraped(settings: WorkerSettings, ports: dict[str, int], role: str) -> None:
    """Prometheus is another pod: loopback would keep it out, and so would the policies without one for it."""
    assert (settings.metrics_host, settings.metrics_port) == (FIELDS["POD_IP"], ports["metrics"])
    template = next(objects(POOLS / f"{role}.yaml"))["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(settings.metrics_port)
    (policy,) = (item for item in objects(POOLS / "network.yaml") if item["metadata"]["name"] == "tandem-metrics")
    (rule,) = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [settings.metrics_port]


def test_router_pods_have_flags_that_parse_and_ask_for_keys() -> None:
    spec = next(objects(POOLS / "router.yaml"))["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["python", "-m", "router"]
    settings = router_settings.parse_arguments(_arguments(container))
    assert [settings.http_port, settings.grpc_port] == [port["containerPort"] for port in container["ports"]]
    assert settings.api_keys_file == settings.runtime_dir / "keys.txt"
    _check_secrets(settings, spec)


def _check_secrets(settings: Any, spec: dict[str, Any]) -> None:
    """They lie where the init container puts copies that nobody else can read."""
    (copying,) = (container["args"][0] for container in spec["initContainers"])
    assert f"install -d -m 0700 {settings.runtime_dir}" in copying
    assert "install -m 0600" in copying
    names = ["redis_password_file", "cluster_token_file", "tls_authority_file", "tls_certificate_file", "tls_key_file"]
    files = [getattr(settings, name) for name in names]
    assert {path.parent for path in files} == {settings.runtime_dir}
    assert [path.name for path in files] == ["redis.password", "cluster.token", "authority.pem", "node.pem", "node.key"]
    assert settings.tls_server_name == SERVER_NAME


def test_the_ray_clusters_own_cluster_file_fits_its_pods() -> None:
    config_map, ray = objects(DEPLOY / "kubernetes" / "raycluster.yaml")
    config = ClusterConfig.model_validate(yaml.safe_load(config_map["data"]["cluster.yaml"]))
    (group,) = ray["spec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"]
    wanted = config.prefill.workers + config.decode.workers
    assert config.ray.prefill_resources["GPU"] == config.ray.decode_resources["GPU"] == gpus
    assert group["minReplicas"] <= wanted <= group["maxReplicas"]
    (head,) = ray["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (config.router.port, config.router.grpc_port) == (ports["http"], ports["grpc"])
    assert ray["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "workers go elsewhere"


def test_rays_token_is_on_and_its_dashboard_off() -> None:
    _, cluster = objects(DEPLOY / "kubernetes" / "raycluster.yaml")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    machines = yaml.safe_load((DEPLOY / "virtual_machines" / "ray-cluster.yaml").read_text())
    (start,) = (line for line in machines["head_start_ray_commands"] if "ray start" in line)
    assert "RAY_AUTH_MODE=token" in start
    assert "--include-dashboard=false" in start


def test_the_file_for_machines_fits_rays_own_schema() -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((DEPLOY / "virtual_machines" / "ray-cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "setup_command": []}, schema)


SHIPPED = [
    path
    for folder in ("kubernetes", "virtual_machines", "container", "systemd")
    for path in sorted((DEPLOY / folder).rglob("*"))
    if path.is_file()
] + [DEPLOY.parent / "docs" / "several_hosts.md"]


def arguments_of(program: str, text: str) -> Iterator[list[str]]:
    """The words after each mention of the program, up to what ends its command; continued lines are one."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    for found in re.finditer(rf"(?<![\w.-]){program} ([^`\n]*)", joined):
        yield re.split(r" #|&&|\||  ", found[1])[0].split()


def check_command(words: list[str]) -> bool:
    """Whether it is a command of `tandem` at all. Raises AssertionError for an option that it does not have."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return False
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    named = {word.partition("=")[0].rstrip(",.;:)") for word in words if word.startswith("--")}
    assert named <= known, f"{sorted(named - known)} of `{command.name}`"
    return True


def test_commands_in_shipped_files_have_options_that_exist() -> None:
    """Each `tandem ...` by the command line itself, each `python -m ...` by the program's settings."""
    num_commands = num_programs = 0
    for path in SHIPPED:
        text = path.read_text()
        num_commands += sum(check_command(words) for words in arguments_of("tandem", text))
        for module in ("prefill_worker", "decode_worker", "router"):
            for words in arguments_of(f"python -m {module}", text):
                filled = [_of_unit(word) for word in words]
                settings = (
                    router_settings.parse_arguments(filled)
                    if module == "router"
                    else worker_settings.parse_arguments(module, filled)
                )
                assert settings.tls_certificate_file is not None
                num_programs += 1
    assert (num_commands, num_programs) >= (20, 6), "or they are not found any more"


def _of_unit(word: str) -> str:
    """As systemd fills it in."""
    return re.sub(r"\$\{\w+\}", "10.0.0.1", word).replace("%H", "host").replace("%i", "1")


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="--adress"):
        check_command(["up", "cluster.yaml", "--adress", "127.0.0.1:6379"])


# --- container and units ----------------------------------------------------------------------------------------------


def test_the_image_has_stages_a_user_of_its_own_a_health_check_and_no_model() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", " ", text)
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line and not line.startswith("#")]
    assert [name for name, _ in steps].count("FROM") == 2
    final = dict(steps[[name for name, _ in steps].index("FROM", 3) :])
    assert final["USER"] == "10001:10001", "as the pods run it"
    assert "g++" not in str(final)
    assert "/livez" in final["HEALTHCHECK"]
    compile(json.loads(final["HEALTHCHECK"].partition("CMD ")[2])[2], "HEALTHCHECK", "exec")
    assert json.loads(final["ENTRYPOINT"]) == ["tandem"]
    assert check_command(json.loads(final["CMD"]))
    assert not re.search("gguf|safetensors|model fetch", "\n".join(f"{name} {rest}" for name, rest in steps))


def test_the_images_context_has_every_package_and_what_installs_them() -> None:
    kept = set(re.findall(r"^!(\S+)$", (DEPLOY / "container" / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert (packages - {"tandem"}) | {"proto", "setup.py", "pyproject.toml", "requirements/run.lock"} <= kept
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= kept
    assert all((DEPLOY.parent / name).exists() for name in kept)
    assert "tandem" in project["project"]["scripts"]


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_units_run_as_a_user_of_their_own_drain_in_time_and_may_do_little(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text().replace("\\\n", " "))
    service = unit["Service"]
    assert service["User"] == service["Group"] == "tandem"
    assert service["RestartPreventExitStatus"] == str(EXIT_STARTUP_ERROR)
    assert service["RuntimeDirectoryMode"] == "0700"
    assert f"/run/{service['RuntimeDirectory']}" in service["ExecStart"] + service["Environment"]
    assert float(service["TimeoutStopSec"]) > ClusterConfig().drain_timeout_s + ROUTER_EXTRA_STOP_S
    assert (service["NoNewPrivileges"], service["ProtectSystem"], service["CapabilityBoundingSet"]) == (
        "yes",
        "strict",
        "",
    )
    assert not re.search("password=|token=", service["ExecStart"].lower())
