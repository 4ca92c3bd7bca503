"""`tandem check`: what is wrong with a cluster's file before anything starts, and what it would start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.options import EXIT_FAILED

if TYPE_CHECKING:
    from deploy.config import ClusterConfig


def check(files: Annotated[list[Path], typer.Argument(help="cluster files")]) -> None:
    """Say what is wrong with a cluster file, by file, line, key and reason; ends with status 1 if anything is.

    Also looks at what the file names: model, autoscaler policy, API keys. Starts nothing and needs no free port.

    [dim]tandem check cluster.yaml && tandem serve --config cluster.yaml[/dim]
    """
    from deploy.config import ClusterConfig
    from deploy.yaml_settings import YamlSettingsError, load_yaml_settings

    is_wrong = False
    for file in files:
        try:
            config = load_yaml_settings(ClusterConfig, file)
        except YamlSettingsError as error:
            problems = [str(problem) for problem in error.problems]
        else:
            problems = [f"{file}: {problem}" for problem in _problems(config)]
        for problem in problems:
            typer.echo(problem, err=True)
        if problems:
            is_wrong = True
        else:
            typer.echo(f"{file}: ok, {_summary(config)}")
    if is_wrong:
        raise typer.Exit(EXIT_FAILED)


def _problems(config: ClusterConfig) -> list[str]:
    """What a start would stumble over on this machine, each with its key."""
    from cluster.errors import StartupError
    from deploy.autoscaler.policy_file import load_policy
    from deploy.cluster_plan import require_keys_on_open_address
    from deploy.yaml_settings import YamlSettingsError
    from router.tenants import read_api_keys

    looks: list[tuple[str, Callable[[], object]]] = [("model", partial(_check_model, config.model))]
    if config.draft_model:
        looks.append(("draft_model", partial(_check_model, config.draft_model)))
    looks.append(("router.host", partial(require_keys_on_open_address, config)))
    if (keys := config.router.api_keys_file) is not None:
        looks.append(("router.api_keys_file", partial(read_api_keys, keys)))
    looks.append(("router.ssl_certfile", partial(_check_tls, config)))
    if (template := config.router.chat_template_file) is not None:
        looks.append(("router.chat_template_file", partial(_check_template, template)))
    if (policy := config.autoscale) is not None:
        looks.append(("autoscale", partial(load_policy, policy)))
    problems: list[str] = []
    for key, look in looks:
        try:
            look()
        except (StartupError, YamlSettingsError) as error:
            problems.append(f"{key}: {error}")
    return problems


def _check_tls(config: ClusterConfig) -> None:
    from cluster.front_tls import FrontTls

    tls = FrontTls.of(config.router)
    if tls is not None:
        tls.check()


def _check_model(name_or_path: str) -> None:
    from cluster.model_files import check_model, resolve_model

    check_model(resolve_model(name_or_path))


def _check_template(path: Path) -> None:
    """The model's own special tokens are not known here: empty ones stand for them."""
    from cluster.chat_template import template_of_file

    template_of_file(path, dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), ""))


def _summary(config: ClusterConfig) -> str:
    from cluster.model_files import resolve_model, served_name

    pools = {"prefill": config.prefill, "decode": config.decode, "aggregated": config.aggregated}
    workers = " + ".join(f"{pool.workers} {role}" for role, pool in pools.items() if pool.workers)
    name = config.router.served_model_name or served_name(resolve_model(config.model))
    port = config.router.port or "any free port"
    return f"{name} by {workers} workers at {config.router.host}, {port}"
