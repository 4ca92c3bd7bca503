"""Flags of `tandem serve` as variables of the environment: each has one, flags go first, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from deploy import local_cluster
from deploy.cli import app
from deploy.commands.environment import unknown_variables, variable_of
from deploy.config import ClusterConfig

SECRET = "pass-word-1"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The clusters that `tandem serve` would have started."""
    started: list[ClusterConfig] = []

    async def run_cluster(config: ClusterConfig, *_: object, **__: object) -> None:
        started.append(config)

    monkeypatch.setattr(local_cluster, "run_cluster", run_cluster)
    return started


def _serve(*arguments: str, **environment: str) -> typer.testing.Result:
    return CliRunner().invoke(app, ["serve", "--engine", "mock", *arguments], env=environment)


def test_every_flag_of_serve_has_a_variable_that_its_help_names() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = [option for option in commands["serve"].params if option.param_type_name == "option" and not option.hidden]
    assert len(flags) > 30
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    for option in flags:
        if option.name != "help":
            assert variable_of(option.name) in shown, option.name


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(
    runs: list[ClusterConfig], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("router: {port: 7001, grpc_port: 7002, host: localhost}\nblock_tokens: 32\n")
    result = _serve(
        "--port", "9001", TANDEM_CONFIG=str(file), TANDEM_PORT="8001", TANDEM_GRPC_PORT="8002", TANDEM_LOG_REQUESTS="1"
    )
    assert result.exit_code == 0, result.output
    (config,) = runs
    assert (config.router.port, config.router.grpc_port, config.router.host) == (9001, 8002, "localhost")
    assert (config.block_tokens, config.router.log_requests, config.seed) == (32, True, ClusterConfig().seed)


def test_lists_switches_and_the_positional_model(runs: list[ClusterConfig], tmp_path: Path) -> None:
    result = _serve(
        str(tmp_path), TANDEM_MODEL="another", TANDEM_SERVED_MODEL_NAME="chat gpt-4o-mini", TANDEM_TRANSPORT="tcp,shm"
    )
    assert result.exit_code == 0, result.output
    (config,) = runs
    assert config.model == str(tmp_path)
    assert (config.router.served_model_name, config.router.model_aliases) == ("chat", ("gpt-4o-mini",))
    assert config.transports == ("tcp", "shm")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TANDEM_PORT", "http", "valid integer"),
        ("TANDEM_PORT", "70000", "65535"),
        ("TANDEM_DTYPE", "int3", "float32"),
        ("TANDEM_POLICY", "best", "cache_aware"),
    ],
)
def test_a_wrong_value_says_which_variable_has_it(
    runs: list[ClusterConfig], variable: str, value: str, reason: str
) -> None:
    result = _serve(**{variable: value})
    said = f"{result.output} {result.exception}"
    assert result.exit_code != 0
    assert variable in said
    assert reason in said
    assert not runs


def test_a_wrong_flag_is_not_blamed_on_the_environment(runs: list[ClusterConfig]) -> None:
    result = _serve("--port", "http", TANDEM_PORT="8001")
    assert result.exit_code == 2
    assert "--port" in result.output
    assert "TANDEM_PORT" not in result.output


def test_the_port_that_kubernetes_sets_for_a_service_is_explained(runs: list[ClusterConfig]) -> None:
    result = _serve(TANDEM_PORT="tcp://10.0.0.1:8000")
    assert "Kubernetes" in result.output
    assert "enableServiceLinks" in result.output.replace("\n", " ")


def test_a_variable_that_sets_nothing_is_reported_and_the_cluster_starts(runs: list[ClusterConfig]) -> None:
    result = _serve(TANDEM_PROT="8001")
    assert result.exit_code == 0, result.output
    assert "TANDEM_PROT in the environment sets nothing: did you mean TANDEM_PORT?" in result.output
    assert len(runs) == 1


def test_variables_of_clients_and_of_kubernetes_services_are_no_settings_and_not_reported() -> None:
    environment = {
        "TANDEM_API_KEY": "k", "TANDEM_HOME": "/h", "TANDEM_ROUTER_SERVICE_HOST": "10.0.0.1",
        "TANDEM_ROUTER_SERVICE_PORT_HTTP": "8000", "TANDEM_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "TANDEM_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1", "TANDEM_SERVICE_PORT": "8000", "PATH": "/bin",
    }  # fmt: skip
    assert unknown_variables(environment, {"TANDEM_PORT"}) == []
    assert len(unknown_variables({"TANDEM_ROUTER_PORT": "8000", "TANDEM_X": SECRET}, {"TANDEM_PORT"})) == 2
    assert SECRET not in "".join(unknown_variables({"TANDEM_X": SECRET}, ()))


def test_an_empty_variable_is_none(runs: list[ClusterConfig]) -> None:
    assert _serve(TANDEM_PORT="").exit_code == 0
    assert runs[0].router.port == ClusterConfig().router.port
